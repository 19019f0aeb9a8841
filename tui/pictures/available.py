"""What evidence, checkpoints, logs and metrics there are, as rows of screen 1, and what limits them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_ckpt.debug.incident.kinds import DumpKind
from titan_ckpt.debug.incident.records import Run
from titan_ckpt.tui.rows import Role, Row, RowLink, TextSpan, counted, head, ranks_named, row, wrapped
from titan_ckpt.tui.session.session import Loadable, Session


def data_rows(session: Session, width: int) -> Iterator[Row]:
    """What was found, by kind, and which kinds were not."""
    yield head("available data")
    incident = session.incident.value
    if incident is not None:
        yield from _evidence_counts(incident.run)
    checkpoints, logs, metrics = session.checkpoints, session.logs, session.metrics
    if checkpoints.value is not None:
        committed = checkpoints.value.newest()
        newest = f"; newest committed: step {committed}" if committed is not None else ""
        text = checkpoints.value.counts(", ")
        for line in wrapped(f"  checkpoints: {text or 'none'}{newest}", width, "    "):
            yield row(line, link=RowLink(screen=7))
    if logs.value is not None:
        more = " so far" if logs.value.is_head else ""
        yield row(
            f"  log lines: {counted(len(logs.value.files.files), 'file')}, {counted(len(logs.value), 'line')}{more}",
            link=RowLink(screen=5),
        )
        for path, problem in logs.value.problems:
            for i, line in enumerate(wrapped(problem if path in problem else f"{path}: {problem}", width - 6, "  ")):
                yield row(("    ! " if i == 0 else "      ", Role.BAD), line, is_problem=i == 0, link=RowLink(screen=5))
    if metrics.value is not None:
        yield row(f"  metrics: {counted(len(metrics.value.steps), 'step')}", link=RowLink(screen=8))
    parts: dict[str, Loadable[Any]] = {"checkpoints": checkpoints, "log lines": logs, "metrics": metrics}
    for name, part in parts.items():
        if part.value is None and (part.is_loading or part.error):
            yield row((f"  {name}: {part.text}", Role.DIM))
    missing = [name for name, part in parts.items() if part.value is None and not (part.is_loading or part.error)]
    if missing:
        yield row((f"  not here: {', '.join(missing)}", Role.DIM))


def _evidence_counts(run: Run) -> Iterator[Row]:
    world = run.world_size
    dumps, boxes = (
        [r for r, record in run.ranks.items() if any(dump.kind == kind for dump in record.dumps)]
        for kind in (DumpKind.FLIGHT_RECORDER, DumpKind.BLACK_BOX)
    )
    kinds = {
        **({"dumps": dumps} if dumps or not boxes else {}),
        **({"black boxes": boxes} if boxes else {}),
        "stacks": [r for r, record in run.ranks.items() if record.stacks],
        "logs": [r for r, record in run.ranks.items() if record.log],
        "heartbeats": [r for r, record in run.ranks.items() if record.heartbeat],
        "exit codes": [r for r, record in run.ranks.items() if record.exit],
    }
    for name, ranks in kinds.items():
        missing = sorted(set(run.ranks) - set(ranks))
        parts: list[TextSpan] = [
            (f"  {name}: {len(ranks):,} of {counted(world, 'rank')}", Role.PLAIN if ranks else Role.DIM)
        ]
        if ranks and missing:
            parts.append((f"  missing: {ranks_named(missing, 6)}", Role.WARN))
        yield row(*parts)


def flag_rows(run: Run, width: int) -> Iterator[Row]:
    """What limits the evidence."""
    if run.flags:
        yield head("limits of the evidence")
    for flag in run.flags:
        ranks = f" ({ranks_named(flag.ranks, 6)})" if flag.ranks else ""
        source = f" [{flag.source}]" if flag.source else ""
        is_damage = flag.flag in ("DUMP_CORRUPT", "DUMP_MISSING")
        for i, line in enumerate(wrapped(f"{flag.flag}: {flag.text}{ranks}{source}", width - 4, "  ")):
            yield row(
                ("  ! " if i == 0 else "    ", Role.BAD if flag.flag == "DUMP_CORRUPT" else Role.WARN),
                line,
                is_problem=is_damage and i == 0,
            )
