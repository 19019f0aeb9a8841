"""Errors that a rank outlived: it waited with its peers, in the same operation, after it had logged them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from titan_ckpt.debug.diagnosis.from_logs.watchdogs import timed_out
from titan_ckpt.debug.diagnosis.looks import TOOLS
from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.incident.frames import main_thread_state, user_frame
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import LogEvent, RankRecord, Run

_OWN = (EventKind.EXCEPTION, EventKind.OOM)
_OF_PEERS = (EventKind.COMM_TIMEOUT, EventKind.COMM_CLOSED)


def with_outlived(run: Run) -> Run:
    """The run; own errors are marked as outlived on ranks whose NCCL watchdog then reported the operation in which a peer waits,
    too: they came there, and their processes were alive when it timed out. Stacks tell better where they were. So are errors
    after which the rank raised another one of an operation that its peers did not end, in no handler of the first."""
    run = replace(run, ranks={rank: _without_caught(record) for rank, record in run.ranks.items()})
    run = _without_seen(_without_victims(run))
    works = {rank: work for rank, record in run.ranks.items() if (work := timed_out(record)) is not None}
    changed: dict[int, RankRecord] = {}
    for rank, work in works.items():
        record = run.ranks[rank]
        error = own_exception(record)
        if record.stacks or error is None or error.source != work.event.source or error.line > work.event.line:
            continue
        if any(work.place == other.place for peer, other in works.items() if peer != rank):
            changed[rank] = _marked(record, error)
    return replace(run, ranks={**run.ranks, **changed}) if changed else run


# What NCCL says of the error of another call, or of another process, on the GPU (ncclUnhandledCudaError).
_OF_NCCL = re.compile(r"unhandled (?:cuda|hip) error|ncclUnhandled(?:Cuda|Hip)Error", re.IGNORECASE)


def _without_victims(run: Run) -> Run:
    """The run; what NCCL alone says of an error on the GPU is no rank's own, if another rank has one, or if most say it. It is
    marked as `felt`: who felt it failed, too."""
    own = {rank: errors for rank, record in run.ranks.items() if (errors := _on_gpu(record))}
    felt = {rank: [error for error in errors if _OF_NCCL.search(error.text)] for rank, errors in own.items()}
    is_all = all(len(felt[rank]) == len(errors) for rank, errors in own.items())
    if is_all and 2 * len(felt) <= run.world_size:
        return run
    for place in range(max(map(len, felt.values()), default=0)):
        run = _with_marked(run, {rank: errors[place] for rank, errors in felt.items() if place < len(errors)}, "felt")
    return run


def _on_gpu(record: RankRecord) -> list[LogEvent]:
    """The error of a rank's own and what is reported of its GPU, each of which may have ended it."""
    own = own_exception(record)
    reported = [event for event in record.events if event.kind == EventKind.DEVICE_ERROR and event is not own]
    return [*([] if own is None else [own]), *reported]


def _without_caught(record: RankRecord) -> RankRecord:
    """The record; own errors before the last error of an operation that no handler raised are marked as outlived."""
    raised = [event for event in record.events if event.kind in _OF_PEERS and "type" in event.values]
    last = {event.source: event.line for event in raised if "cause" not in event.values}
    caught = [e for e in record.events if e.kind in _OWN and "type" in e.values and e.line < last.get(e.source, 0)]
    for error in caught:
        record = _marked(record, error)
    return record


def _without_seen(run: Run) -> Run:
    """The run; own errors are marked as outlived on ranks that a tool saw alive at a line where another rank waits, too."""
    places = {rank: place for rank, record in run.ranks.items() if (place := _seen_at(run, record)) is not None}
    counts = Counter(places.values())
    met = [rank for rank, place in places.items() if counts[place] > 1]
    return _with_marked(run, {rank: error for rank in met if (error := own_exception(run.ranks[rank])) is not None})


def _seen_at(run: Run, record: RankRecord) -> str | None:
    """The program's line at which a tool that looks at live processes saw it wait last; None if its end is known."""
    seen = [stack.main for stack in record.stacks if stack.reason in TOOLS and stack.main is not None]
    if not seen or record.exit is not None or not main_thread_state(seen[-1])[0].is_waiting:
        return None
    frame = user_frame(seen[-1].frames, run.wrappers)
    return frame.place if frame is not None else None


def _with_marked(run: Run, errors: Mapping[int, LogEvent], name: str = "met_peers") -> Run:
    marked = {rank: _marked(run.ranks[rank], error, name) for rank, error in errors.items()}
    return replace(run, ranks={**run.ranks, **marked})


def _marked(record: RankRecord, error: LogEvent, name: str = "met_peers") -> RankRecord:
    assert record.log is not None
    events = (replace(e, values={**e.values, "outlived": "1", name: "1"}) if e is error else e for e in record.events)
    return replace(record, log=replace(record.log, events=tuple(events)))
