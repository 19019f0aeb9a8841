"""Cycles in the wait-for graph: P2P cycles, calls on the wrong group, groups entered in different orders. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.mismatches.meeting import call_site, key_of, predict
from titan_ckpt.debug.diagnosis.waiting.device_order import is_met
from titan_ckpt.debug.diagnosis.waiting.rhythm import Departure, left_order, left_rhythm, worked_before
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge, row_of
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.incident.records import SEND, Evidence, Operation, Run, Situation, Verdict

HISTORY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    """Ranks that wait for each other: the edges among them, and the ranks outside that wait for one of them."""

    run: Run
    ranks: tuple[int, ...]
    inside: tuple[Edge, ...]
    outside: tuple[int, ...]
    states: Mapping[int, Situation]

    def others(self, culprits: Sequence[int]) -> tuple[int, ...]:
        """All ranks that wait, but the culprits."""
        return tuple(sorted({*self.ranks, *self.outside} - set(culprits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """What a cycle is: the parts of the verdict that its edges do not give."""

    verdict: VerdictKind
    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    basis: Basis
    headline: str
    advice: str
    edges: tuple[Edge, ...]
    subtype: Subtype = Subtype.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stray:
    """A rank that called an operation alone on another group than the one where its peers wait for the same."""

    rank: int
    expected: Operation
    called: Operation


def deadlock(run: Run, ranks: tuple[int, ...], edges: Sequence[Edge], states: Mapping[int, Situation]) -> Verdict:
    """The verdict on ranks that wait for each other in a circle."""
    inside = tuple(edge for edge in edges if edge.waiter in ranks and edge.awaited in ranks)
    outside = tuple(sorted({edge.waiter for edge in edges if edge.awaited in ranks} - set(ranks)))
    cycle = _Cycle(run=run, ranks=ranks, inside=inside, outside=outside, states=states)
    if any(edge.is_p2p for edge in inside):
        found = (
            _off_rhythm(cycle) or _p2p_cycle(cycle) or _half_missing(cycle) or _wrong_group(cycle) or _skipped(cycle)
        )
    else:
        found = _wrong_group(cycle) or _skipped(cycle) or _off_rhythm(cycle)
    finding = found or _across_groups(cycle)
    return _verdict(cycle, finding)


def off_rhythm(
    run: Run, ranks: Sequence[int], edges: Sequence[Edge], states: Mapping[int, Situation]
) -> Iterator[Verdict]:
    """The verdict on the one of some ranks, for which others wait, that left the order which it had repeated."""
    ranks = [rank for rank in ranks if not is_met(run, rank)]
    inside = tuple(edge for edge in edges if edge.awaited in ranks)
    outside = tuple(sorted({edge.waiter for edge in inside} - set(ranks)))
    cycle = _Cycle(run=run, ranks=tuple(ranks), inside=inside, outside=outside, states=states)
    finding = _off_rhythm(cycle) if inside and len(ranks) <= MOST_COMPARED else None
    if finding is not None:
        yield _verdict(cycle, finding)


MOST_COMPARED = 64


def _off_rhythm(cycle: _Cycle) -> _Finding | None:
    """What those did that left the order which they had repeated, in all groups, sends and receives, where others did not."""
    left = {rank: found for rank in cycle.ranks if (found := left_rhythm(cycle.run.ranks[rank])) is not None}
    if not left or 1 < len(left) == len(cycle.ranks) or len({found.what for found in left.values()}) > 1:
        return None  # nobody, or everybody
    rank, first = next(iter(left.items()))
    expected, done = cycle.run.operation(rank, first.expected), cycle.run.operation(rank, first.row)
    is_closed = any(edge.waiter in cycle.ranks for edge in cycle.inside)
    verdict, subtype = VerdictKind.SKIPPED_COLLECTIVE, Subtype.NONE
    if first.what == Departure.SKIPPED:
        verdict = VerdictKind.P2P_MISSING_PEER if expected.p2p else verdict
        text = (
            f"left out {_called(cycle.run, expected)}, which {'it' if len(left) == 1 else 'each'} had issued at this point until "
            f"then, and went on with {_called(cycle.run, done)}"
        )
    elif first.what == Departure.EXTRA:
        verdict = VerdictKind.P2P_MISSING_PEER if done.p2p else verdict
        subtype = Subtype.NONE if done.p2p else Subtype.EXTRA_COLLECTIVE
        text = f"issued an extra {_called(cycle.run, done)}, before {_called(cycle.run, expected)}"
    else:
        verdict, subtype = VerdictKind.ORDER_MISMATCH, Subtype.ACROSS_GROUPS
        text = f"issued {_called(cycle.run, done)} before {_called(cycle.run, expected)}, unlike until then"
    culprits = tuple(left)
    who = f"rank{'s' * (len(culprits) > 1)} {_list(culprits)}"
    return _Finding(
        verdict=verdict,
        subtype=subtype,
        culprits=culprits,
        victims=cycle.others(culprits),
        basis=Basis.BROKE_ROUTINE,
        headline=f"{f'ranks {_list(cycle.ranks)} wait for each other, since ' * is_closed}{who} {text}",
        advice="look for the branch that changes the order of operations there (an empty batch, a rank-local condition)",
        edges=tuple(sorted(cycle.inside, key=lambda edge: edge.awaited not in left)),
    )


def _called(run: Run, operation: Operation) -> str:
    peer = f" {'to' if operation.p2p == SEND else 'from'} rank {operation.peer}" if operation.p2p else ""
    frame = user_frame(operation.frames, run.wrappers)
    return f"{operation.op}{peer} of group {operation.group}{f' at {frame.place}' if frame else ''}"


def _p2p_cycle(cycle: _Cycle) -> _Finding | None:
    if not all(edge.is_p2p for edge in cycle.inside):
        odd = _odd_one(cycle)  # it came once more than the other, which went on with its collectives
        return odd if odd is not None and len(odd.culprits) == 1 else None
    return _odd_one(cycle) or _circle(cycle)


def _circle(cycle: _Cycle) -> _Finding:
    """Nobody left an order: the program lets each wait for the other. Where all had come through these sends and receives before,
    one of them must have done something else this time."""
    return _Finding(
        verdict=VerdictKind.P2P_CYCLE,
        culprits=cycle.ranks,
        victims=cycle.outside,
        basis=Basis.CYCLE_TIE if _is_by_one(cycle) else _sureness(cycle),
        headline=f"ranks {_list(cycle.ranks)} each wait for another's half of a send/recv pair: a P2P cycle",
        advice="reverse the order on every second rank, or use batch_isend_irecv",
        edges=cycle.inside,
    )


def _sureness(cycle: _Cycle) -> Basis:
    """Of full rings that have lost the numbers of messages, and the order before, nobody can tell which half is missing."""
    is_known = all(edge.seq >= 0 or edge.is_inferred for edge in cycle.inside if edge.is_p2p)
    return Basis.WAIT_CYCLE if is_known else Basis.CYCLE_TIE


def _is_by_one(cycle: _Cycle) -> bool:
    """Whether all had come through these sends and receives before, and are in their order."""
    came = all(
        (row := row_of(cycle.run, edge)) is not None and worked_before(cycle.run.ranks[edge.waiter].operations, row)
        for edge in cycle.inside
    )
    return came and not any(_left_its_order(cycle, rank) for rank in cycle.ranks)


def _odd_one(cycle: _Cycle) -> _Finding | None:
    """A circle that one rank closed when it left the order of sends and receives that it repeated until then."""
    strange = tuple(rank for rank in cycle.ranks if _left_its_order(cycle, rank))
    if not 0 < len(strange) < len(cycle.ranks):
        return None
    return _Finding(
        verdict=VerdictKind.P2P_MISSING_PEER,
        culprits=strange,
        victims=cycle.others(strange),
        basis=Basis.BROKE_ROUTINE,
        headline=f"ranks {_list(cycle.ranks)} each wait for another's half of a send/recv pair: rank {_list(strange)} left the "
        "order of sends and receives that it had repeated, the others did not",
        advice="look for the branch that leaves the send or recv out on that rank, or gives it another peer",
        edges=tuple(sorted(cycle.inside, key=lambda edge: (not edge.is_p2p, edge.waiter not in strange))),
    )


def _left_its_order(cycle: _Cycle, rank: int) -> bool:
    """Whether the send or recv that a rank waits in is another one than its own earlier ones lead to, alone or among all
    operations."""
    table = cycle.run.ranks[rank].operations
    rows = [row_of(cycle.run, edge) for edge in cycle.inside if edge.waiter == rank and edge.is_p2p]
    waited = [row for row in rows if row is not None]
    return bool(waited) and left_order(table, min(waited))


def _half_missing(cycle: _Cycle) -> _Finding | None:
    """A send or recv whose other half the awaited rank left out, or addressed to another rank."""
    inside = cycle.inside
    one_sided = [edge for edge in inside if edge.is_p2p]
    if not one_sided:
        return None
    missing = tuple(sorted({edge.awaited for edge in one_sided if not _in_p2p(inside, edge.awaited)}))
    if not missing:  # all are in P2P, and some in a collective that waits behind it
        return _odd_one(cycle) or _circle(cycle)
    stray = _misdirected(cycle.run, one_sided, missing)
    missing = missing if stray is None else (stray,)
    first = next((edge for edge in one_sided if edge.awaited in missing), one_sided[0])
    why = "left out: it waits elsewhere" if stray is None else "addressed to a rank that does not expect it"
    return _Finding(
        verdict=VerdictKind.P2P_MISSING_PEER,
        culprits=missing,
        victims=cycle.others(missing),
        basis=_sureness(cycle),
        headline=f"rank {first.waiter} waits for rank {first.awaited}'s half of a send/recv pair, which rank {first.awaited} "
        + why,
        advice="look for the branch that leaves the send or recv out on that rank, or gives it another peer",
        edges=(*one_sided, *(edge for edge in inside if not edge.is_p2p)),
    )


def _wrong_group(cycle: _Cycle) -> _Finding | None:
    stray = _stray(cycle)
    if stray is None:
        return None
    return _Finding(
        verdict=VerdictKind.WRONG_GROUP,
        culprits=(stray.rank,),
        victims=cycle.others((stray.rank,)),
        basis=Basis.ALONE_ON_GROUP,
        headline=f"rank {stray.rank} called {stray.called.op} on group {stray.called.group}, where nobody joins it; its peers "
        f"wait for the same operation on group {stray.expected.group}",
        advice="check which group the call site passes (group=...)",
        edges=cycle.inside,
    )


def _skipped(cycle: _Cycle) -> _Finding | None:
    """The operation of one group that one rank left out of the order that it repeated, to go on with what follows on another."""
    found: dict[int, Operation] = {}
    for edge in cycle.inside:
        operation = _operation(cycle.run, edge)
        if operation is not None and not edge.is_p2p and _left_it_out(cycle.run, edge.awaited, operation):
            found[edge.awaited] = operation
    if len(found) != 1:
        return None
    [(rank, operation)] = found.items()
    return _Finding(
        verdict=VerdictKind.SKIPPED_COLLECTIVE,
        culprits=(rank,),
        victims=cycle.others((rank,)),
        basis=Basis.BROKE_ROUTINE,
        headline=f"rank {rank} skipped {operation.op} #{operation.seq} of group {operation.group}, which it had issued at this "
        "point until then, and waits in what follows",
        advice="look for the branch that leaves this operation out on that rank (an empty batch, no tokens for its experts)",
        edges=tuple(sorted(cycle.inside, key=lambda edge: edge.awaited != rank)),
    )


def _left_it_out(run: Run, rank: int, skipped: Operation) -> bool:
    """Whether a rank's own order led to this operation, and it issued what always comes next instead, from the same line."""
    table = run.ranks[rank].operations
    rows = [run.operation(rank, int(row)) for row in (table["p2p"] == 0).nonzero()[0][-HISTORY:]]
    path = [(op.group, key_of(op), call_site(run, op)[:1]) for op in rows]
    if any((op.group, op.seq) == (skipped.group, skipped.seq) for op in rows):
        return False  # it came to it, later than the others
    for place in range(len(path) - 1, 1, -1):
        expected = predict(path[:place])
        if isinstance(expected, tuple) and expected[:2] == (skipped.group, key_of(skipped)) and expected != path[place]:
            return predict([*path[:place], expected]) == path[place]
    return False


def _across_groups(cycle: _Cycle) -> _Finding:
    culprits, basis = _minority(cycle)
    return _Finding(
        verdict=VerdictKind.ORDER_MISMATCH,
        subtype=Subtype.ACROSS_GROUPS,
        culprits=culprits,
        victims=cycle.others(culprits),
        basis=basis,
        headline=f"ranks {_list(cycle.ranks)} entered operations of different groups in different orders and wait for each "
        "other",
        advice="make every rank issue the operations of its groups in the same order",
        edges=cycle.inside,
    )


def _misdirected(run: Run, one_sided: Sequence[Edge], missing: Sequence[int]) -> int | None:
    """The rank whose half a peer waits for, and which issued just such a half, but to a rank that it had never exchanged
    anything with and that is not in P2P at all: it took the wrong peer."""
    for edge in one_sided:
        if edge.awaited not in missing:
            continue
        rank, table = edge.waiter, run.ranks[edge.waiter].operations
        mine, others = _operation(run, edge), [other for other in one_sided if other.awaited == rank]
        is_first = int(((table["p2p"] != 0) & (table["peer"] == edge.awaited)).sum()) == 1
        expected = [operation for other in others if (operation := _operation(run, other)) is not None]
        if mine is not None and is_first and any(operation.p2p != mine.p2p for operation in expected):
            return rank
    return None


def _in_p2p(inside: Sequence[Edge], rank: int) -> bool:
    return any(edge.is_p2p and edge.waiter == rank for edge in inside)


def _stray(cycle: _Cycle) -> _Stray | None:
    """The rank that is alone on its group. Of two ranks each is alone: then the one whose history led to the other group."""
    found = [one for rank in cycle.ranks if (one := _alone(cycle, rank)) is not None]
    if len(found) > 1:
        found = [one for one in found if _left_its_path(cycle.run, one)] or found
    return found[0] if found else None


def _alone(cycle: _Cycle, rank: int) -> _Stray | None:
    run, inside = cycle.run, cycle.inside
    mine = next((edge for edge in inside if edge.waiter == rank and not edge.is_p2p), None)
    if mine is None or any(edge.group == mine.group for edge in inside if edge.waiter != rank) or _joined(run, mine):
        return None
    for edge in inside:
        if edge.awaited == rank and not (edge.is_p2p or edge.is_queued) and edge.group != mine.group:
            called, expected = _operation(run, mine), _operation(run, edge)
            if called and expected and _same(called, expected):
                return _Stray(rank=rank, expected=expected, called=called)
    return None


def _left_its_path(run: Run, stray: _Stray) -> bool:
    """Whether the call site used the other group before, or the rank's own rhythm would have led to the other group."""
    rank, called = stray.rank, stray.called
    table = run.ranks[rank].operations
    rows = [run.operation(rank, int(row)) for row in (table["p2p"] == 0).nonzero()[0][-HISTORY:]]
    path = [(str(op.group), op.op, op.sizes) for op in rows if op.created_ns < called.created_ns]
    for group, op, sizes in reversed(path):
        if (op, sizes) == (called.op, called.sizes):
            return group == str(stray.expected.group)
    return False


def _joined(run: Run, edge: Edge) -> bool:
    """Whether another member has issued this operation of this group as well."""
    for rank, record in run.ranks.items():
        table = record.operations
        if (
            rank != edge.waiter
            and ((table["group"] == edge.group) & (table["seq"] >= edge.seq) & (table["p2p"] == 0)).any()
        ):
            return True
    return False


def _same(a: Operation, b: Operation) -> bool:
    return (a.op, a.sizes, a.dtypes) == (b.op, b.sizes, b.dtypes)


def _minority(cycle: _Cycle) -> tuple[tuple[int, ...], Basis]:
    """The smallest party that waits on one group; all ranks if the parties are equal."""
    by_group: dict[int, set[int]] = {}
    for edge in cycle.inside:
        by_group.setdefault(edge.group, set()).add(edge.waiter)
    parties = sorted(by_group.values(), key=len)
    if len(parties) > 1 and len(parties[0]) < len(parties[-1]):
        return tuple(sorted(parties[0])), Basis.CYCLE_MINORITY
    return cycle.ranks, Basis.CYCLE_TIE


def _operation(run: Run, edge: Edge) -> Operation | None:
    row = row_of(run, edge)
    return run.operation(edge.waiter, row) if row is not None else None


def _verdict(cycle: _Cycle, finding: _Finding) -> Verdict:
    first = finding.edges[0]
    operation = _operation(cycle.run, first)
    return Verdict(
        verdict=finding.verdict,
        subtype=finding.subtype,
        culprits=finding.culprits,
        victims=finding.victims,
        group=str(operation.group) if operation else "",
        seq=first.seq if first.seq >= 0 else None,
        op=operation.op if operation else "",
        step=cycle.run.step_of(finding.culprits[0]),
        confidence=finding.basis.confidence,
        headline=finding.headline,
        evidence=tuple(_wait(cycle, edge, finding.culprits) for edge in finding.edges[:8]),
        chain=tuple((edge.waiter, edge.awaited) for edge in finding.edges),
        next_steps=(finding.advice,),
    )


def _wait(cycle: _Cycle, edge: Edge, culprits: Sequence[int]) -> Evidence:
    """Where a rank waits; of one at fault not for whom, since that is no cause."""
    operation = _operation(cycle.run, edge)
    frame = user_frame(operation.frames, cycle.run.wrappers) if operation else None
    where = f" in {operation.op} on group {operation.group}" if operation else ""
    is_cause = edge.waiter in culprits and len(culprits) < len(cycle.ranks)
    text = f"{'itself waits' if is_cause else f'waits for rank {edge.awaited}'}{where}"
    return Evidence.at(frame or cycle.states[edge.waiter].frame, text=text, rank=edge.waiter)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
