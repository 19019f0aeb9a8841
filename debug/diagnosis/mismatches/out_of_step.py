"""The one rank that is an operation ahead or behind in one of its groups, by the order in which all ranks use theirs. Pure.

The ranks of a mesh do the same side by side: whoever comes to #7 of its data-parallel group has come to #14 of its
tensor-parallel one. In a group of two nobody has a majority; the other groups of its kind are one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_ckpt.debug.diagnosis.waiting.told_waits import MAX_CHAIN
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import OTHER_FAULT, Basis
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Frame, Operation, Run, Situation, Verdict

LEAST_RANKS, MOST_RANKS = 4, 2048
LEAST_AT = 3  # ranks that came to an operation, of which one differs
_NEWEST = 128  # operations of each rank
_NO_KIND = ("", "undefined", "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A rank's operation `seq` of a kind of group: its row, and the number that the rank had come to in the other kinds."""

    kind: str
    seq: int
    row: int
    reached: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shift:
    """At `moment`, and ever since, a rank had come `by` further in its group of kind `other` than all others (`usual`)."""

    moment: _Moment
    other: str
    usual: int
    by: int


def out_of_step(run: Run, edges: Sequence[Edge], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """SKIPPED_COLLECTIVE on that rank, if it waits or is waited for."""
    if not LEAST_RANKS <= len(run.ranks) <= MOST_RANKS:
        return
    moments = {rank: found for rank in run.ranks if (found := _moments(run, rank))}
    odd = _odd_rank(moments)
    if odd is None:
        yield from _one_more(run, moments, edges, states)
        return
    if not any(odd in (edge.waiter, edge.awaited) for edge in edges):
        return
    shifts = list(_shifts(moments, odd))
    ahead = {_kind(run, edge.group) for edge in edges if edge.waiter == odd and not edge.is_p2p}
    behind = {_kind(run, edge.group) for edge in edges if edge.awaited == odd and not edge.is_p2p}
    fitting = [shift for shift in shifts if shift.other in (ahead if shift.by > 0 else behind)]
    if fitting:
        shift = min(fitting, key=lambda shift: abs(shift.by))
        yield _with_waits(_verdict(run, odd, shift, len(moments) - 1), edges)


def beside_the_waits(odd: Sequence[Verdict], waits: Sequence[Verdict]) -> Iterator[Verdict]:
    """That verdict, if there is one, and those that the waits lead to: one on the same rank that is as sure says more, others are
    doubtful."""
    same = [
        found for found in waits for one in odd if found.culprits == one.culprits and found.confidence >= one.confidence
    ]
    yield from () if same else odd
    yield from (
        replace(found, confidence=found.confidence * OTHER_FAULT) if odd and found not in same else found
        for found in waits
    )


def is_only_awaited(state: Situation) -> bool:
    """Whether nothing is known against a rank but that others wait for it."""
    return state.kind in (
        RankState.UNKNOWN, RankState.SILENT, RankState.FINISHED, RankState.IN_COLLECTIVE, RankState.IN_P2P
    )  # fmt: skip


USUAL = 2  # messages to other peers, after which one to a new peer may be astray


def _is_new_peer(run: Run, edge: Edge) -> bool:
    """Whether a rank waits in its first message to a peer, and has sent, or received, such to others."""
    table = run.ranks[edge.waiter].operations
    others = (table["p2p"] == edge.direction) & (table["peer"] != edge.awaited)
    return edge.is_p2p and edge.seq == 1 and int(others.sum()) >= USUAL


def or_its_partner(run: Run, verdict: Verdict, edges: Sequence[Edge]) -> Verdict:
    """A verdict that rests on nothing but an operation not issued names both of a pair in a larger job: the one that waits may
    have issued a collective too many; or, awaited itself, taken this peer for another in its first message to it."""
    waits = [edge for edge in edges if edge.awaited in verdict.culprits]
    waiters = {edge.waiter for edge in waits}
    is_bare = verdict.confidence == Basis.NOT_ISSUED.confidence
    if not is_bare or len(waiters) != 1 or len(run.ranks) == 2:
        return verdict
    [waiter] = waiters
    is_astray = all(_is_new_peer(run, edge) for edge in waits)
    is_astray &= any(edge.awaited == waiter and edge.seq > 1 for edge in edges)
    if any(edge.is_p2p for edge in waits) and not is_astray:
        return verdict
    what = "took it for another peer" if any(edge.is_p2p for edge in waits) else "issued one too many"
    return replace(
        verdict, culprits=tuple(sorted((*verdict.culprits, waiter))), confidence=Basis.NOT_ISSUED_TO_ONE.confidence,
        victims=tuple(rank for rank in verdict.victims if rank != waiter),
        headline=f"{verdict.headline}; or rank {waiter}, which alone waits for it, {what}",
    )  # fmt: skip


def _kind(run: Run, group: int) -> str:
    """What a program calls a group: the same for all groups of one axis of a mesh; "" if it gave no name."""
    name = run.groups[group].description if group >= 0 else ""
    return "" if name in _NO_KIND else name


def _moments(run: Run, rank: int) -> list[_Moment]:
    """A rank's newest collectives in their order; none if it has several groups of one kind, which count apart."""
    table = run.ranks[rank].operations
    rows = np.flatnonzero((table["p2p"] == 0) & (table["seq"] >= 0))[-_NEWEST:].tolist()
    groups, numbers = table["group"], table["seq"]
    of_kind: dict[str, int] = {}
    reached: dict[str, int] = {}
    found = []
    for row in rows:
        kind = _kind(run, int(groups[row]))
        if not kind:
            continue
        if of_kind.setdefault(kind, int(groups[row])) != groups[row]:
            return []
        others = {name: number for name, number in reached.items() if name != kind}
        found.append(_Moment(kind=kind, seq=int(numbers[row]), row=row, reached=others))
        reached[kind] = int(numbers[row])
    return found


def _usual(moments: Mapping[int, Sequence[_Moment]]) -> dict[tuple[str, int, str], dict[int, list[int]]]:
    """Which ranks had come to which number of a kind of group (the last key) when they issued an operation (the first two)."""
    found: defaultdict[tuple[str, int, str], dict[int, list[int]]] = defaultdict(dict)
    for rank, of_rank in moments.items():
        for moment in of_rank:
            for other, number in moment.reached.items():
                found[moment.kind, moment.seq, other].setdefault(number, []).append(rank)
    return found


def _odd_rank(moments: Mapping[int, Sequence[_Moment]]) -> int | None:
    """The one rank that differs where the others, two or more, are alike everywhere."""
    odd: set[int] = set()
    for numbers in _usual(moments).values():
        parties = sorted(numbers.values(), key=len)
        total = sum(map(len, parties))
        if len(parties) == 1 or total < LEAST_AT:
            continue
        if len(parties[-1]) < total - 1:
            return None
        odd.update(parties[0])
        if len(odd) > 1:
            return None
    return next(iter(odd), None)


def _shifts(moments: Mapping[int, Sequence[_Moment]], rank: int) -> Iterator[_Shift]:
    """By how much a rank is off from some operation on, for each pair of kinds of groups where that stays the same."""
    usual = _usual({other: found for other, found in moments.items() if other != rank})
    off: defaultdict[tuple[str, str], list[_Shift]] = defaultdict(list)
    for moment in moments[rank]:
        for other, number in moment.reached.items():
            if numbers := usual.get((moment.kind, moment.seq, other)):
                expected = max(numbers, key=lambda reached: len(numbers[reached]))
                off[moment.kind, other].append(_Shift(moment=moment, other=other, usual=expected, by=number - expected))
    for found in off.values():
        last = found[-1].by
        first = next((i for i, shift in enumerate(found) if shift.by), len(found))
        if last and all(shift.by == last for shift in found[first:]):
            yield found[first]


def _one_more(
    run: Run, moments: Mapping[int, Sequence[_Moment]], edges: Sequence[Edge], states: Mapping[int, Situation]
) -> Iterator[Verdict]:
    """The same where the rank waits in that operation: all others had stopped at one number, it issued the next from a line from
    which none of them ever issued one."""
    rank = _foremost(moments)
    if rank is None or not any(edge.waiter == rank and not edge.is_p2p for edge in edges):
        return
    strange = _strange(run, rank, moments[rank][-1].kind)
    is_other = any(not is_only_awaited(state) for other, state in states.items() if other != rank)
    if strange is None or is_other or strange[0].seq != moments[rank][-1].seq:
        return
    operation, frame = strange
    found = Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.EXTRA_COLLECTIVE, culprits=(rank,),
        group=str(operation.group), op=operation.op, confidence=Basis.ONE_MORE.confidence,
        headline=f"rank {rank} waits in {operation.op} #{operation.seq} of group {operation.group} at {frame.place}, "
        f"from where no other rank issued one: all others had stopped at #{operation.seq - 1} of theirs",
        evidence=(Evidence.at(frame, text=f"waits in {operation.op}", rank=rank, source="flight recorder"),),
        next_steps=("look for the branch that issues this operation on that rank alone",),
    )  # fmt: skip
    yield _with_waits(found, edges)


def _foremost(moments: Mapping[int, Sequence[_Moment]]) -> int | None:
    """The one rank that came one number further in its last operation's kind of group than all others, which came equally far."""
    last: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, found in moments.items():
        for moment in found:
            last[moment.kind][rank] = moment.seq
    for kind, numbers in last.items():
        counts = Counter(numbers.values())
        newest = max(counts)
        rank = next(rank for rank, number in numbers.items() if number == newest)
        is_one = counts == {newest: 1, newest - 1: len(numbers) - 1} and len(numbers) >= LEAST_RANKS
        if is_one and moments[rank][-1].kind == kind:
            return rank
    return None


def _with_waits(verdict: Verdict, edges: Sequence[Edge]) -> Verdict:
    """The verdict with all that wait, and for whom."""
    chain = tuple((edge.waiter, edge.awaited) for edge in edges)
    victims = sorted({waiter for waiter, _ in chain} - set(verdict.culprits))
    return replace(verdict, victims=tuple(victims), chain=chain[:MAX_CHAIN])


def _verdict(run: Run, rank: int, shift: _Shift, num_others: int) -> Verdict:
    at = run.operation(rank, shift.moment.row)
    is_one = abs(shift.by) == 1
    strange = _strange(run, rank, shift.other) if shift.by > 0 and is_one else None
    group = next(str(group) for group in run.groups if group.description == shift.other)
    frame = strange[1] if strange is not None else user_frame(at.frames, run.wrappers)
    where = f", such as {strange[0].op} #{strange[0].seq} at {strange[1].place}" if strange is not None else ""
    what = (
        f"issued one operation {'more' if shift.by > 0 else 'fewer'} of group {group} than all others{where}"
        if is_one
        else "used its groups in another order than all others"
    )
    return Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE,
        subtype=Subtype.EXTRA_COLLECTIVE if shift.by == 1 else Subtype.NONE,
        culprits=(rank,), group=str((strange[0] if strange else at).group), seq=(strange[0] if strange else at).seq, op=at.op,
        confidence=Basis.OUT_OF_STEP.confidence,
        headline=f"rank {rank} {what}: when it came to {at.op} #{at.seq} of group {at.group}, it was at "
        f"#{shift.usual + shift.by}{'' if is_one else f' of group {group}'}, they at #{shift.usual}",
        evidence=(
            Evidence.at(frame, text=f"issued {(strange[0] if strange else at).op}", rank=rank, source="flight recorder"),
            Evidence(text=f"the other {num_others} ranks used their groups in one order, it in another"),
        ),
        next_steps=("look for the branch that issues or leaves out an operation of this group on that rank alone",),
    )  # fmt: skip


def _strange(run: Run, rank: int, kind: str) -> tuple[Operation, Frame] | None:
    """The rank's first operation in its group of a kind from a line from which no other rank issued one."""
    stacks = {other: _stacks(run, other) for other in run.ranks}
    frames = {
        n: user_frame(run.names.frames[n], run.wrappers)
        for n in {n for found in stacks.values() for n in found.values()}
    }
    known = {frames[n] for other, found in stacks.items() if other != rank for n in found.values()}
    for row, stack in stacks[rank].items():
        operation, frame = run.operation(rank, row), frames[stack]
        if frame is not None and frame not in known and operation.group.description == kind:
            return operation, frame
    return None


def _stacks(run: Run, rank: int) -> dict[int, int]:
    """The stacks of a rank's newest collectives, by row."""
    table = run.ranks[rank].operations
    rows = np.flatnonzero(table["p2p"] == 0)[-_NEWEST:]
    return dict(zip(rows.tolist(), table["frames"][rows].tolist(), strict=True))
