"""Whether a rank left how its process ended. Pure."""

from __future__ import annotations

from titan_ckpt.debug.diagnosis.rank_death import was_told
from titan_ckpt.debug.incident.records import RankRecord, Run


def has_end(record: RankRecord) -> bool:
    """Whether a recorder left how its process ended: in order, told to, or by an exception."""
    is_stopped = record.heartbeat is not None and record.heartbeat.is_stopped
    return is_stopped or was_told(record) or had_exception(record)


def had_exception(record: RankRecord) -> bool:
    """Whether the recorder dumped because of an exception."""
    reasons = [*(dump.reason for dump in record.dumps), *(stack.reason for stack in record.stacks)]
    return any("exception" in reason for reason in reasons)


def left_gone(record: RankRecord) -> bool:
    """Whether the kernel has no such process any more, and nothing tells how it ended."""
    is_gone = record.is_gone or record.process_state == "gone"
    return is_gone and record.exit is None and not has_end(record)


def all_left_gone(run: Run) -> bool:
    """Whether that is so of every rank: then none of them is known to have gone first."""
    return bool(run.ranks) and all(map(left_gone, run.ranks.values()))
