"""What the source lines in tracebacks say: the peer of a send or recv, whether a collective names a group. Pure.

No library logs which rank a send or recv is with, or which group a collective is of; the line that Python shows of the call often
does (`dist.recv(activations, rank - 1)`). Only what can be computed from the rank alone is believed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import RankRecord, Run, Situation, Verdict

_MODULES = ("dist", "distributed", "c10d", "distributed_c10d")
_SENDS = ("send", "isend", "send_object_list")
_RECEIVES = ("recv", "irecv", "recv_object_list")
_RANKS = ("rank", "global_rank", "RANK")
_SIZES = ("world_size", "world", "WORLD_SIZE")
# How many positional arguments a collective has before its group (torch.distributed's functions).
_BEFORE_GROUP: Mapping[str, int] = {
    "barrier": 0, "all_reduce": 2, "broadcast": 2, "reduce": 3, "all_gather": 2, "all_gather_into_tensor": 2,
    "reduce_scatter": 3, "reduce_scatter_tensor": 3, "all_to_all": 2, "all_to_all_single": 4, "gather": 3, "scatter": 3,
    "all_gather_object": 2, "gather_object": 3, "broadcast_object_list": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A send or recv as a source line has it; `peer` is None where the line does not show it."""

    is_send: bool
    peer: int | None


def half_of(text: str, rank: int, world_size: int) -> Half | None:
    """The send or recv in a source line, as `rank` runs it; None if there is none, or more than one.

    >>> half_of("dist.recv(x, src=rank - 1)", 2, 4)
    Half(is_send=False, peer=1)
    """
    halves = [half for call in _calls(text) if (half := _half(call, rank, world_size)) is not None]
    return halves[0] if len(halves) == 1 else None


def names_group(text: str) -> tuple[str, bool] | None:
    """The collective that a source line calls, and whether the call names a group; None if it calls none.

    >>> names_group("dist.all_reduce(x, group=pair)")
    ('all_reduce', True)
    """
    found = [(name, call) for call in _calls(text) if (name := _name(call.func)) in _BEFORE_GROUP]
    if len(found) != 1 or any(isinstance(argument, ast.Starred) for argument in found[0][1].args):
        return None
    name, call = found[0]
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    has_group = any(keyword.arg == "group" and not _is_none(keyword.value) for keyword in call.keywords)
    return name, has_group or len(call.args) > _BEFORE_GROUP[name]


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _calls(text: str) -> list[ast.Call]:
    """The calls in a line; [] where it is no statement by itself, as the first line of a longer one is not."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(function: ast.expr) -> str:
    """The name of a function of torch.distributed, however it was imported; "" for a method of the program's own."""
    if isinstance(function, ast.Attribute):
        owner = function.value
        module = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        return function.attr if module in _MODULES else ""
    return function.id if isinstance(function, ast.Name) else ""


def _half(call: ast.Call, rank: int, world_size: int) -> Half | None:
    name = _name(call.func)
    if name not in (*_SENDS, *_RECEIVES):
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("src", "dst")]
    value = named[0] if named else call.args[1] if len(call.args) > 1 else None
    if len(call.args) > 2 or any(keyword.arg == "group" for keyword in call.keywords):
        value = None  # in a group `rank` may count its members
    peer = _number(value, rank, world_size) if value is not None else None
    return Half(
        is_send=name in _SENDS, peer=peer if peer is not None and 0 <= peer < world_size and peer != rank else None
    )


def _number(value: ast.expr, rank: int, world_size: int) -> int | None:
    """The value of an expression of the rank, the number of ranks and whole numbers; None for any other."""
    if isinstance(value, ast.Constant):
        return value.value if type(value.value) is int and abs(value.value) <= 1 << 20 else None
    if isinstance(value, ast.Name):
        return rank if value.id in _RANKS else world_size if value.id in _SIZES else None
    if isinstance(value, ast.Call) and not value.args and not value.keywords:
        return {"get_rank": rank, "get_world_size": world_size}.get(_name(value.func))
    if not isinstance(value, ast.BinOp):
        return None
    left, right = _number(value.left, rank, world_size), _number(value.right, rank, world_size)
    return _combined(value.op, left, right) if left is not None and right is not None else None


def _combined(operator: ast.operator, left: int, right: int) -> int | None:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.BitXor():
            return left ^ right
        case ast.Mod() if right > 0:
            return left % right
        case ast.FloorDiv() if right > 0:
            return left // right
    return None


def wrong_peer(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """P2P_CYCLE where recvs (or sends) at one line, or two of them, wait for each other in a circle; P2P_MISSING_PEER on the one
    rank whose send goes past the rank that waits for it by name. All ranks must be known to wait; `states`: of all ranks."""
    halves = _halves(run, states)
    if any(_do_match(halves, rank) for rank in halves):
        return  # they would have met: the lines mislead
    circles = [
        _circle({rank: half for rank, half in halves.items() if half.is_send == is_send}) for is_send in (False, True)
    ]
    circle = next(filter(None, circles), ())
    if len(circle) == 2 or (circle and len({states[rank].where for rank in circle}) == 1):
        yield _verdict(
            run, states, circle, VerdictKind.P2P_CYCLE, Basis.BY_SOURCE_LINE,
            "wait for each other in the same direction, by their source lines: a P2P cycle",
        )  # fmt: skip
        return
    past = [
        (half.peer, rank)
        for rank, half in halves.items()
        if half.peer is not None and not half.is_send and (other := halves.get(half.peer)) is not None and other.is_send
        and run.step_of(rank) == run.step_of(half.peer)
    ]  # fmt: skip
    if len(past) == 1 and len(halves) == len(states):
        culprit, waiter = past[0]
        yield _verdict(
            run, states, (culprit,), VerdictKind.P2P_MISSING_PEER, Basis.BY_SOURCE_LINE,
            f"sends to a rank that does not receive, while rank {waiter} waits to receive from it by its source line; it was",
        )  # fmt: skip
        return
    for rank, half in halves.items():
        if half.peer is not None and half.peer not in halves:
            yield _verdict(
                run, states, (half.peer, rank), VerdictKind.P2P_MISSING_PEER, Basis.BY_SOURCE_LINE_TIE,
                f"do not meet: rank {rank} waits to {'send to' if half.is_send else 'receive from'} rank {half.peer} by its "
                "source line, which is in another operation",
            )  # fmt: skip
            return


def receivers_circle(run: Run, states: Mapping[int, Situation]) -> tuple[int, ...] | None:
    """The ranks that wait to receive from each other in a circle, by their source lines: () if there is none, None if a line does
    not tell whom its rank waits for."""
    halves = _halves(run, states)
    is_known = len(halves) == len(states) and all(half.peer is not None for half in halves.values())
    return _circle(halves) if is_known else None


def _halves(run: Run, states: Mapping[int, Situation]) -> dict[int, Half]:
    """The send or recv that each rank waits in, by its source line, where that tells."""
    return {rank: half for rank, state in states.items() if (half := _waits_in(run, state)) is not None}


def _waits_in(run: Run, state: Situation) -> Half | None:
    return half_of(state.frame.text, state.rank, run.world_size) if state.frame else None


def _do_match(halves: Mapping[int, Half], rank: int) -> bool:
    other = halves.get(halves[rank].peer) if halves[rank].peer is not None else None  # type: ignore[arg-type]
    return other is not None and other.peer == rank and other.is_send != halves[rank].is_send


def _circle(halves: Mapping[int, Half]) -> tuple[int, ...]:
    """Ranks of which each waits for the next one, all by their own lines; () if there is no such circle."""
    for start in halves:
        path = [start]
        while (half := halves.get(path[-1])) is not None and half.peer is not None and half.peer not in path:
            path.append(half.peer)
        if half is not None and half.peer is not None:
            return tuple(sorted(path[path.index(half.peer) :]))
    return ()


def without_group(run: Run, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """WRONG_GROUP on the one rank whose call names no group, at another line than those that wait in the same operation of a
    group. All other ranks are a step further: an operation of all ranks cannot have been on their way."""
    texts = {rank: state.frame.text for rank, state in states.items() if rank in witnesses and state.frame is not None}
    calls = {rank: call for rank, text in texts.items() if (call := names_group(text)) is not None}
    steps = {rank: run.step_of(rank) for rank in states}
    known = [step for step in steps.values() if step is not None]
    if len(known) < len(steps) or len(calls) < len(states):
        return
    behind = [rank for rank, step in steps.items() if step == min(known)]
    bare = [rank for rank in behind if not calls[rank][1]]
    ops = {calls[rank][0] for rank in behind}
    if len(bare) != 1 or len(behind) < 2 or len(behind) == len(states) or len(ops) != 1:
        return
    yield _verdict(
        run, states, tuple(bare), VerdictKind.WRONG_GROUP, Basis.BY_SOURCE_LINE,
        f"called {next(iter(ops))} of all ranks, without a group, where {rank_list([r for r in behind if r not in bare])} named "
        "one; the other ranks have passed that step; it was",
    )  # fmt: skip


def _verdict(
    run: Run, states: Mapping[int, Situation], culprits: tuple[int, ...], kind: VerdictKind, basis: Basis, text: str
) -> Verdict:
    state = states[culprits[0]]
    return Verdict(
        verdict=kind, culprits=culprits, victims=tuple(rank for rank in states if rank not in culprits),
        step=run.step_of(culprits[0]), confidence=basis.confidence, headline=f"{rank_list(culprits)} {text}{state.where}",
        evidence=tuple(item for rank in culprits[:4] for item in states[rank].evidence[:1]),
        next_steps=(
            "compare the peers and groups that these lines name, rank by rank",
            "with the recorder on, or with dumps, this would be certain",
        ),
        file=state.frame.file if state.frame else "", line=state.frame.line if state.frame else 0,
    )  # fmt: skip


# Who has its part of these goes on, though others still wait for the root or for their turn.
EXCHANGES = ("all_to_all", "all_to_all_single", "alltoall", "alltoall_base")
_TO_ROOT = ("reduce", "gather", "gather_object")  # the root waits for whoever left it out
_FROM_ROOT = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list")
ROOTED = (*_FROM_ROOT, *_TO_ROOT, *EXCHANGES)
_ROOT = re.compile(r"\b(?:group_)?(?:src|dst)\s{0,4}=\s{0,4}(\d{1,6})\b|\bbroadcast\([^,()]{1,80},\s{0,4}(\d{1,6})\b")


def may_wait_for_one(record: RankRecord, call: str) -> bool:
    """Whether a rank alone in this call may wait for a rank that left it out: any in an exchange, or in what a root collects; the
    root itself in what it hands out, by the line of its traceback, else rank 0 as mostly."""
    if call in _FROM_ROOT:
        texts = (frame.text for event in record.events for frame in event.calls)
        roots = {int(match[1] or match[2]) for text in texts if (match := _ROOT.search(text)) is not None}
        return record.rank in (roots or {0})
    return call in ROOTED


__all__ = ["EXCHANGES", "ROOTED", "Half", "half_of", "may_wait_for_one", "names_group", "without_group", "wrong_peer"]
