"""The waits as the verdict explains them: one picture for its chain, the reports and the screens. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import NO_OPERATIONS, Run, Verdict
from titan_ckpt.debug.incident.waits import pending

MAX_CHAIN = 64  # pairs


def told_waits(run: Run, edges: Iterable[Edge], top: Verdict) -> list[Edge]:
    """The waits of the evidence and those of the verdict, without what contradicts it.

    A rank at fault waits as a consequence, unless those at fault wait for each other alone. A rank that its wait leads to a rank
    at fault is shown on its shortest way there. Ranks that wait for none at fault keep all their waits.
    """
    found = list(edges)
    blamed = _blamed(top)
    awaited = {edge.awaited for edge in found if edge.waiter in blamed}
    is_circle = bool(awaited) and awaited <= blamed
    kept = [edge for edge in found if is_circle or edge.waiter not in blamed]
    known = {(edge.waiter, edge.awaited) for edge in kept}
    pairs = [pair for pair in top.chain if pair not in known and (is_circle or pair[0] not in blamed)]
    kept += [_inferred(run, waiter, other, top) for waiter, other in pairs]
    away = _distances(kept, blamed)
    return [edge for edge in kept if _is_told(edge, blamed, away)] if blamed else kept


def with_told_chain(run: Run, edges: Sequence[Edge], top: Verdict) -> Verdict:
    """The verdict whose chain is those of the `told_waits` that lead to a rank at fault, the nearest first."""
    blamed = _blamed(top)
    if not blamed or top.verdict in (VerdictKind.HEALTHY, VerdictKind.RUNNING):
        return top
    told = told_waits(run, edges, top)
    away = _distances(told, blamed)
    pairs = sorted(
        {(edge.waiter, edge.awaited) for edge in told if edge.awaited in away},
        key=lambda pair: (away[pair[1]], pair[1], pair[0]),
    )
    return replace(top, chain=tuple(pairs[: max(MAX_CHAIN, len(top.chain))]))


def _blamed(top: Verdict) -> set[int]:
    """The ranks that the verdict explains the waits with: not suspects of which it does not say that others wait for them."""
    return set(top.culprits or (top.suspects if top.chain else ()))


def _is_told(edge: Edge, blamed: set[int], away: dict[int, int]) -> bool:
    if edge.waiter in blamed or edge.waiter not in away:
        return True
    return away.get(edge.awaited, -1) == away[edge.waiter] - 1


def _distances(edges: Iterable[Edge], blamed: set[int]) -> dict[int, int]:
    """How many waits each rank is away from a rank at fault; only ranks that lead to one."""
    waiters: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        waiters[edge.awaited].append(edge.waiter)
    away = dict.fromkeys(blamed, 0)
    left = deque(sorted(blamed))
    while left:
        rank = left.popleft()
        for waiter in waiters.get(rank, ()):
            if waiter not in away:
                away[waiter] = away[rank] + 1
                left.append(waiter)
    return away


def _inferred(run: Run, waiter: int, awaited: int, top: Verdict) -> Edge:
    """A wait that only the verdict shows, in the collective of its group that the rank is known to wait in."""
    table = run.ranks[waiter].operations if waiter in run.ranks else NO_OPERATIONS
    for group in _groups(run, waiter, top.group):
        rows = np.flatnonzero(pending(table) & (table["group"] == group) & (table["p2p"] == 0))
        seq = int(table["seq"][rows[0]]) if len(rows) else -1
        return Edge(waiter=waiter, awaited=awaited, group=group, seq=seq, is_inferred=True)
    return Edge(waiter=waiter, awaited=awaited, group=-1, seq=-1, is_inferred=True)


def _groups(run: Run, rank: int, name: str) -> Iterator[int]:
    """The groups of a name that a rank belongs to."""
    return (place for place, group in enumerate(run.groups) if str(group) == name and rank in run.members(place))
