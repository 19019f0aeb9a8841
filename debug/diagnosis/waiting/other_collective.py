"""Whether a rank that others wait for waits itself, in another collective than theirs, by its stack. Pure."""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge, row_of
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import Run, Situation
from titan_ckpt.debug.incident.waits import pending


def is_elsewhere(run: Run, state: Situation, edge: Edge) -> bool:
    """Whether the stack of a rank that left no dump shows it in another collective than the one it is awaited in. (A black box is
    none: it lacks what C++ issued.)"""
    if run.ranks[state.rank].has_flight_recorder or has_pending(run, state.rank):
        return False
    mine, awaited = _bare(state.call), _bare(operation_waited_for(run, edge))
    if mine == "wait":
        return _is_alone(run, state, edge)
    return bool(mine) and bool(awaited) and mine not in awaited and awaited not in mine


LEAST_OTHERS = 2


def _is_alone(run: Run, state: Situation, edge: Edge) -> bool:
    """Whether a rank waits at a line where it is alone, for what it does not say, and all others in one operation for it."""
    if state.frame is None or edge.is_p2p or edge.seq < 0:
        return False
    tables = {rank: record.operations for rank, record in run.ranks.items() if rank != state.rank}
    rows = {
        rank: np.flatnonzero((table["group"] == edge.group) & (table["seq"] == edge.seq) & pending(table))
        for rank, table in tables.items()
    }
    if len(rows) < LEAST_OTHERS or not all(map(len, rows.values())):
        return False
    frames = (user_frame(run.operation(rank, int(of[-1])).frames, run.wrappers) for rank, of in rows.items())
    return all(frame is not None and frame.place != state.frame.place for frame in frames)


def _bare(op: str) -> str:
    return op.replace("_", "").replace("intotensor", "").replace("tensor", "").replace("coalesced", "")


def has_pending(run: Run, rank: int) -> bool:
    """Whether a dump shows an operation of a rank that has not ended."""
    return bool(pending(run.ranks[rank].operations).any())


def operation_waited_for(run: Run, edge: Edge | None) -> str:
    """The name of the operation that a rank waits in; "" if its dump does not hold it."""
    if edge is None or edge.is_after:
        return ""
    row = row_of(run, edge)
    return "" if row is None else run.names.ops[run.ranks[edge.waiter].operations["op"][row]]
