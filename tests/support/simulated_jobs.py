"""Simulated jobs: a program per rank, NCCL semantics, one fault, and the resulting Flight Recorder dumps.

Covers what gloo cannot (operations scheduled, started or completed on a device, asynchronous queues), at any size, with
a known ground truth. Each group has a stream per rank; the CPU runs ahead of it and waits for all of its
streams once a step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_ckpt.debug.incident.kinds import VerdictKind

FAULTS = (
    "none", "skip", "order", "op", "size", "dtype", "stuck", "died", "extra", "p2p_missing", "p2p_size", "not_started",
    "not_completed",
)  # fmt: skip
VERDICTS: Mapping[str, tuple[str, ...]] = {
    "none": (VerdictKind.HEALTHY, VerdictKind.RUNNING),
    "skip": (
        VerdictKind.SKIPPED_COLLECTIVE,
        VerdictKind.ORDER_MISMATCH,
        VerdictKind.SIZE_MISMATCH,
        VerdictKind.CALLSITE_DIVERGENCE,
        VerdictKind.STUCK_ON_CPU,
    ),
    "order": (
        VerdictKind.ORDER_MISMATCH,
        VerdictKind.SKIPPED_COLLECTIVE,
        VerdictKind.SIZE_MISMATCH,
        VerdictKind.CALLSITE_DIVERGENCE,
    ),
    "op": (VerdictKind.OP_MISMATCH,),
    "size": (VerdictKind.SIZE_MISMATCH,),
    "dtype": (VerdictKind.DTYPE_MISMATCH,),
    "stuck": (VerdictKind.STUCK_ON_CPU,),
    "died": (VerdictKind.RANK_DIED,),
    "extra": (VerdictKind.SKIPPED_COLLECTIVE,),
    "p2p_missing": (VerdictKind.P2P_MISSING_PEER, VerdictKind.STUCK_ON_CPU),
    "p2p_size": (VerdictKind.P2P_SIZE_MISMATCH,),
    "not_started": (VerdictKind.SCHEDULED_NOT_STARTED,),
    "not_completed": (VerdictKind.STARTED_NOT_COMPLETED,),
}


START_NS = 1_795_226_821_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective in a program; or one send or recv (`op`) with `peer`, on the world's group. `batch` > 0: it was issued
    in a batch, whose state NCCL keeps in an entry of its own."""

    group: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    line: int
    peer: int = -1
    batch: int = 0


@dataclass(slots=True, kw_only=True)
class _Issued:
    call: Call
    seq: int
    created_ns: int
    started_ns: int = 0
    completed_ns: int = 0
    p2p_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job: its groups, each rank's steps, and the injected fault."""

    size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[Call, ...], ...], ...]
    fault: str
    culprit: int
    stops_in_step: int | None = None

    @property
    def truth(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Acceptable verdicts, and the culprits."""
        return VERDICTS[self.fault], () if self.fault in ("none", "not_completed") else (self.culprit,)


def random_scenario(seed: int, sizes: Sequence[int] = (2, 4, 8, 16)) -> Scenario:
    """A mesh of two axes, a random training step that repeats, and one random fault in a late step."""
    rng = random.Random(seed)
    size = rng.choice(sizes)
    groups = _mesh_groups(size, rng)
    body = _body(groups, rng)
    num_steps = rng.randint(4, 7)
    fault, culprit = rng.choice(FAULTS), rng.randrange(size)
    exchange = _exchange(size, rng) if fault.startswith("p2p") or rng.random() < 0.5 else None
    steps = [
        [
            (*(exchange(rank) if exchange else ()), *(call for call in body if rank in groups[call.group]))
            for _ in range(num_steps)
        ]
        for rank in range(size)
    ]
    stops = None
    if fault in ("stuck", "died"):
        stops = num_steps - 1
    elif fault.startswith("p2p"):
        steps[culprit][-1] = _broken_pair(steps[culprit][-1], fault)
    elif fault not in ("none", "not_started", "not_completed"):
        steps[culprit][-1] = _broken(steps[culprit][-1], fault, rng)
    return Scenario(
        size=size, groups=groups, steps=tuple(tuple(program) for program in steps), fault=fault, culprit=culprit,
        stops_in_step=stops,
    )  # fmt: skip


def _mesh_groups(size: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """The world, and for a mesh (a, b) of it the rows and columns that have several ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    width = rng.choice(divisors)
    rows = [tuple(range(start, start + width)) for start in range(0, size, width)] if width > 1 else []
    columns = [tuple(range(start, size, width)) for start in range(width)] if width < size else []
    smaller = [group for group in (*rows, *columns) if 1 < len(group) < size]
    return (tuple(range(size)), *smaller)


def _body(groups: Sequence[tuple[int, ...]], rng: random.Random) -> list[Call]:
    """One step: calls on each kind of group in a fixed order, the same on all ranks."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, group in enumerate(groups):
        kinds.setdefault((len(group), group[1] - group[0]), []).append(index)
    body, line = [], 100
    for _ in range(rng.randint(3, 6)):
        alike = rng.choice(list(kinds.values()))
        op = rng.choice(("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast"))
        shape, dtype, line = (rng.randint(2, 500), rng.randint(2, 64)), rng.choice(("Float", "BFloat16")), line + 7
        body += [Call(group=index, op=op, shape=shape, dtype=dtype, line=line) for index in alike]
    return [*body, Call(group=0, op="all_reduce", shape=(1,), dtype="Float", line=line + 7)]


def _exchange(size: int, rng: random.Random) -> Callable[[int], tuple[Call, ...]]:
    """What each rank does for a ring in which everybody sends to the next: even ranks send first, or all of it in one batch."""
    shape, batch = (rng.randint(2, 500), 8), rng.choice((0, 1))

    def calls(rank: int) -> tuple[Call, ...]:
        send = Call(group=0, op="send", shape=shape, dtype="BFloat16", line=50, peer=(rank + 1) % size, batch=batch)
        receive = Call(group=0, op="recv", shape=shape, dtype="BFloat16", line=51, peer=(rank - 1) % size, batch=batch)
        return (send, receive) if rank % 2 == 0 else (receive, send)

    return calls


def _broken_pair(step: tuple[Call, ...], fault: str) -> tuple[Call, ...]:
    """The culprit's step without its send, or with a larger one."""
    if fault == "p2p_missing":
        return tuple(call for call in step if call.op != "send")
    return tuple(replace(call, shape=(call.shape[0] + 1, 8)) if call.op == "send" else call for call in step)


def _broken(step: tuple[Call, ...], fault: str, rng: random.Random) -> tuple[Call, ...]:
    """The culprit's step with one thing wrong. The last call (a loss reduced over the world) stays."""
    calls = list(step)
    collectives = [i for i, call in enumerate(calls) if call.peer < 0]
    at = rng.choice(collectives[:-1] or collectives)
    call = calls[at]
    if fault == "skip":
        del calls[at]
    elif fault == "order":
        pairs = [
            i for i in collectives[:-1] if calls[i].group == calls[i + 1].group and _differ(calls[i], calls[i + 1])
        ]
        if not pairs:
            return _broken(step, "size", rng)
        at = rng.choice(pairs)
        calls[at], calls[at + 1] = calls[at + 1], calls[at]
    elif fault == "op":
        calls[at] = replace(call, op="reduce" if call.op != "reduce" else "all_reduce", line=call.line + 1)
    elif fault == "size":
        calls[at] = replace(call, shape=(call.shape[0] + 1, *call.shape[1:]))
    elif fault == "dtype":
        calls[at] = replace(call, dtype="Double")
    elif fault == "extra":
        calls.insert(at, Call(group=call.group, op="all_gather", shape=(3,), dtype="Long", line=call.line - 3))
    return tuple(calls)


def _differ(a: Call, b: Call) -> bool:
    return (a.op, a.shape, a.dtype) != (b.op, b.shape, b.dtype)


@dataclass(slots=True)
class _State:
    """One run of a scenario."""

    scenario: Scenario
    issued: dict[int, list[_Issued]] = field(default_factory=dict)
    step: dict[int, int] = field(default_factory=dict)
    clock_ns: int = START_NS


def simulate(scenario: Scenario) -> dict[int, list[_Issued]]:
    """What each rank had issued, started and completed when progress stopped."""
    state = _State(scenario)
    for rank in range(scenario.size):
        state.issued[rank], state.step[rank] = [], 0
    while any([_advance(state, rank) for rank in range(scenario.size)]) | _run_streams(state):  # noqa: C419  (all must move)
        pass
    return state.issued


def _advance(state: _State, rank: int) -> bool:
    """Let a rank's CPU issue its next step, once all it issued before is complete."""
    program, at = state.scenario.steps[rank], state.step[rank]
    is_stopped = rank == state.scenario.culprit and at == state.scenario.stops_in_step
    if at >= len(program) or is_stopped or any(not op.completed_ns for op in state.issued[rank]):
        return False
    created_ns = max((op.completed_ns for op in state.issued[rank]), default=START_NS) + rank * 1_000
    for call in program[at]:
        created_ns += 1_000_000
        state.clock_ns = max(state.clock_ns, created_ns)
        before = state.issued[rank]
        seq = sum(op.call.group == call.group and op.call.peer < 0 for op in before) + (call.peer < 0)
        is_next = call.peer >= 0 and not (call.batch and before and before[-1].call.batch)
        p2p_seq = max((op.p2p_seq for op in before), default=0) + is_next
        before.append(_Issued(call=call, seq=seq, created_ns=created_ns, p2p_seq=p2p_seq))
    state.step[rank] = at + 1
    return True


def _run_streams(state: _State) -> bool:
    """Start the head of each stream; complete operations that all members started with matching arguments."""
    has_moved = _run_pairs(state)
    for group, members in enumerate(state.scenario.groups):
        heads = {rank: head for rank in members if (head := _head(state.issued[rank], group)) is not None}
        for rank, head in heads.items():
            if not head.started_ns and not _is_held(state, rank, head, "not_started"):
                head.started_ns = state.clock_ns = state.clock_ns + 1000
                has_moved = True
        if any(not head.started_ns or _is_held(state, rank, head, "not_completed") for rank, head in heads.items()):
            continue
        alike = {(head.seq, head.call.op, head.call.shape, head.call.dtype) for head in heads.values()}
        if len(heads) == len(members) and len(alike) == 1:
            state.clock_ns += 50_000
            for head in heads.values():
                head.completed_ns = state.clock_ns
            has_moved = True
    return has_moved


def _is_held(state: _State, rank: int, head: _Issued, fault: str) -> bool:
    """Whether the culprit's device is stuck, which happens at the last operation of the world's group."""
    scenario = state.scenario
    if scenario.fault != fault or rank != scenario.culprit or head.call.group != 0:
        return False
    return head is state.issued[rank][-1] and state.step[rank] == len(scenario.steps[rank])


def _run_pairs(state: _State) -> bool:
    """Start the oldest send and receive of each pair; complete both once they are present and match."""
    has_moved = False
    for rank, issued in state.issued.items():
        for send in (op for op in issued if op.call.op == "send" and not op.completed_ns):
            other = next(
                (op for op in state.issued[send.call.peer]
                 if op.call.op == "recv" and op.call.peer == rank and not op.completed_ns), None,
            )  # fmt: skip
            if other is not None and (send.call.shape, send.call.dtype) == (other.call.shape, other.call.dtype):
                state.clock_ns += 50_000
                for half in (send, other):
                    half.started_ns, half.completed_ns = state.clock_ns - 40_000, state.clock_ns
                has_moved = True
    return has_moved


def _head(issued: Sequence[_Issued], group: int) -> _Issued | None:
    return next((op for op in issued if op.call.group == group and op.call.peer < 0 and not op.completed_ns), None)


def dumps(scenario: Scenario, issued: Mapping[int, Sequence[_Issued]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(rank, dump) in the layout of torch's JSON dumps; a dead rank has none."""
    for rank in range(scenario.size):
        if scenario.fault == "died" and rank == scenario.culprit:
            continue
        config = {
            str(i): {"name": str(i), "desc": "default_pg" if i == 0 else f"mesh_{i}", "ranks": str(list(group))}
            for i, group in enumerate(scenario.groups)
            if rank in group
        }
        yield (
            rank,
            {"version": "2.10", "pg_config": config, "entries": _entries(rank, issued[rank])},
        )


def _entries(rank: int, issued: Sequence[_Issued]) -> list[dict[str, Any]]:
    """A dump's entries. Those of a batch carry no state; the entry that follows them carries only that."""
    found: list[dict[str, Any]] = []
    for i, op in enumerate(issued):
        entry = _entry(len(found), op)
        if op.call.peer >= 0:
            arrow = "->" if op.call.op == "send" else "<-"
            entry |= {"profiling_name": f"nccl:{op.call.op} {rank}{arrow}{op.call.peer}", "is_p2p": True}
        if not op.call.batch:
            found.append(entry)
            continue
        unknown = {"state": "scheduled", "retired": False, "time_discovered_started_ns": None}
        found.append(entry | unknown | {"time_discovered_completed_ns": None})
        if i + 1 == len(issued) or not issued[i + 1].call.batch:
            inside = [other for other in issued if other.call.batch and other.p2p_seq == op.p2p_seq]
            found.append(_batch(len(found), entry, inside))
    return found


def _batch(number: int, last: dict[str, Any], inside: Sequence[_Issued]) -> dict[str, Any]:
    is_done = all(op.completed_ns for op in inside)
    empty: dict[str, Any] = {"input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": []}
    return last | empty | {
        "record_id": number, "profiling_name": "nccl:coalesced", "state": "completed" if is_done else "started",
        "retired": is_done, "time_discovered_started_ns": last["time_created_ns"] + 1000,
        "time_discovered_completed_ns": max(op.completed_ns for op in inside) if is_done else None,
    }  # fmt: skip


def _entry(number: int, op: _Issued) -> dict[str, Any]:
    state = "completed" if op.completed_ns else "started" if op.started_ns else "scheduled"
    call = op.call
    return {
        "frames": [{"name": "train_step", "filename": "/app/train.py", "line": call.line}],
        "record_id": number,
        "pg_id": call.group,
        "process_group": [str(call.group), "default_pg" if call.group == 0 else f"mesh_{call.group}"],
        "collective_seq_id": op.seq,
        "p2p_seq_id": op.p2p_seq,
        "op_id": op.seq,
        "profiling_name": f"nccl:{call.op}",
        "time_created_ns": op.created_ns,
        "input_sizes": [list(call.shape)],
        "input_dtypes": [call.dtype],
        "output_sizes": [list(call.shape)],
        "output_dtypes": [call.dtype],
        "state": state,
        "time_discovered_started_ns": op.started_ns or None,
        "time_discovered_completed_ns": op.completed_ns or None,
        "retired": bool(op.completed_ns),
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def write(scenario: Scenario, folder: Path) -> None:
    """Simulate, and write the dumps (and the exit code of a dead rank) to `folder`."""
    for rank, dump in dumps(scenario, simulate(scenario)):
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump))
    if scenario.fault == "died":
        exits = {"titan_ckpt": "exits", "exits": [{"rank": scenario.culprit, "code": -9}]}
        (folder / "exits.json").write_text(json.dumps(exits))
