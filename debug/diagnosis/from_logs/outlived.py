"""Errors that a rank outlived: it waited with its peers, in the same operation, after it had logged them. Pure."""

from __future__ import annotations

from dataclasses import replace

from titan_ckpt.debug.diagnosis.from_logs.watchdogs import timed_out
from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.incident.records import LogEvent, RankRecord, Run


def with_outlived(run: Run) -> Run:
    """The run; own errors are marked as outlived on ranks whose NCCL watchdog then reported the operation in which a peer waits,
    too: they came there, and their processes were alive when it timed out. Stacks tell better where they were."""
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


def _marked(record: RankRecord, error: LogEvent) -> RankRecord:
    assert record.log is not None
    events = (replace(e, values={**e.values, "outlived": "1"}) if e is error else e for e in record.events)
    return replace(record, log=replace(record.log, events=tuple(events)))
