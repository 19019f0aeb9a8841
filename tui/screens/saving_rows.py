"""What each rank was doing in a save when the job stopped: the last lines of the checkpoints screen."""

from __future__ import annotations

from collections.abc import Iterator

from titan_ckpt.console.units import format_duration
from titan_ckpt.tui.data.incident import SITUATIONS, Incident
from titan_ckpt.tui.rows import Row, Target, head, ranks_named, row, wrapped

SAVE_PHASES = ("ckpt_stage", "ckpt_upload", "ckpt_commit")


def saving_rows(incident: Incident, width: int = 76) -> Iterator[Row]:
    """What each rank was doing in a save at the moment of the incident, by the recorder's heartbeats and the verdicts."""
    beats = {rank: record.heartbeat for rank, record in incident.run.ranks.items() if record.heartbeat is not None}
    saving: dict[tuple[str, int], list[int]] = {}
    for rank, beat in beats.items():
        if beat.phase in SAVE_PHASES:
            saving.setdefault((beat.phase, beat.step), []).append(rank)
    io = [verdict for verdict in incident.verdicts if verdict.subtype == "checkpoint_io"]
    if not saving and not io:
        return
    yield row()
    yield head(f"in a save when the job stopped ({incident.run.incident or 'this incident'})")
    for (phase, step), ranks in sorted(saving.items(), key=lambda item: (item[0][1], SAVE_PHASES.index(item[0][0]))):
        newest = max(beats[rank].phase_ns for rank in ranks)
        since = max((beats[rank].alive_ns - newest) / 1e9 for rank in ranks)
        for_s = f", for {format_duration(since)}" if since > 0 else ""
        yield row((f"  {phase:<12} ", "warn"), f"step {step}: {ranks_named(ranks)}{for_s}",
                  target=Target(screen=6, rank=ranks[0]), is_problem=phase != "ckpt_stage")  # fmt: skip
    outside = sorted(set(beats) - {rank for ranks in saving.values() for rank in ranks})
    if saving and outside:
        yield row(("  elsewhere    ", "dim"), ranks_named(outside))
    for verdict in io:
        for line in wrapped(f"  {verdict.headline}", width, "    "):
            yield row((line, "bad"), target=Target(screen=6, rank=verdict.culprits[0]), is_problem=True)
    if not saving:
        yield from _place_rows(incident)


def _place_rows(incident: Incident) -> Iterator[Row]:
    """Without heartbeats: where each rank stood, ranks at the same line together."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, state in sorted(incident.states.items()):
        frame = state.frame
        place = f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}" if frame is not None else "no stack"
        places.setdefault((state.kind, place), []).append(rank)
    for (kind, place), ranks in places.items():
        glyph, role, words = SITUATIONS[kind]
        yield row(
            (f"  {glyph} ", role),
            f"{ranks_named(ranks, 4)}: {words}, {place}",
            target=Target(screen=6, rank=ranks[0]),
        )
