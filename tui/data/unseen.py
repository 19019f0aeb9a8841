"""The operation that ranks wait in and that no recorder holds: it is known by their stacks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.tui.data.incident import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """The operation of number `seq`, one after the last recorded one; `op`: its name, "" if no stack tells."""

    seq: int
    op: str
    waiters: frozenset[int]
    awaited: frozenset[int]


def unseen_operation(incident: Incident, lane: Lane) -> Unseen | None:
    """What members of a lane of collectives wait in after its last recorded operation; None if nothing is unseen."""
    after = [edge for edge in incident.edges if edge.group == lane.group and edge.is_after and not edge.is_p2p]
    last = lane.first_seq + lane.row.shape[1] - 1
    if incident.is_p2p(lane) or not after or after[0].seq != last:
        return None
    return Unseen(
        seq=last + 1, op=next(filter(None, (incident.states[edge.waiter].call for edge in after)), ""),
        waiters=frozenset(edge.waiter for edge in after), awaited=frozenset(edge.awaited for edge in after),
    )  # fmt: skip
