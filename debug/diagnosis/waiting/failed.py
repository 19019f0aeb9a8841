"""Collectives that ranks left with an error of the communication while others still wait in them. Pure."""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.rank_death import logged_on
from titan_ckpt.debug.incident.records import COMPLETED, Run


def failed_rows(run: Run, lane: Lane) -> dict[int, int]:
    """The newest collective of members at which it failed, by rank: the row among its operations.

    A rank that logged an error of the communication left it, as gloo's `retired` also says, while others still wait in it.
    """
    found = {}
    for place in np.flatnonzero(lane.done & np.isin(lane.last, lane.pending[lane.pending >= 0])).tolist():
        record, at = run.ranks[lane.members[place]], int(lane.row[place, int(lane.last[place]) - lane.first_seq])
        errors = (event for event in record.events if event.kind.is_communication)
        if record.operations["state"][at] != COMPLETED and any(not logged_on(record, event) for event in errors):
            found[lane.members[place]] = at
    return found
