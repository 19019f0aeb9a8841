"""An incident as a trace for Perfetto and chrome://tracing: a process for each rank, a track for each of its process groups.

The format is Chrome's "Trace Event Format" (JSON object form): complete events `X` with `ts` and `dur` in microseconds, and
metadata events `M` that name processes and tracks. Operations that overlap in one group get tracks of their own, since a viewer
takes overlapping events of one track for nested ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import OperationState
from titan_ckpt.debug.incident.records import Array, RankRecord, Run, Verdict
from titan_ckpt.debug.incident.waits import last_sign_ns, pending
from titan_ckpt.debug.report.facts import HANGS, open_word

MOST_EVENTS = 1_000_000
_TRACKS = 1 << 12  # track numbers kept for one group


def num_left_out(run: Run) -> int:
    """How many of the oldest operations a trace leaves out to stay within `MOST_EVENTS`."""
    most = _most_per_rank(run)
    return sum(max(len(record.operations) - most, 0) for record in run.ranks.values())


def trace_parts(run: Run, top: Verdict, *, mark: str) -> Iterator[str]:
    """The trace as JSON text, in parts. `top`: the verdict; `mark` is noted as the writer."""
    start_ns = _first_ns(run)
    about = {"written_by": mark, "incident": run.incident, "ranks": run.world_size, "starts_at_ns": start_ns}
    yield f'{{"otherData": {json.dumps(about)}, "displayTimeUnit": "ms", "traceEvents": ['
    comma = ""
    end_ns, most = last_sign_ns(run), _most_per_rank(run)
    for rank, record in run.ranks.items():
        events = list(_events(run, record, start_ns, end_ns, most, open_word(top)))
        if events:
            yield comma + ",\n".join(json.dumps(event) for event in [_process(rank, record), *events])
            comma = ",\n"
    yield "]}\n"


def _most_per_rank(run: Run) -> int:
    return MOST_EVENTS // max(len(run.ranks), 1)


def _first_ns(run: Run) -> int:
    times = [record.operations["created_ns"] for record in run.ranks.values() if len(record.operations)]
    return min((int(column[column > 0].min()) for column in times if (column > 0).any()), default=0)


def _process(rank: int, record: RankRecord) -> dict[str, Any]:
    place = ":".join(part for part in (record.host, str(record.pid or "")) if part)
    return _named("process_name", rank, 0, f"rank {rank}{f' ({place})' if place else ''}")


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _events(
    run: Run, record: RankRecord, start_ns: int, end_ns: int, most: int, unended: str
) -> Iterator[dict[str, Any]]:
    """The rank's operations whose time is known, the newest `most`; before the first of each track, the track's name.

    `unended`: what is said of one without an end.
    """
    first = max(len(record.operations) - most, 0)
    table = record.operations[first:]
    begins, ends = _spans(table, end_ns)
    busy: dict[int, list[int]] = {}
    for row in np.argsort(begins, kind="stable"):
        begin, end, group = int(begins[row]), int(ends[row]), int(table["group"][row])
        if not begin:
            continue
        lanes = busy.setdefault(group, [])
        lane = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
        track = group * _TRACKS + lane + 1
        if lane == len(lanes):
            yield _named("thread_name", record.rank, track, f"group {run.groups[group]}")
        lanes[lane : lane + 1] = [end]
        yield _event(run, record.rank, first + int(row), track, begin - start_ns, end - begin, unended)


def _spans(table: Array, end_ns: int) -> tuple[Array, Array]:
    """When each operation began and ended (ns); one that is pending ends with the job's last sign of life."""
    begins = np.where(table["started_ns"] > 0, table["started_ns"], table["created_ns"])
    ends = np.where(table["completed_ns"] > 0, table["completed_ns"], np.where(pending(table), end_ns, begins))
    return begins, np.maximum(ends, begins)


def _event(run: Run, rank: int, row: int, track: int, begin_ns: int, took_ns: int, unended: str) -> dict[str, Any]:
    operation = run.operation(rank, row)
    frame = user_frame(operation.frames, run.wrappers)
    is_pending = not operation.retired and operation.state != OperationState.COMPLETED
    facts = {
        "seq": operation.seq if operation.seq >= 0 else None,
        "peer": operation.peer if operation.p2p and operation.peer >= 0 else None,
        "sizes": operation.sizes,
        "dtypes": operation.dtypes,
        "state": operation.state if is_pending else OperationState.COMPLETED,
        "line": frame.place if frame else "",
    }
    number = f" #{operation.seq}" if operation.seq >= 0 else ""
    return {
        "ph": "X",
        "name": f"{operation.op}{number}{f' ({unended})' if is_pending else ''}",
        "cat": "done" if not is_pending else "pending" if unended == HANGS else "open",
        "pid": rank,
        "tid": track,
        "ts": begin_ns / 1e3,
        "dur": max(took_ns / 1e3, 1.0),
        "args": {name: value for name, value in facts.items() if value not in ("", None)},
        **({"cname": "terrible"} if is_pending and unended == HANGS else {}),
    }
