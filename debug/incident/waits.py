"""Who waits in which operation, since when, and where the process is: the facts that every report gives. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import DumpKind, FlagKind, VerdictKind
from titan_ckpt.debug.incident.records import COMPLETED, Array, Heartbeat, Operation, RankRecord, Run, Verdict

_QUARTER_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Ranks with the same operation pending; `since_ns` is when the first of them issued it (0: unknown), by the clocks that do
    not differ."""

    ranks: tuple[int, ...]
    operation: Operation
    file: str
    line: int
    since_ns: int

    @property
    def text(self) -> str:
        """`all_reduce #7 of group default_pg (577 Float) at train.py:12`."""
        op = self.operation
        what = " ".join(part for part in (op.sizes, op.dtypes) if part)
        number = f" #{op.seq}" if op.seq >= 0 else ""
        where = f" at {self.file}:{self.line}" if self.file else ""
        return f"{op.op}{number} of group {op.group}{f' ({what})' if what else ''}{where}"


def pending(table: Array) -> Array:
    """Which operations were issued and have not ended."""
    found: Array = ~table["retired"] & (table["state"] != COMPLETED)
    return found


def came_further_ns(beat: Heartbeat) -> int:
    """When a rank last changed its phase or, as its recorder sees without phases, came further in its operations."""
    return max(beat.phase_ns, beat.moved_ns)


def waited_at_the_end(record: RankRecord) -> bool:
    """Whether the last thing that a rank is known to have done is to issue an operation that did not end."""
    created = record.operations["created_ns"]
    return bool(len(created)) and int(created.max()) > 0 and bool(pending(record.operations)[created.argmax()])


def waits(run: Run) -> list[Wait]:
    """What each rank waits in, its oldest pending operation, equal ones together; the most ranks first."""
    alike: dict[tuple[int, ...], list[int]] = {}
    rows: dict[int, int] = {}
    for rank, record in run.ranks.items():
        if not len(record.operations):
            continue
        open_rows = np.flatnonzero(pending(record.operations))
        if len(open_rows):
            rows[rank] = int(open_rows[0])
            entry = record.operations[rows[rank]]
            peer = int(entry["peer"]) if entry["p2p"] else -1
            what = tuple(int(entry[name]) for name in ("group", "seq", "op", "sizes", "dtypes"))
            alike.setdefault((*what, peer), []).append(rank)
    return sorted(
        (_wait(run, ranks, rows) for ranks in alike.values()), key=lambda wait: (-len(wait.ranks), wait.ranks)
    )


def _wait(run: Run, ranks: list[int], rows: dict[int, int]) -> Wait:
    operation = run.operation(ranks[0], rows[ranks[0]])
    frame = user_frame(operation.frames, run.wrappers)
    true_clocks = set(ranks) - _skewed(run)
    created = [int(run.ranks[rank].operations["created_ns"][rows[rank]]) for rank in true_clocks]
    return Wait(
        ranks=tuple(ranks), operation=operation, file=frame.file if frame else "", line=frame.line if frame else 0,
        since_ns=min((time for time in created if time > 0), default=0),
    )  # fmt: skip


def began_ns(run: Run) -> int:
    """When the job stopped going on: the newest moment at which a rank issued what it still waits in; 0 if unknown."""
    return max((wait.since_ns for wait in waits(run)), default=0)


def _skewed(run: Run) -> set[int]:
    """The ranks whose clocks differ from the others'."""
    return {rank for flag in run.flags if flag.flag == FlagKind.CLOCK_SKEW for rank in flag.ranks}


def stopped_s(run: Run, top: Verdict, began_ns: int) -> float:
    """When the job stopped going on, in seconds since the epoch: at `began_ns`, as the function of that name finds it; where
    nothing waits, at the end of the rank that died. 0 if that is not known, or if the job was only slow or runs."""
    if top.verdict in (VerdictKind.STRAGGLER, VerdictKind.RUNNING):
        return 0.0
    dead = run.ranks.get(top.culprits[0]) if top.culprits and top.verdict == VerdictKind.RANK_DIED else None
    if began_ns or dead is None:
        return began_ns / 1e9
    times = (dead.exit.time_s if dead.exit else None, dead.log.last_time_s if dead.log else None)
    known = [time_s for time_s in times if time_s]
    return max(known) - logs_ahead_s(run) if known else 0.0


def process_ended(run: Run, rank: int, top: Verdict) -> bool:
    """Whether the process of a rank has ended, by the records or by the verdict: nothing can be asked of it any more."""
    record = run.ranks[rank]
    return (
        record.exit is not None
        or record.process_state == "gone"
        or record.is_gone
        or (record.heartbeat is not None and record.heartbeat.is_stopped)
        or (run.launcher is not None and run.launcher.code is not None)
        or any("sigterm" in dump.reason for dump in record.dumps)
        or (top.verdict == VerdictKind.RANK_DIED and rank in top.culprits)
    )


def looked_at_ns(record: RankRecord) -> int:
    """The newest moment that a rank's evidence is known to show: its recorder's last tick, else the time of its dump."""
    if record.heartbeat is not None and record.heartbeat.alive_ns:
        return record.heartbeat.alive_ns
    times = [d.time_s for d in record.dumps if d.kind == DumpKind.FLIGHT_RECORDER and d.time_s]
    return int(max(times) * 1e9) if times else 0


def last_sign_ns(run: Run) -> int:
    """The newest moment that any rank recorded: its recorder's last tick, when an operation was issued, started or ended, or the
    newest line of its log; 0 if unknown. The time of a file is none: a copy has another. A rank whose clock differs does not
    count."""
    skewed = _skewed(run)
    records = [record for rank, record in run.ranks.items() if rank not in skewed]
    beats = [record.heartbeat.alive_ns for record in records if record.heartbeat is not None]
    logged_s = max((r.log.last_time_s for r in records if r.log and r.log.last_time_s), default=0.0)
    line_ns = int((logged_s - logs_ahead_s(run)) * 1e9) if logged_s else 0
    return max([*beats, line_ns, _newest_ns(records)])


def _newest_ns(records: Iterable[RankRecord]) -> int:
    """When the newest operation was issued, started or ended; 0 if unknown."""
    columns = (
        record.operations[name]
        for record in records
        for name in ("created_ns", "started_ns", "completed_ns")
        if len(record.operations)
    )
    return max((int(column.max()) for column in columns), default=0)


def logs_ahead_s(run: Run) -> float:
    """How far the times of the logs, which are read as UTC, are ahead of the recorders': whole quarters of an hour, by the newest
    training step and the newest operation. 0 where either is not known."""
    steps = [
        max(record.log.step_times.values()) for record in run.ranks.values() if record.log and record.log.step_times
    ]
    newest_ns = _newest_ns(run.ranks.values())
    return round((max(steps) - newest_ns / 1e9) / _QUARTER_S) * _QUARTER_S if steps and newest_ns else 0.0


def places(run: Run, ranks: Iterable[int]) -> list[str]:
    """`rank 3: host node17, pid 9192`, of those ranks whose host or process is known."""
    found = []
    for rank in ranks:
        record = run.ranks.get(rank)
        parts = (
            [f"host {record.host}" if record.host else "", f"pid {record.pid}" if record.pid else ""] if record else []
        )
        if any(parts):
            found.append(f"rank {rank}: " + ", ".join(part for part in parts if part))
    return found
