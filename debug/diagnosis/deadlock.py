"""Cycles in the wait-for graph: P2P cycles, calls on the wrong group, groups entered in different orders. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_ckpt.debug.diagnosis.rank_state import Situation
from titan_ckpt.debug.diagnosis.wait_graph import Edge
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import Evidence, Operation, Run, Verdict


def deadlock(run: Run, cycle: tuple[int, ...], edges: Sequence[Edge], states: Mapping[int, Situation]) -> Verdict:
    """The verdict on ranks that wait for each other in a circle."""
    inside = [edge for edge in edges if edge.waiter in cycle and edge.awaited in cycle]
    outside = tuple(sorted({edge.waiter for edge in edges if edge.awaited in cycle} - set(cycle)))
    if all(edge.is_p2p for edge in inside):
        return _verdict(
            run, "P2P_CYCLE", "", cycle, outside, inside, states, 0.9,
            f"ranks {_list(cycle)} each wait for the other's half of a send/recv pair: a P2P cycle",
            ("reverse the order on every second rank, or use batch_isend_irecv",),
        )  # fmt: skip
    one_sided = [edge for edge in inside if edge.is_p2p]
    if one_sided:
        missing = tuple(sorted({edge.awaited for edge in one_sided if not _in_p2p(inside, edge.awaited)}))
        stray = _misdirected(run, one_sided, missing)
        missing = missing if stray is None else (stray,)
        first = next((edge for edge in one_sided if edge.awaited in missing), one_sided[0])
        return _verdict(
            run, "P2P_MISSING_PEER", "", missing or (first.awaited,),
            tuple(sorted((set(cycle) | set(outside)) - set(missing))), [*one_sided, *(e for e in inside if not e.is_p2p)],
            states, 0.9,
            f"rank {first.waiter} waits for rank {first.awaited}'s half of a send/recv pair, which rank {first.awaited} "
            + ("left out: it waits elsewhere" if stray is None else "addressed to a rank that does not expect it"),
            ("look for the branch that leaves the send or recv out on that rank, or gives it another peer",),
        )  # fmt: skip
    lost = _stray(run, cycle, inside)
    if lost is not None:
        rank, right, wrong = lost
        victims = tuple(sorted((set(cycle) | set(outside)) - {rank}))
        return _verdict(
            run, "WRONG_GROUP", "", (rank,), victims, inside, states, 0.85,
            f"rank {rank} called {wrong.op} on group {wrong.group}, where nobody joins it; its peers wait for the same "
            f"operation on group {right.group}",
            ("check which group the call site passes (group=...)",),
        )  # fmt: skip
    culprits, confidence = _out_of_order(cycle, inside)
    return _verdict(
        run, "ORDER_MISMATCH", "across_groups", culprits, tuple(sorted((set(cycle) | set(outside)) - set(culprits))),
        inside, states, confidence,
        f"ranks {_list(cycle)} entered operations of different groups in different orders and wait for each other",
        ("make every rank issue the operations of its groups in the same order",),
    )  # fmt: skip


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


def _stray(run: Run, cycle: Sequence[int], inside: Sequence[Edge]) -> tuple[int, Operation, Operation] | None:
    """(rank, what its peers wait in, what it called): the same operation, alone on another group.

    Of two ranks each is alone on its own group: then the one whose own history led to the other group went astray.
    """
    found = [one for rank in cycle if (one := _alone(run, rank, inside)) is not None]
    if len(found) > 1:
        strange = [one for one in found if _left_its_path(run, one[0], one[2], one[1])]
        found = strange or found
    return found[0] if found else None


def _alone(run: Run, rank: int, inside: Sequence[Edge]) -> tuple[int, Operation, Operation] | None:
    mine = next((edge for edge in inside if edge.waiter == rank and not edge.is_p2p), None)
    if mine is None or any(edge.group == mine.group for edge in inside if edge.waiter != rank) or _joined(run, mine):
        return None
    for edge in inside:
        if edge.awaited == rank and not edge.is_p2p and edge.group != mine.group:
            called, expected = _operation(run, mine), _operation(run, edge)
            if called and expected and _same(called, expected):
                return rank, expected, called
    return None


def _left_its_path(run: Run, rank: int, called: Operation, expected: Operation) -> bool:
    """Whether the call site used the other group before, or the rank's own rhythm would have led to the other group."""
    table = run.ranks[rank].operations
    rows = [run.operation(rank, int(row)) for row in (table["p2p"] == 0).nonzero()[0][-64:]]
    path = [(str(op.group), op.op, op.sizes) for op in rows if op.created_ns < called.created_ns]
    for group, op, sizes in reversed(path):
        if (op, sizes) == (called.op, called.sizes):
            return group == str(expected.group)
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


def _out_of_order(cycle: Sequence[int], inside: Sequence[Edge]) -> tuple[tuple[int, ...], float]:
    """The minority that waits on its own group; everybody where the parties are equal."""
    by_group: dict[int, set[int]] = {}
    for edge in inside:
        by_group.setdefault(edge.group, set()).add(edge.waiter)
    parties = sorted(by_group.values(), key=len)
    if len(parties) > 1 and len(parties[0]) < len(parties[-1]):
        return tuple(sorted(parties[0])), 0.75
    return tuple(cycle), 0.6


def _operation(run: Run, edge: Edge) -> Operation | None:
    table = run.ranks[edge.waiter].operations
    rows = (
        (table["group"] == edge.group) & (table["seq"] == edge.seq) & ((table["p2p"] != 0) == edge.is_p2p)
    ).nonzero()[0]
    return run.operation(edge.waiter, int(rows[-1])) if len(rows) else None


def _verdict(
    run: Run, name: str, subtype: str, culprits: tuple[int, ...], victims: tuple[int, ...], inside: Sequence[Edge],
    states: Mapping[int, Situation], confidence: float, headline: str, advice: tuple[str, ...],
) -> Verdict:  # fmt: skip
    evidence = []
    for edge in inside[:8]:
        operation = _operation(run, edge)
        frame = (user_frame(operation.frames, run.wrappers) if operation else None) or states[edge.waiter].frame
        text = f"waits for rank {edge.awaited}" + (f" in {operation.op} on {operation.group}" if operation else "")
        evidence.append(
            Evidence(text=text, rank=edge.waiter, file=frame.file if frame else "", line=frame.line if frame else 0)
        )
    first = _operation(run, inside[0])
    return Verdict(
        verdict=name, subtype=subtype, culprits=culprits, victims=victims, group=str(first.group) if first else "",
        seq=inside[0].seq if inside[0].seq >= 0 else None, op=first.op if first else "", step=run.step_of(culprits[0]),
        confidence=confidence, headline=headline, evidence=tuple(evidence),
        chain=tuple((edge.waiter, edge.awaited) for edge in inside), next_steps=advice,
    )  # fmt: skip


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
