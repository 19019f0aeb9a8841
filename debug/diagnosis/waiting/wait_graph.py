"""Who waits for whom: edges from collectives, P2P and the store; sinks are root causes, cycles are deadlocks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.waiting.device_order import (
    Part,
    has_order,
    heads,
    mixed_ranks,
    part_of,
    ran_ahead,
    ranks_behind,
)
from titan_ckpt.debug.diagnosis.waiting.failed import failed_rows
from titan_ckpt.debug.incident.kinds import RankState, Subtype
from titan_ckpt.debug.incident.operation_table import operation_blocks
from titan_ckpt.debug.incident.records import COMPLETED, RECV, SCHEDULED, SEND, STARTED, Array, Run, Situation
from titan_ckpt.debug.incident.waits import pending

MAX_AWAITED = 32  # laggards kept per waiting rank: the furthest behind are the ones that matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`waiter` cannot go on before `awaited` does something in `group` (a position, -1 unknown).

    `is_after`: it waits in an operation that the evidence does not hold, later than `seq`, which is done. `is_queued`: `awaited`
    has issued it, but its device waits in another one.
    """

    waiter: int
    awaited: int
    group: int
    seq: int
    is_p2p: bool = False
    direction: int = 0  # SEND or RECV
    is_inferred: bool = False
    is_after: bool = False
    is_queued: bool = False


def row_of(run: Run, edge: Edge) -> int | None:
    """The row of the operation that an edge's rank waits in; messages are numbered for each pair."""
    table = run.ranks[edge.waiter].operations
    found = (table["group"] == edge.group) & (table["seq"] == edge.seq) & ((table["p2p"] != 0) == edge.is_p2p)
    if edge.is_p2p:
        found &= (table["peer"] == edge.awaited) & (not edge.direction or table["p2p"] == edge.direction)
    rows = found.nonzero()[0]
    return int(rows[-1]) if len(rows) else None


def wait_edges(run: Run, lanes: Sequence[Lane], states: Mapping[int, Situation]) -> list[Edge]:
    """Every wait that the evidence shows."""
    edges = _edges(run, lanes, states)
    by_device = on_device(run, states, edges)
    return edges if by_device == states else _edges(run, lanes, by_device)


def on_device(run: Run, states: Mapping[int, Situation], edges: Sequence[Edge]) -> dict[int, Situation]:
    """The states, where ranks of which nothing is awaited that they have not issued wait by their devices, whatever their main
    threads do meanwhile."""
    awaited = {edge.awaited for edge in edges if edge.is_queued} - {
        edge.awaited for edge in edges if not edge.is_queued
    }
    ahead = [rank for rank in awaited if rank in states and ran_ahead(run, rank, states[rank])]
    waiting = {rank: replace(states[rank], kind=RankState.IN_COLLECTIVE, detail=Subtype.NONE) for rank in ahead}
    return {**states, **waiting}


def _edges(run: Run, lanes: Sequence[Lane], states: Mapping[int, Situation]) -> list[Edge]:
    edges = [edge for lane in lanes for edge in _collective_edges(run, lane, states)]
    edges += [edge for lane in lanes for edge in _behind_other_groups(run, lane, states)]
    edges += _p2p_edges(run, states)
    waiting = {edge.waiter for edge in edges}
    edges += [edge for edge in _unknown_peers(run, states) if edge.waiter not in waiting]
    return _at_heads(run, states, edges + _queued_edges(run, states, {edge.waiter for edge in edges}))


def _at_heads(run: Run, states: Mapping[int, Situation], edges: list[Edge]) -> list[Edge]:
    """The waits in what devices are at: where others have issued that, but queued behind another operation, the wait is for
    them. (NCCL only.)"""
    mixed = mixed_ranks(run)
    if not mixed:
        return edges
    at = {rank: heads(run, rank) for rank in mixed if can_wait(states[rank])}
    kept = [edge for edge in edges if edge.waiter not in at or _part(edge) in at[edge.waiter]]
    behind = ranks_behind(run, mixed, MAX_AWAITED)
    resolved = {edge.waiter for edge in kept}
    for rank, record in run.ranks.items():
        if rank not in resolved and has_order(record) and can_wait(states[rank]):
            for part in at.get(rank) or heads(run, rank):
                kept += [
                    Edge(waiter=rank, awaited=other, group=part[0], seq=part[1], is_p2p=part[2] >= 0, is_queued=True)
                    for other in behind.get(part, ())
                    if other != rank
                ]
    return kept or edges


def _part(edge: Edge) -> Part:
    """The operation that an edge's rank waits in."""
    direction = edge.direction if edge.is_p2p else 0
    return part_of(edge.waiter, edge.group, edge.seq, direction, edge.awaited)


def _collective_edges(run: Run, lane: Lane, states: Mapping[int, Situation]) -> list[Edge]:
    """Members with a pending operation wait for the members that have not issued it: in the first that somebody is missing from.
    What is queued behind that one waits for it."""
    newest, least = int(lane.last.max()), int(lane.last.min())
    edges = []
    behind: dict[int, list[int]] = {}
    failed = failed_rows(run, lane)
    for place, (rank, seq, done) in enumerate(zip(lane.members, lane.last.tolist(), lane.done.tolist(), strict=True)):
        state = states[rank]
        if seq < 0 or not can_wait(state) or (done and state.kind != RankState.IN_COLLECTIVE):
            continue
        if seq < newest and done:
            continue  # this group is not where it waits
        at = seq if done else _waits_at(run, lane, place, least)
        if at not in behind:
            behind[at] = _behind(lane, at)
        is_after = done and rank not in failed
        edges += [Edge(waiter=rank, awaited=other, group=lane.group, seq=at, is_after=is_after) for other in behind[at]]
    return edges or _edges_to_stopped(lane, states)


def _behind_other_groups(run: Run, lane: Lane, states: Mapping[int, Situation]) -> list[Edge]:
    """Members whose device runs a collective that all have issued wait for those whose device has not come to it: an earlier
    operation, of another group or a send or recv, is not done there. (NCCL only.)"""
    seq = int(lane.last.min())
    if seq < 0 or seq != int(lane.last.max()) or lane.is_silent.any():
        return []
    rows = lane.seen_at(seq)
    at = {rank: int(run.ranks[rank].operations["state"][row]) for rank, row in rows.items()}
    queued = [rank for rank, row in rows.items() if is_queued(run, rank, row)]
    return [
        Edge(waiter=rank, awaited=other, group=lane.group, seq=seq)
        for other in queued
        for rank in rows
        if at[rank] == STARTED and can_wait(states[rank])
    ]


def is_queued(run: Run, rank: int, row: int) -> bool:
    """Whether a rank's device has not come to an operation because an earlier one, of another group or a send or recv, is not
    done."""
    table = run.ranks[rank].operations
    if table["state"][row] != SCHEDULED or table["retired"][row] or not table["state"].any():
        return False
    other = (table["group"] != table["group"][row]) | (table["p2p"] != 0)
    return bool((pending(table) & other)[:row].any())


_STOPPED = (RankState.DEAD, RankState.FROZEN, RankState.GIL_HELD)


def _edges_to_stopped(lane: Lane, states: Mapping[int, Situation]) -> list[Edge]:
    """Members with an operation pending that all have issued wait for those members in it whose process has stopped."""
    first_of = {rank: seq for rank, seq in zip(lane.members, lane.pending.tolist(), strict=True) if seq >= 0}
    stopped = [rank for rank in first_of if states[rank].kind in _STOPPED]
    return [
        Edge(waiter=rank, awaited=other, group=lane.group, seq=seq, is_inferred=True)
        for other in stopped
        for rank, seq in first_of.items()
        if seq == first_of[other] and can_wait(states[rank])
    ]


def _waits_at(run: Run, lane: Lane, place: int, least: int) -> int:
    """The lowest number above `least` that a member has issued and not ended; its newest if all of these are lower."""
    first = int(lane.pending[place])
    if first > least:
        return first
    start = max(least + 1, lane.first_seq) - lane.first_seq
    rows = lane.row[place, start:]
    columns = np.flatnonzero(rows >= 0)
    is_open = pending(run.ranks[lane.members[place]].operations[rows[columns]])
    return lane.first_seq + start + int(columns[is_open][0]) if is_open.any() else int(lane.last[place])


def _behind(lane: Lane, seq: int) -> list[int]:
    """The members that have not issued `seq`; the furthest behind where they are many."""
    behind = np.flatnonzero(lane.last < seq)
    if len(behind) > MAX_AWAITED:
        behind = behind[np.argsort(lane.last[behind], kind="stable")[:MAX_AWAITED]]
    return [lane.members[i] for i in behind.tolist()]


def can_wait(state: Situation) -> bool:
    """Whether a rank with a pending operation may be waiting for it. A stack that ends in user code may be at
    `work.wait()` or `loss.item()`, which leave no frame of their own; the source line shows it, if recorded."""
    if state.kind in (RankState.DEAD, RankState.FROZEN, RankState.GIL_HELD, RankState.FINISHED):
        return False
    if state.kind != RankState.ON_CPU:
        return True
    text = state.frame.text if state.frame else ""
    return "wait" in text if text else state.detail == Subtype.USER_CODE


def _p2p_edges(run: Run, states: Mapping[int, Situation]) -> list[Edge]:
    """Pending sends and receives whose other half the peer has not issued."""
    newest: dict[_Half, int] = {}
    pending: dict[_Half, int] = {}
    ranks = np.fromiter(run.ranks, np.int64, len(run.ranks))
    for block in operation_blocks(run.ranks):
        places = np.flatnonzero(block.table["p2p"])
        if not len(places):
            continue
        table, owner = block.table[places], ranks[block.owner[places]]
        columns = [owner, *(table[name] for name in ("p2p", "peer", "group", "seq")), _is_pending(table)]
        for *half, seq, is_open in zip(*(column.tolist() for column in columns), strict=True):
            key = (half[0], half[1], half[2], half[3])
            newest[key] = max(seq, newest.get(key, seq))
            if is_open:
                pending[key] = min(seq, pending.get(key, seq))
    return [
        Edge(waiter=rank, awaited=peer, group=group, seq=seq, is_p2p=True, direction=direction)
        for (rank, direction, peer, group), seq in pending.items()
        if peer in run.ranks and can_wait(states[rank])
        and not _is_issued((peer, RECV if direction == SEND else SEND, rank, group), seq, newest, pending)
    ]  # fmt: skip


_Half: TypeAlias = tuple[int, int, int, int]  # rank, direction, peer, group


def _is_issued(other: _Half, seq: int, newest: Mapping[_Half, int], pending: Mapping[_Half, int]) -> bool:
    """Whether message `seq` of a pair is among the other side's; where a full ring has lost the numbers, whether one of its
    halves is pending too."""
    if seq > 0 and newest.get(other, 0) >= 0:
        return newest.get(other, 0) >= seq
    return other in pending


def _queued_edges(run: Run, states: Mapping[int, Situation], blocked: set[int]) -> list[Edge]:
    """A send or recv that both sides have put on their devices, where the peer's is queued behind an operation that is itself
    blocked: so the rank waits for that peer. (NCCL only: gloo transfers without an order.)"""
    edges = []
    for rank, record in run.ranks.items():
        if rank in blocked or not can_wait(states[rank]):
            continue
        for row in pending_p2p(run, rank):
            mine = record.operations[row]
            peer = int(mine["peer"])
            if peer in blocked and peer in run.ranks and _is_queued(run.ranks[peer].operations, mine, rank):
                group, seq, direction = (int(mine[name]) for name in ("group", "seq", "p2p"))
                edges.append(Edge(waiter=rank, awaited=peer, group=group, seq=seq, is_p2p=True, direction=direction))
    return edges


def _is_queued(theirs: Array, mine: Array, rank: int) -> bool:
    """Whether the peer's half of `mine` is pending behind another pending operation of the peer."""
    if not theirs["state"].any():
        return False
    pending = np.flatnonzero(~theirs["retired"] & (theirs["state"] != COMPLETED))
    other = SEND + RECV - int(mine["p2p"])
    same = (theirs["p2p"] == other) & (theirs["peer"] == rank) & (theirs["group"] == mine["group"])
    halves = np.flatnonzero(same & (theirs["seq"] == mine["seq"]))
    return len(halves) > 0 and len(pending) > 0 and halves[-1] in pending and int(pending[0]) < int(halves[-1])


def pending_p2p(run: Run, rank: int) -> list[int]:
    """Rows of sends and receives that have not returned, newest last."""
    if not len(run.ranks[rank].operations):
        return []
    rows: list[int] = np.flatnonzero(_is_pending(run.ranks[rank].operations)).tolist()
    return rows


def _is_pending(table: Array) -> Array:
    pending: Array = (table["p2p"] != 0) & ~table["retired"] & (table["state"] != COMPLETED) & (table["peer"] >= 0)
    return pending


def _unknown_peers(run: Run, states: Mapping[int, Situation]) -> list[Edge]:
    """A rank inside send or recv whose peer is not recorded (as in gloo's dumps): in a pipeline it is the rank with the
    same place in another group of the same size, if only one such rank is not itself in P2P."""
    edges = []
    blocked = [rank for rank, state in states.items() if state.kind == RankState.IN_P2P]
    for rank in blocked:
        if pending_p2p(run, rank):
            continue
        peers = [peer for peer in _same_place(run, rank) if states[peer].kind != RankState.IN_P2P]
        if len(peers) == 1:
            edges.append(Edge(waiter=rank, awaited=peers[0], group=-1, seq=-1, is_p2p=True, is_inferred=True))
    return edges


def _same_place(run: Run, rank: int) -> list[int]:
    groups = [run.members(position) for position in range(len(run.groups))]
    mine = [members for members in groups if rank in members and 1 < len(members) < run.world_size]
    return sorted(
        {
            other[members.index(rank)]
            for members in mine
            for other in groups
            if len(other) == len(members) and not set(other) & set(members)
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """`sinks`: awaited ranks that wait for no rank. `cycles`: sets of ranks that wait only for each other."""

    sinks: tuple[int, ...]
    cycles: tuple[tuple[int, ...], ...]


def roots(edges: Iterable[Edge]) -> Roots:
    """The ends of all waiting, found as strongly connected components without a way out (Tarjan, iterative)."""
    successors: dict[int, set[int]] = defaultdict(set)
    nodes: set[int] = set()
    for edge in edges:
        successors[edge.waiter].add(edge.awaited)
        nodes |= {edge.waiter, edge.awaited}
    sinks, cycles = [], []
    for component in _components(nodes, successors):
        leaves = {target for node in component for target in successors[node]} - component
        if leaves:
            continue
        if len(component) == 1:
            sinks.append(next(iter(component)))
        else:
            cycles.append(tuple(sorted(component)))
    return Roots(sinks=tuple(sorted(sinks)), cycles=tuple(sorted(cycles)))


def _components(nodes: Iterable[int], successors: Mapping[int, set[int]]) -> list[set[int]]:
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[set[int]] = []
    for start in sorted(nodes):
        if start in index:
            continue
        work = [(start, iter(sorted(successors.get(start, ()))))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(successors.get(target, ())))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: set[int] = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    found.append(component)
    return found


def shortest_chain(edges: Iterable[Edge], root: int, limit: int = 64) -> tuple[tuple[int, int], ...]:
    """(waiter, awaited) pairs that lead to `root`, nearest first: one edge per waiting rank."""
    waiters: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        waiters[edge.awaited].append(edge.waiter)
    chain: list[tuple[int, int]] = []
    seen, frontier = {root}, [root]
    while frontier and len(chain) < limit:
        following = []
        for rank in frontier:
            for waiter in sorted(set(waiters[rank]) - seen):
                chain.append((waiter, rank))
                seen.add(waiter)
                following.append(waiter)
        frontier = following
    return tuple(chain)
