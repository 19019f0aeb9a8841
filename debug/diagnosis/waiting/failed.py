"""Operations that ranks left with an error of the communication, while others may still wait in them. Pure."""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.rank_death import logged_on
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import COMPLETED, RankRecord, Run
from titan_ckpt.debug.incident.waits import waited_at_the_end


def failed_rows(run: Run, lane: Lane) -> dict[int, int]:
    """The newest collective of members at which it failed, by rank: the row among its operations.

    A rank that logged an error of the communication left it, as gloo's `retired` also says, while others still wait in it.
    """
    found = {}
    for place in np.flatnonzero(lane.done & np.isin(lane.last, lane.pending[lane.pending >= 0])).tolist():
        record, at = run.ranks[lane.members[place]], int(lane.row[place, int(lane.last[place]) - lane.first_seq])
        if record.operations["state"][at] != COMPLETED and left_with_error(record):
            found[lane.members[place]] = at
    return found


def left_with_error(record: RankRecord) -> bool:
    """Whether a rank logged an error of the communication, and nothing that shows that it went on."""
    return any(event.kind.is_communication and not logged_on(record, event) for event in record.events)


def raised_rows(run: Run) -> dict[int, int]:
    """The newest operation of ranks that is recorded as pending, but which raised an error of the communication, by rank: the row
    among its operations. The traceback passes the line that issued it."""
    found = {}
    for rank, record in run.ranks.items():
        at = int(record.operations["created_ns"].argmax()) if waited_at_the_end(record) else -1
        if at >= 0 and _raised_in(run, record, at):
            found[rank] = at
    return found


def _raised_in(run: Run, record: RankRecord, at: int) -> bool:
    errors = [event for event in record.events if event.kind.is_communication and event.calls]
    line = user_frame(run.operation(record.rank, at).frames, run.wrappers) if errors else None
    return line is not None and any(line in event.calls and not logged_on(record, event) for event in errors)
