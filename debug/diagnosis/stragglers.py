"""Who is always late: stragglers, from the times at which the ranks issued the same collectives. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.incident.confidence import Basis, straggling
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.operation_table import column
from titan_ckpt.debug.incident.records import Array, Evidence, Run, Verdict

LEAST_TIMES = 5
MOST_COLUMNS = 512
LEAST_LAG_NS = 50_000_000
LEAST_SHARE = 0.2
# Of all waiting, what must be for one rank: so much, or half where chance would hardly make it last so often. (A busy host
# holds any rank up now and then, seldom and long.)
MOST_OF_IT, HALF_OF_IT, CHANCE = 0.7, 0.5, 0.02
MOST_SHARE = 1.0  # more than the whole time means that a clock is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """A rank that came last `times` times, by `lag_ns` in the median; `share`: of the time, that the others waited for it."""

    rank: int
    lag_ns: int
    times: int
    share: float


LAST_ENDS = 32


def clock_offsets(run: Run, lane: Lane) -> Array:
    """How far each member's clock is ahead, in ns: all see the end of a collective at one moment. 0 without recorded ends."""
    columns = np.flatnonzero((lane.row >= 0).all(axis=0))[-LAST_ENDS:]
    ends = np.zeros((len(lane.members), len(columns)), np.int64)
    for i, rank in enumerate(lane.members if len(columns) else ()):
        ends[i] = run.ranks[rank].operations["completed_ns"][lane.row[i, columns]]
    ends = ends[:, (ends > 0).all(axis=0)]
    if not ends.shape[1]:
        return np.zeros(len(lane.members))
    found: Array = np.median(ends - np.median(ends, axis=0), axis=1)
    return found


def find_straggler(run: Run, lanes: Sequence[Lane], *, is_over: bool) -> Verdict | None:
    """STRAGGLER when one rank came last again and again and the others' waiting for it is a large part of the time.

    Compared per collective with the second-last rank, by clocks that agree on when collectives ended, where that is recorded.
    """
    for lane in lanes:
        found = _slowest(run, lane)
        if found is not None:
            return _verdict(run, lane, found, is_over=is_over)
    return None


def _slowest(run: Run, lane: Lane) -> _Late | None:
    heard = np.flatnonzero(~lane.is_silent)
    complete = np.flatnonzero((lane.row[heard] >= 0).all(axis=0))[-MOST_COLUMNS:]
    if len(complete) < LEAST_TIMES or len(heard) < 2:
        return None
    created = column(run.ranks, "created_ns", [lane.members[i] for i in heard.tolist()], lane.row[heard][:, complete])
    if (created <= 0).any():
        return None
    members = [lane.members[i] for i in heard.tolist()]
    return _late(run, members, created - clock_offsets(run, lane)[heard, None].astype(np.int64))


def _late(run: Run, members: Sequence[int], created: Array, *, is_thinned: bool = False) -> _Late | None:
    """`created`: when each member issued each collective, which all issued. Of several that are issued in one go, and so awaited
    together, the first counts: where a rank is really late, its steps take longer than it is late by."""
    ordered = np.partition(created, -2, axis=0)
    lag = ordered[-1] - ordered[-2]
    last = created.argmax(axis=0)
    span = int(ordered[-1].max() - created.min())
    totals = np.bincount(last, weights=np.maximum(lag, 0), minlength=len(members))
    i = int(totals.argmax())
    late = lag >= LEAST_LAG_NS
    mine = lag[(last == i) & late]
    if 2 * _waiting_ns(run, members[i], created[i], (last == i) & late) >= mine.sum():
        return None  # it came late because others were: a later stage of a pipeline
    share = float(mine.sum()) / max(span, 1)
    if share > MOST_SHARE and not is_thinned:
        first = np.diff(created[i], prepend=created[i][0]) >= lag
        return _late(run, members, created[:, first], is_thinned=True) if first.sum() >= LEAST_TIMES else None
    is_chance = len(members) * _chance(len(mine), int(late.sum()), len(members)) > CHANCE
    part = totals[i] / max(totals.sum(), 1)
    if (
        len(mine) < LEAST_TIMES
        or not LEAST_SHARE <= share <= MOST_SHARE
        or part < (MOST_OF_IT if is_chance else HALF_OF_IT)
    ):
        return None
    return _Late(rank=members[i], lag_ns=int(np.median(mine)), times=len(mine), share=share)


def _waiting_ns(run: Run, rank: int, created: Array, where: Array) -> int:
    """How long a rank waited in sends and receives before those of its collectives that `where` picks."""
    table = run.ranks[rank].operations
    pairs = table[(table["p2p"] != 0) & (table["completed_ns"] > table["created_ns"])]
    before = np.searchsorted(created, pairs["completed_ns"])
    is_between = (before > 0) & (before < len(created))
    waited = (pairs["completed_ns"] - pairs["created_ns"])[is_between]
    return int(np.bincount(before[is_between], weights=waited, minlength=len(created))[where].sum())


def _chance(times: int, of: int, ranks: int) -> float:
    """How likely one given rank is the last of equals at least so often: the binomial distribution's tail."""
    tail: int = sum(math.comb(of, n) * (ranks - 1) ** (of - n) for n in range(times, of + 1))
    whole: int = ranks**of
    return tail / whole


def _verdict(run: Run, lane: Lane, late: _Late, *, is_over: bool) -> Verdict:
    group, rank, lag_ms = str(run.groups[lane.group]), late.rank, late.lag_ns / 1e6
    others = tuple(other for other in lane.members if other != rank)
    return Verdict(
        verdict=VerdictKind.STRAGGLER,
        culprits=(rank,),
        victims=others,
        group=group,
        confidence=Basis.STRAGGLER_DONE.confidence if is_over else straggling(Basis.STRAGGLER_RUNNING, late.share),
        headline=f"rank {rank} is a straggler: it came last to {late.times} collectives of group {group}, by {lag_ms:.0f} ms "
        f"(median); the others spent {late.share:.0%} of the time waiting for it",
        evidence=(
            Evidence(text=f"late by {lag_ms:.0f} ms at {late.times} collectives", rank=rank, source="flight recorder"),
        ),
        chain=tuple((other, rank) for other in others),
        next_steps=(
            "compare that rank's data loading, CPU load, clocks and thermals with a healthy host's",
            "profile one step of that rank and of another",
        ),
    )
