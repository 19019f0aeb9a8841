"""From a rank that others wait for to a verdict that names why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_ckpt.debug.diagnosis.busy_with import PHASES
from titan_ckpt.debug.diagnosis.rank_state import (
    DEAD,
    FINISHED,
    FROZEN,
    GIL_HELD,
    IN_COLLECTIVE,
    IN_INIT,
    IN_P2P,
    IN_TEARDOWN,
    ON_CPU,
    Situation,
    has_other_death,
    saw_peers_close,
    saw_timeouts,
)
from titan_ckpt.debug.diagnosis.wait_graph import Edge, shortest_chain
from titan_ckpt.debug.incident.records import COMPLETED, Evidence, RankRecord, Run, Verdict

_ADVICE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RANK_DIED", "signal"): (
        "look at `dmesg` and the scheduler's log of that host",
        "set ulimit -c unlimited, or faulthandler, for the next crash",
    ),
    ("RANK_DIED", "oom"): ("lower the batch or the memory of the rank's host; compare its memory with its peers'",),
    ("RANK_DIED", "python_exception"): ("fix the exception at that line; the other ranks are only its victims",),
    ("RANK_DIED", ""): (
        "read that rank's log and its host's `dmesg`",
        "turn the recorder on, so that the next death leaves a black box",
    ),
    ("RANK_FROZEN", ""): (
        "look at /proc/PID/stat and `dmesg` on its host: stopped (T), in disk sleep (D), or the host lost",
        "take the host out and restart from the newest checkpoint",
    ),
    ("STUCK_ON_CPU", "dataloader"): (
        "check the storage and the worker processes behind that line",
        "give the loader a timeout (DataLoader(timeout=...))",
    ),
    ("STUCK_ON_CPU", "checkpoint_io"): (
        "check the store that the checkpoint goes to: quota, throttling, a hung mount",
        "save asynchronously (titan_ckpt.Saver), with no barrier behind a slow write",
    ),
    ("STUCK_ON_CPU", "python_lock"): (
        "find who holds the lock: the other threads of this rank's stacks",
        "acquire with a timeout; keep the order of locks fixed",
    ),
    ("STUCK_ON_CPU", "gil_held"): (
        "find the extension code at that line that keeps the GIL",
        "run `py-spy dump --native --pid PID` on the process",
    ),
    ("STUCK_ON_CPU", "gc"): ("call gc.freeze() after start-up and gc.collect() at fixed steps on all ranks at once",),
    ("STUCK_ON_CPU", ""): ("take a stack of that rank: `py-spy dump --pid PID`",),
    ("SKIPPED_COLLECTIVE", "finished_early"): (
        "give every rank the same number of batches (drop the last, or pad), or use join",
    ),
    ("PG_INIT_HANG", "new_group"): ("call new_group on every rank, members or not, in the same order",),
    ("INSUFFICIENT_DATA", ""): (
        "take the stack of that rank: `py-spy dump --pid PID`; it tells a send or recv from a hang of its own",
        "turn the recorder on (titan_ckpt.debug.Recorder.start(folder, rank=..., world_size=...)) and run again",
    ),
    ("P2P_MISSING_PEER", ""): ("look for the peer's half of this send/recv pair: a branch that leaves it out",),
}


_DEATHS = {"oom": "ran out of memory", "python_exception": "raised an exception"}
_BUSY = {
    "dataloader": "in its data loader",
    "checkpoint_io": "in checkpoint I/O",
    "python_lock": "waiting for a Python lock",
    "gc": "in garbage collection",
}


def verdict_of(run: Run, root: int, edges: Sequence[Edge], states: Mapping[int, Situation]) -> Verdict:
    """Why `root`, for whom others wait, does not come."""
    state = states[root]
    chain = shortest_chain(edges, root)
    first = next((edge for edge in edges if edge.awaited == root and edge.group >= 0), None)
    name, subtype, confidence, says = _classify(run, state, first)
    record = run.ranks[root]
    culprits = {"P2P_MISSING_PEER": _possible_peers(run, root), "WAIT_CHAIN": (), "INSUFFICIENT_DATA": ()}.get(
        name, (root,)
    )
    return Verdict(
        verdict=name,
        subtype=subtype,
        culprits=culprits,
        victims=tuple(sorted({root, *(waiter for waiter, _ in chain)} - set(culprits))),
        group=str(run.groups[first.group]) if first else "",
        seq=first.seq if first and not first.is_p2p else None,
        op=_operation_waited_for(run, first),
        step=run.step_of(root),
        confidence=confidence,
        headline=f"rank {root}{_coordinate(record.coordinates)} {says}",
        evidence=(*state.evidence, *_waiting(run, first, chain, states)),
        chain=chain,
        next_steps=advice(name, subtype),
    )


def _classify(run: Run, state: Situation, edge: Edge | None) -> tuple[str, str, float, str]:
    where = f" at {state.frame.file}:{state.frame.line}" if state.frame else ""
    if state.kind == DEAD:
        how = _DEATHS.get(state.detail, f"was killed by {state.call or 'a signal'}")
        return "RANK_DIED", state.detail, state.confidence, f"died: it {how}{where}"
    if state.kind == FROZEN:
        return (
            "RANK_FROZEN",
            "",
            state.confidence,
            f"is frozen: its process does not run at all{_last_seen(where)}",
        )
    if state.kind == GIL_HELD:
        return "STUCK_ON_CPU", state.detail, state.confidence, f"is stuck with the GIL held{where}"
    if state.kind == FINISHED:
        return (
            "SKIPPED_COLLECTIVE",
            "finished_early",
            0.85,
            "ended normally while the others expect another operation of it",
        )
    if state.kind == IN_TEARDOWN:
        return "TEARDOWN_STUCK", "", 0.7, f"is shutting down{where} while the others expect another operation of it"
    if state.kind == IN_INIT:
        return "PG_INIT_HANG", "new_group", 0.75, f"waits for a process group to be made{where}"
    if state.kind == IN_P2P:
        return "P2P_MISSING_PEER", "", 0.6, f"waits in {state.call}{where} for a peer that does not come"
    if state.kind == IN_COLLECTIVE and edge is not None:
        return _in_collective(run, state, edge, where)
    if state.kind == ON_CPU:
        busy = _BUSY.get(state.detail, "in its own code")
        return "STUCK_ON_CPU", state.detail, state.confidence, f"is stuck {busy}{where}, not in any collective"
    return _silent(run, state)


def _in_collective(run: Run, state: Situation, edge: Edge, where: str) -> tuple[str, str, float, str]:
    """Why a rank that others wait for waits itself."""
    if _is_elsewhere(run, state, edge):
        text = f"waits in {state.call}{where}, while the others wait for it in {_operation_waited_for(run, edge)}"
        return "SKIPPED_COLLECTIVE", "", 0.6, text
    if state.call == "wait" and not _has_pending(run, state.rank):
        text = f"waits{where} for something that its dump does not hold: a send or recv, whose peer does not come"
        return "P2P_MISSING_PEER", "", 0.5, text
    return "WAIT_CHAIN", "", 0.5, f"waits in {state.call or 'a collective'}{where}, for whom the evidence does not say"


def _is_elsewhere(run: Run, state: Situation, edge: Edge) -> bool:
    """Whether the stack of a rank that left no dump shows it in another collective than the one it is awaited in."""
    if run.ranks[state.rank].dumps:
        return False
    mine, awaited = _bare(state.call), _bare(_operation_waited_for(run, edge))
    return mine not in ("", "wait") and bool(awaited) and mine not in awaited and awaited not in mine


def _bare(op: str) -> str:
    return op.replace("_", "").replace("intotensor", "").replace("tensor", "").replace("coalesced", "")


def _has_pending(run: Run, rank: int) -> bool:
    table = run.ranks[rank].operations
    return bool((~table["retired"] & (table["state"] != COMPLETED)).any())


def _possible_peers(run: Run, waiting: int) -> tuple[int, ...]:
    """Who owes `waiting` the other half, where nobody recorded it: certain only if there is one other rank."""
    others = tuple(rank for rank in run.ranks if rank != waiting)
    return others if len(others) == 1 else ()


def _last_seen(where: str) -> str:
    return f"; last seen{where}" if where else ""


def _silent(run: Run, state: Situation) -> tuple[str, str, float, str]:
    """A rank that left no stack and no exit code: its peers' errors tell whether it was still connected."""
    closed, timeouts = saw_peers_close(run), saw_timeouts(run)
    if has_other_death(run, state.rank):
        closed = []
    record = run.ranks[state.rank]
    is_silent = not any(dump.kind == "flight_recorder" for dump in record.dumps) and not record.stacks
    stopped = stopped_ticking(run, state.rank)
    if is_silent and stopped and not closed:
        is_open = bool(timeouts)
        says = "is frozen" if is_open else "is frozen (or dead, or something keeps its GIL)"
        says += f": its recorder stopped ticking {stopped:.0f} s before the others'"
        return "RANK_FROZEN", "", 0.8 if is_open else 0.5, says
    if is_silent and stopped:
        return (
            "RANK_DIED",
            "",
            0.85,
            f"died: its recorder stopped ticking {stopped:.0f} s before the others' and its connections closed",
        )
    if closed and not timeouts:
        return "RANK_DIED", "", 0.7, "is gone: its peers' connections to it were closed"
    if _had_exception(record):
        return (
            "RANK_DIED",
            "python_exception",
            0.6,
            "died of an exception: its recorder dumped for one, whose text is not here",
        )
    if record.heartbeat is not None:
        return _by_heartbeat(record)
    if is_silent and timeouts and not closed:
        return "RANK_FROZEN", "", 0.6, "left nothing, and its peers' connections to it stayed open until they timed out"
    if is_silent:
        return "RANK_DIED", "", 0.4, "left no dump and no stack, as a dead or frozen rank does"
    says = "did not issue the operation that the others wait for; without its stack the reason is unknown"
    if _is_gloo(record):
        return (
            "INSUFFICIENT_DATA",
            "",
            0.4,
            f"{says}: stuck, or itself waiting in a send or recv, which gloo's dumps do not hold",
        )
    return "STUCK_ON_CPU", "", 0.5, says


def _is_gloo(record: RankRecord) -> bool:
    """Whether no dump knows more than that operations were scheduled, and none holds a send or recv."""
    table = record.operations
    return bool(len(table)) and not (table["state"].any() or table["p2p"].any() or record.heartbeat)


def _had_exception(record: RankRecord) -> bool:
    """Whether the recorder dumped because of an exception."""
    reasons = [*(dump.reason for dump in record.dumps), *(stack.reason for stack in record.stacks)]
    return any("exception" in reason for reason in reasons)


def _by_heartbeat(record: RankRecord) -> tuple[str, str, float, str]:
    """A rank without a stack whose recorder ticked to the end: it ran, and its phase may say what."""
    assert record.heartbeat is not None
    phase = record.heartbeat.phase
    subtype = PHASES.get(phase, "")
    if subtype:
        return (
            "STUCK_ON_CPU",
            subtype,
            0.7,
            f"is stuck {_BUSY[subtype]}: it runs, in phase {phase} of the training loop",
        )
    return (
        "STUCK_ON_CPU",
        "",
        0.5,
        "runs, but did not issue the operation that the others wait for; without its stack the reason is unknown",
    )


def advice(name: str, subtype: str) -> tuple[str, ...]:
    """What to do about a verdict."""
    return _ADVICE.get((name, subtype), _ADVICE.get((name, ""), ()))


def stopped_ticking(run: Run, rank: int) -> float:
    """Seconds by which a rank's recorder fell silent before the last of the others; 0 if it did not."""
    mine = run.ranks[rank].heartbeat
    others = [r.heartbeat.alive_ns for r in run.ranks.values() if r.heartbeat and r.rank != rank]
    if mine is None or not others or mine.is_stopped:
        return 0.0
    gap_s = (max(others) - mine.alive_ns) / 1e9
    return gap_s if gap_s > 1.0 else 0.0


def _operation_waited_for(run: Run, edge: Edge | None) -> str:
    if edge is None:
        return ""
    table = run.ranks[edge.waiter].operations
    match = (table["group"] == edge.group) & (table["seq"] == edge.seq) & ((table["p2p"] != 0) == edge.is_p2p)
    rows = match.nonzero()[0]
    return run.names.ops[table["op"][rows[-1]]] if len(rows) else ""


def _waiting(
    run: Run, edge: Edge | None, chain: Sequence[tuple[int, int]], states: Mapping[int, Situation]
) -> list[Evidence]:
    if edge is None:
        return []
    frame = states[edge.waiter].frame
    op = _operation_waited_for(run, edge)
    direct = sorted(waiter for waiter, awaited in chain if awaited == chain[0][1])
    others = f" (as do {len(direct) - 1} more)" if len(direct) > 1 else ""
    return [
        Evidence(
            text=f"waits in {op} #{edge.seq} of group {run.groups[edge.group]}{others}",
            rank=edge.waiter,
            source="flight recorder",
            file=frame.file if frame else "",
            line=frame.line if frame else 0,
        )
    ]


def _coordinate(coordinates: Mapping[str, int]) -> str:
    return " (" + ", ".join(f"{axis} {place}" for axis, place in coordinates.items()) + ")" if coordinates else ""
