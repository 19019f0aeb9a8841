"""`debug watch URL`: follow the heartbeats of a running job; report when progress stops or a rank falls behind."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from titan_ckpt.arguments import check_number
from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.output import flush, write_json, write_text
from titan_ckpt.console.units import format_duration
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.records import Heartbeat
from titan_ckpt.debug.incident.waits import came_further_ns
from titan_ckpt.debug.read.discovery import evidence_files, find_incident_folders
from titan_ckpt.debug.read.reader import read_box_heartbeat
from titan_ckpt.errors import NotFoundError
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store


class AlarmKind(StrEnum):
    """What `watch` notices."""

    GONE = "GONE"  # the kernel has no such process any more
    STOPPED = "STOPPED"  # the kernel has stopped the process
    SILENT = "SILENT"  # a recorder stopped ticking
    STALLED = "STALLED"  # no rank comes further
    BEHIND = "BEHIND"  # a rank stays in a step that others have left


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A problem that a running job has now."""

    kind: AlarmKind
    ranks: tuple[int, ...]
    text: str


def read_heartbeats(store: Store) -> dict[int, Heartbeat]:
    """The heartbeat of every rank that has a black box in the newest incident."""
    found = {}
    for source in evidence_files(store, find_incident_folders(store)):
        if source.suffix == ".box" and source.rank is not None:
            beat = read_box_heartbeat(store, source.path)
            if beat is not None:
                found[source.rank] = beat
    return found


def alarms(beats: Mapping[int, Heartbeat], now_ns: int, *, after_s: float) -> list[Alarm]:
    """What is wrong with these heartbeats at `now_ns`. Pure. Ranks that ended in good order are never named."""
    running = {rank: beat for rank, beat in beats.items() if not beat.is_stopped}
    limit_ns = int(after_s * 1e9)
    silent = tuple(rank for rank, beat in running.items() if now_ns - beat.alive_ns > limit_ns)
    found = []
    if silent:
        age_s = max(now_ns - running[rank].alive_ns for rank in silent) / 1e9
        text = f"{rank_list(silent)} silent for {format_duration(age_s)}: dead, stopped, or the GIL is held"
        found.append(Alarm(kind=AlarmKind.SILENT, ranks=silent, text=text))
    ticking = {rank: beat for rank, beat in running.items() if rank not in silent}
    last_ns = max((came_further_ns(beat) for beat in ticking.values()), default=now_ns)
    has_begun = any(beat.step >= 0 or beat.phase or beat.moves for beat in ticking.values())
    if has_begun and now_ns - last_ns > limit_ns:
        age = format_duration((now_ns - last_ns) / 1e9)
        text = f"no rank came further for {age}: {_phases(ticking)}; run `titan-ckpt debug` on it"
        found.append(Alarm(kind=AlarmKind.STALLED, ranks=tuple(ticking), text=text))
    else:
        found += _behind(ticking, now_ns, limit_ns)
    return found


def _behind(ticking: Mapping[int, Heartbeat], now_ns: int, limit_ns: int) -> list[Alarm]:
    if len(ticking) < 2:
        return []
    newest = max(beat.step for beat in ticking.values())
    slow = tuple(r for r, b in ticking.items() if b.step < newest and now_ns - came_further_ns(b) > limit_ns)
    if not slow or len(slow) == len(ticking):
        return []
    first = ticking[slow[0]]
    text = (
        f"{rank_list(slow)} in step {first.step} ({first.phase or 'between phases'}) while others are in step {newest}"
    )
    return [Alarm(kind=AlarmKind.BEHIND, ranks=slow, text=text)]


def _phases(beats: Mapping[int, Heartbeat]) -> str:
    by_place: dict[tuple[int, str], list[int]] = {}
    for rank, beat in beats.items():
        by_place.setdefault((beat.step, beat.phase), []).append(rank)
    return "; ".join(f"{rank_list(ranks)} {_place(*place)}" for place, ranks in sorted(by_place.items())[:6])


def _place(step: int, phase: str) -> str:
    if step < 0 and not phase:
        return "with no recorded phase"
    return f"in step {step} {phase or 'between phases'}" if step >= 0 else f"in {phase}"


def watch(
    store: Store,
    *,
    after_s: float,
    every_s: float,
    once: bool,
    as_json: bool,
    clock_ns: Callable[[], int] = time.time_ns,
) -> int:
    """Follow until all ranks ended (0) or something is wrong (1)."""
    is_first = True
    while True:
        beats = read_heartbeats(store)
        if not beats and is_first:
            raise NotFoundError(
                f"{store}: no black box (*.box) here; the recorder writes them where the trainer's log says"
            )
        found = alarms(beats, clock_ns(), after_s=after_s)
        _print(beats, found, as_json)
        if found:
            return 1
        if once or all(beat.is_stopped for beat in beats.values()):
            return 0
        is_first = False
        time.sleep(every_s)


def _print(beats: Mapping[int, Heartbeat], found: Sequence[Alarm], as_json: bool) -> None:
    if as_json:
        value = {"ranks": {str(r): asdict(b) for r, b in beats.items()}, "alarms": [asdict(alarm) for alarm in found]}
        write_json(value, indent=None)
    else:
        running = {rank: beat for rank, beat in beats.items() if not beat.is_stopped}
        state = _phases(running) if running else "all ranks ended in good order"
        lines = [f"{len(running)} of {len(beats)} ranks run: {state}", *(f"{a.kind}: {a.text}" for a in found)]
        write_text("\n".join(lines))
    flush()


_EPILOG = """\
examples:
  titan-ckpt debug watch runs/tiny
  titan-ckpt debug watch s3://bucket/run --after 120 --json
"""


def _configure(parser: Parser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run, or the recorder's folder")
    parser.add_argument("--after", type=float, default=30.0, metavar="S", help="seconds without progress (default 30)")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)")
    parser.add_argument("--once", action="store_true", help="look once and end")
    parser.add_argument("--json", action="store_true", help="one JSON object per look")
    parser.excludes("--every", "--once")


def _run(arguments: argparse.Namespace) -> int:
    check_number(arguments.after, "--after", above=0)
    check_number(arguments.every, "--every", above=0)
    store = open_store(arguments.url)
    return watch(store, after_s=arguments.after, every_s=arguments.every, once=arguments.once, as_json=arguments.json)


WATCH = Command(configure=_configure, run=_run)
