"""A rank that ended in order although others wait for it: is it wrong, or are they? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Run, Situation, Verdict


def as_many_ended(run: Run, edge: Edge, edges: Sequence[Edge], states: Mapping[int, Situation]) -> bool:
    """Whether at least half of a group's members ended in order at one number: that they are wrong is then not shown."""
    awaited = {other.awaited for other in edges if (other.group, other.seq) == (edge.group, edge.seq)}
    ended = [rank for rank in awaited if states[rank].kind == RankState.FINISHED]
    lasts = {_last_number(run, rank, edge.group) for rank in ended}
    return len(lasts) == 1 and 2 * len(ended) >= len(run.members(edge.group))


def _last_number(run: Run, rank: int, group: int) -> int:
    rows = run.ranks[rank].operations
    return int(rows["seq"][rows["group"] == group].max(initial=-1))


def astray(root: int, edges: Sequence[Edge]) -> int | None:
    """The one rank that sends to, or receives from, a rank that has ended, while another waits for its own send or recv."""
    direct = [edge for edge in edges if edge.awaited == root]
    waiters = {edge.waiter for edge in direct}
    is_awaited = any(edge.is_p2p and edge.awaited in waiters for edge in edges)
    return min(waiters) if len(waiters) == 1 and is_awaited and all(edge.is_p2p for edge in direct) else None


def addressed_wrongly(
    run: Run, rank: int, ended: int, chain: tuple[tuple[int, int], ...], states: Mapping[int, Situation]
) -> Verdict:
    """A send or recv with the wrong peer: that peer ended without it, and the right one waits."""
    right = next(waiter for waiter, awaited in chain if awaited == rank)
    return Verdict(
        verdict=VerdictKind.P2P_MISSING_PEER, culprits=(rank,),
        victims=tuple(sorted({waiter for waiter, _ in chain} - {rank})), step=run.step_of(rank),
        confidence=Basis.ENDED_WITHOUT_IT.confidence,
        headline=f"rank {rank} waits{states[rank].where} for rank {ended}, which ended normally, while rank {right} waits for "
        f"rank {rank}: the send or recv has the wrong peer",
        evidence=(*states[rank].evidence, *states[right].evidence[:1], *states[ended].evidence[:1]),
        chain=chain, next_steps=("check which peer that line passes (dst=, src=)",),
    )  # fmt: skip
