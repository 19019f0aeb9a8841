"""From a rank that others wait for to a verdict that names why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from titan_ckpt.debug.diagnosis.advice import advice
from titan_ckpt.debug.diagnosis.ends import had_exception, has_end, left_gone
from titan_ckpt.debug.diagnosis.from_logs.lost_rank import loss_of
from titan_ckpt.debug.diagnosis.mismatches.ended_rank import addressed_wrongly, as_many_ended, astray
from titan_ckpt.debug.diagnosis.rank_state import has_other_death, saw_peers_close, saw_timeouts
from titan_ckpt.debug.diagnosis.waiting.failed import left_with_error
from titan_ckpt.debug.diagnosis.waiting.other_collective import has_pending, is_elsewhere, operation_waited_for
from titan_ckpt.debug.diagnosis.waiting.overtaking import overtakes
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge, row_of, shortest_chain
from titan_ckpt.debug.incident.busy_with import PHASES
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import abort_stack, crash_frame, user_frame
from titan_ckpt.debug.incident.kinds import RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Heartbeat, RankRecord, Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import waited_at_the_end

_BUSY = {
    Subtype.DATALOADER: "in its data loader",
    Subtype.CHECKPOINT_IO: "in checkpoint I/O",
    Subtype.PYTHON_LOCK: "waiting for a Python lock",
    Subtype.GC: "in garbage collection",
    Subtype.STARVED: "without a processor",
}

OUTLIVED_S = 2.0  # by which ranks outlive one that died: a launcher kills all within less
LATE_TICK_S = 10.0  # a busy rank on a crowded machine ticks late; a dead or stopped one never again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reason:
    """Why a rank does not come; `text` continues a sentence that begins with the rank."""

    verdict: VerdictKind
    confidence: float
    text: str
    subtype: Subtype = Subtype.NONE


def verdict_of(run: Run, root: int, edges: Sequence[Edge], states: Mapping[int, Situation]) -> Verdict:
    """Why `root`, for whom others wait, does not come."""
    state = states[root]
    chain = shortest_chain(edges, root)
    stray = astray(root, edges) if state.kind == RankState.FINISHED else None
    if stray is not None:
        return addressed_wrongly(run, stray, root, chain, states)
    first = next((edge for edge in edges if edge.awaited == root and edge.group >= 0), None)
    reason = _reason(run, state, first)
    if state.kind == RankState.IN_INIT and sum(other.kind == RankState.IN_INIT for other in states.values()) > 1:
        reason = replace(reason, confidence=Basis.GROUP_TIE.confidence)  # others wait there as well: it is no odd one
    if (
        state.kind == RankState.FINISHED
        and first is not None
        and not first.is_p2p
        and as_many_ended(run, first, edges, states)
    ):
        text = f"{reason.text}; as many ranks ended as wait, so either may be wrong"
        reason = replace(reason, confidence=Basis.ENDED_AS_MANY.confidence, text=text)
    culprits = () if _meets_all(state) else _culprits(run, root, reason.verdict)
    is_dead = state.kind == RankState.DEAD and state.frame is not None
    return Verdict(
        verdict=reason.verdict,
        subtype=reason.subtype,
        culprits=culprits,
        victims=tuple(sorted({root, *(waiter for waiter, _ in chain)} - set(culprits))),
        group=str(run.groups[first.group]) if first else "",
        seq=first.seq if first and not (first.is_p2p or first.is_after) else None,
        op=operation_waited_for(run, first) or _call(first, chain, states),
        step=run.step_of(root),
        confidence=reason.confidence,
        headline=f"rank {root}{_coordinate(run, root)} {reason.text}",
        evidence=(*state.evidence, *_waiting(run, first, chain, states)),
        chain=chain,
        next_steps=advice(reason.verdict, reason.subtype, state.signal),
        signal=state.signal,
        file=state.frame.file if is_dead and state.frame else "",
        line=state.frame.line if is_dead and state.frame else 0,
    )


def _meets_all(state: Situation) -> bool:
    """Whether a rank waits in init_process_group, which every rank calls: to be still there is no wrong turn."""
    return state.kind == RankState.IN_INIT and state.call == "init_process_group"


def _culprits(run: Run, root: int, verdict: VerdictKind) -> tuple[int, ...]:
    if verdict in (VerdictKind.WAIT_CHAIN, VerdictKind.INSUFFICIENT_DATA):
        return ()
    return _possible_peers(run, root) if verdict == VerdictKind.P2P_MISSING_PEER else (root,)


def _reason(run: Run, state: Situation, edge: Edge | None) -> _Reason:
    where = state.where
    if state.kind == RankState.DEAD:
        text = f"died: it {state.call or cause_of_death(state.detail, state.signal)}{where}"
        return _Reason(verdict=VerdictKind.RANK_DIED, subtype=state.detail, confidence=state.confidence, text=text)
    if state.kind == RankState.FROZEN:
        text = f"is frozen: its process does not run at all{_last_seen(where)}"
        return _Reason(verdict=VerdictKind.RANK_FROZEN, confidence=state.confidence, text=text)
    if state.kind == RankState.GIL_HELD:
        text = f"is stuck with the GIL held{where}"
        return _Reason(verdict=VerdictKind.STUCK_ON_CPU, subtype=state.detail, confidence=state.confidence, text=text)
    if state.kind == RankState.ON_CPU:
        text = f"is stuck {_BUSY.get(state.detail, 'in its own code')}{where}, {state.call or 'not in any collective'}"
        return _Reason(verdict=VerdictKind.STUCK_ON_CPU, subtype=state.detail, confidence=state.confidence, text=text)
    if state.kind == RankState.FINISHED:
        return _Reason(
            verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.FINISHED_EARLY, confidence=Basis.ENDED_NORMALLY.confidence,
            text="ended normally while the others expect another operation of it",
        )  # fmt: skip
    if state.kind == RankState.IN_TEARDOWN:
        text = f"is shutting down{where} while the others expect another operation of it"
        return _Reason(verdict=VerdictKind.TEARDOWN_STUCK, confidence=Basis.STACK_IN_TEARDOWN.confidence, text=text)
    if state.kind == RankState.IN_INIT:
        is_late = _meets_all(state)
        return _Reason(
            verdict=VerdictKind.PG_INIT_HANG, subtype=Subtype.NONE if is_late else Subtype.NEW_GROUP,
            confidence=(Basis.INIT_ALL if is_late else Basis.STACK_IN_INIT).confidence,
            text=f"waits {'in init_process_group' if is_late else 'for a process group to be made'}{where}",
        )  # fmt: skip
    if state.kind == RankState.IN_P2P:
        text = f"waits in {state.call}{where} for a peer that does not come"
        return _Reason(verdict=VerdictKind.P2P_MISSING_PEER, confidence=Basis.STACK_IN_P2P.confidence, text=text)
    if (overtaken := _overtakes(run, state, edge)) is not None:
        return overtaken
    if edge is not None and (state.kind == RankState.IN_COLLECTIVE or _has_pending_in_torch(run, state)):
        return _in_collective(run, state, edge)
    if state.kind == RankState.IN_TORCH:
        text = f"is in {state.call}{where}, and did not issue the operation that the others wait for"
        return _Reason(verdict=VerdictKind.STUCK_ON_CPU, confidence=Basis.STACK_IN_TORCH.confidence, text=text)
    return _without_stack(run, state)


def _has_pending_in_torch(run: Run, state: Situation) -> bool:
    return state.kind == RankState.IN_TORCH and has_pending(run, state.rank)


def _overtakes(run: Run, state: Situation, edge: Edge | None) -> _Reason | None:
    """A rank that went on to another group's operation without the one that the others wait for."""
    rows = overtakes(run, state.rank, edge) if edge is not None and not edge.is_p2p else None
    if edge is None or rows is None:
        return None
    done = run.operation(state.rank, rows[1])
    frame = user_frame(done.frames, run.wrappers)
    text = (
        f"issued {done.op} #{done.seq} of group {done.group}{f' at {frame.place}' if frame else ''} without "
        f"{operation_waited_for(run, edge)} #{edge.seq} of group {run.groups[edge.group]}, which the others issue before it"
    )
    return _Reason(
        verdict=VerdictKind.ORDER_MISMATCH,
        subtype=Subtype.ACROSS_GROUPS,
        confidence=Basis.OVERTOOK.confidence,
        text=text,
    )


def cause_of_death(subtype: Subtype, signal: str, *, are_many: bool = False) -> str:
    """What ended a rank, as the predicate of a sentence about it."""
    if subtype == Subtype.OOM:
        return "ran out of memory"
    if subtype == Subtype.PYTHON_EXCEPTION:
        return "raised an exception"
    if subtype == Subtype.DEVICE:
        return "lost the GPU to an error"
    if subtype == Subtype.EXIT_CODE:
        return "left with an exit code other than 0"
    if subtype == Subtype.HOST:
        return "lost the host"
    return f"{'were' if are_many else 'was'} killed by {signal or 'a signal'}"


def _in_collective(run: Run, state: Situation, edge: Edge) -> _Reason:
    """Why a rank that others wait for waits itself."""
    where = state.where
    if is_elsewhere(run, state, edge):
        text = f"waits in {state.call}{where}, while the others wait for it in {operation_waited_for(run, edge)}"
        return _Reason(verdict=VerdictKind.SKIPPED_COLLECTIVE, confidence=Basis.OTHER_CALL.confidence, text=text)
    if state.call == "wait" and not has_pending(run, state.rank):
        text = f"waits{where} for something that its dump does not hold: a send or recv, whose peer does not come"
        return _Reason(
            verdict=VerdictKind.P2P_MISSING_PEER, confidence=Basis.WAITS_FOR_UNRECORDED.confidence, text=text
        )
    text = f"waits in {state.call or 'a collective'}{where}; the evidence does not show for whom"
    return _Reason(verdict=VerdictKind.WAIT_CHAIN, confidence=Basis.UNKNOWN_WAIT.confidence, text=text)


def _possible_peers(run: Run, waiting: int) -> tuple[int, ...]:
    """Who owes `waiting` the other half, if it is not recorded: certain only if there is one other rank."""
    others = tuple(rank for rank in run.ranks if rank != waiting)
    return others if len(others) == 1 else ()


def _last_seen(where: str) -> str:
    return f"; last seen{where}" if where else ""


def _without_stack(run: Run, state: Situation) -> _Reason:
    """A rank that left no stack and no exit code: its peers' errors show whether it was still connected."""
    closed, timeouts = saw_peers_close(run), saw_timeouts(run)
    if has_other_death(run, state.rank):
        closed = []
    record = run.ranks[state.rank]
    is_silent = not record.has_flight_recorder and not record.stacks
    stopped_s = stopped_ticking(run, state.rank)
    if is_silent and (stopped_s > LATE_TICK_S or (stopped_s and (closed or timeouts))):
        return _ticks_stopped(stopped_s, is_closed=bool(closed), is_open=bool(timeouts))
    if closed and not timeouts:
        lost = loss_of(run, record)
        return _Reason(
            verdict=lost.verdict, subtype=lost.subtype, confidence=Basis.CONNECTIONS_CLOSED.confidence, text=lost.text
        )  # fmt: skip
    if had_exception(record):
        return _Reason(
            verdict=VerdictKind.RANK_DIED, subtype=Subtype.PYTHON_EXCEPTION, confidence=Basis.DUMPED_FOR_EXCEPTION.confidence,
            text="died of an exception: its recorder dumped for one; the text of it was not collected",
        )  # fmt: skip
    has_others = any(other.heartbeat for other in run.ranks.values() if other.rank != state.rank)
    ticked_on = record.heartbeat is not None and has_others  # else the heartbeat may be that of long before
    if is_silent and timeouts and not closed and not ticked_on:
        text = "left nothing, and its peers' connections to it stayed open until they timed out"
        return _Reason(verdict=VerdictKind.RANK_FROZEN, confidence=Basis.CONNECTIONS_OPEN.confidence, text=text)
    if (aborted := _aborted(run, state.rank)) is not None:
        return aborted
    if is_silent and left_no_end(run, state.rank):
        return _Reason(
            verdict=VerdictKind.RANK_DIED, confidence=Basis.NO_END.confidence,
            text="died: it left neither a dump nor an orderly end, though the recorders of the others did when the job ended",
        )  # fmt: skip
    if left_gone(record) and stopped_s > OUTLIVED_S:
        return _Reason(
            verdict=VerdictKind.RANK_DIED, confidence=Basis.PROCESS_GONE.confidence,
            text="died: its process is gone and left no end of its own; a signal, os._exit or its host ended it",
        )  # fmt: skip
    if record.heartbeat is not None:
        return _by_phase(record.heartbeat.phase)
    if is_silent:
        text = "left no dump and no stack, as a dead or frozen rank does"
        return _Reason(verdict=VerdictKind.RANK_DIED, confidence=Basis.LEFT_NOTHING.confidence, text=text)
    text = "did not issue the operation that the others wait for; without its stack the reason is unknown"
    if _is_gloo(record):
        text += ": stuck, or itself waiting in a send or recv, which gloo's dumps do not hold"
        return _Reason(verdict=VerdictKind.INSUFFICIENT_DATA, confidence=Basis.NOT_ISSUED_GLOO.confidence, text=text)
    return _Reason(verdict=VerdictKind.STUCK_ON_CPU, confidence=Basis.NOT_ISSUED.confidence, text=text)


def _aborted(run: Run, rank: int) -> _Reason | None:
    """A rank that ended by SIGABRT without having issued what the others wait in: no library aborted it for its own wait."""
    record = run.ranks[rank]
    stack = abort_stack(record)
    if stack is None or has_pending(run, rank):
        return None
    frame = crash_frame(stack)
    where = f" at {frame.place}" if frame else ""
    return _Reason(
        verdict=VerdictKind.RANK_DIED, subtype=Subtype.SIGNAL, confidence=Basis.ABORTED.confidence,
        text=f"died: it was ended by SIGABRT{where}, with nothing pending that a library would abort it for",
    )  # fmt: skip


def is_silent(run: Run, beat: Heartbeat) -> bool:
    """Whether a recorder had not ticked for a while when the evidence was read."""
    return not run.read_ns or run.read_ns - beat.alive_ns > LATE_TICK_S * 1e9


def without_end(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Ranks that left no end of their process when all others had ended in order: by os._exit, or by a signal."""
    for rank, state in states.items():
        if state.kind in (RankState.UNKNOWN, RankState.SILENT) and left_no_end(run, rank):
            yield _without_end(run, rank, states)


def lost_ranks(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """The same of ranks that waited as the others did, where those say that connections closed."""
    for rank, state in states.items():
        is_unclear = state.kind in (RankState.UNKNOWN, RankState.SILENT) or state.kind.is_waiting
        if is_unclear and _was_lost(run, rank):
            yield _without_end(run, rank, states)


def _without_end(run: Run, rank: int, states: Mapping[int, Situation]) -> Verdict:
    text = "its recorder left no end of the process, all others did: os._exit, or a signal, ended it"
    evidence = (Evidence(text=text, rank=rank), *states[rank].evidence)
    gone = replace(
        states[rank], kind=RankState.DEAD, call="left without an end of its own", evidence=evidence,
        confidence=Basis.NO_END.confidence,
    )  # fmt: skip
    return verdict_of(run, rank, (), {**states, rank: gone})


def left_no_end(run: Run, rank: int) -> bool:
    """Whether other recorders left an end of their process, and this one, which ticked no longer than they did, left none. Not
    where one that waited left none either: then the job may have been looked at before its end."""
    record = run.ranks[rank]
    if record.heartbeat is None or record.process_state or has_end(record):
        return False
    ends = [one.heartbeat.alive_ns for one in run.ranks.values() if one.heartbeat is not None and has_end(one)]
    if not ends or any(waited_at_the_end(one) and not has_end(one) for one in run.ranks.values()):
        return False
    return record.heartbeat.alive_ns <= min(ends) and is_silent(run, record.heartbeat)


def _was_lost(run: Run, rank: int) -> bool:
    """Whether a recorder left no end of its process and ticked no longer than those that did, which are more; and these ended of
    connections that closed, or were told to end."""
    beat = run.ranks[rank].heartbeat
    if beat is None:
        return False
    without = {number for number, one in run.ranks.items() if not has_end(one)}
    ends = [one.heartbeat.alive_ns for number, one in run.ranks.items() if number not in without and one.heartbeat]
    if rank not in without or 2 * len(without) > len(run.ranks) or len(ends) + len(without) < len(run.ranks):
        return False
    closed = set(saw_peers_close(run))
    is_by_connections = bool(closed - without) and not closed & without and not saw_timeouts(run)
    is_quiet = beat.alive_ns <= min(ends) and is_silent(run, beat) and not run.ranks[rank].process_state
    return is_by_connections and is_quiet and not has_other_death(run, rank)


def _ticks_stopped(stopped_s: float, *, is_closed: bool, is_open: bool) -> _Reason:
    """A rank whose recorder fell silent; its peers' connections show whether the process still existed."""
    ticks = f"its recorder stopped ticking {stopped_s:.0f} s before the others'"
    if is_closed:
        text = f"died: {ticks} and its connections closed"
        return _Reason(verdict=VerdictKind.RANK_DIED, confidence=Basis.TICKS_STOPPED_CLOSED.confidence, text=text)
    if is_open:
        return _Reason(
            verdict=VerdictKind.RANK_FROZEN, confidence=Basis.TICKS_STOPPED_OPEN.confidence, text=f"is frozen: {ticks}"
        )
    text = f"is frozen (or dead, or something keeps its GIL): {ticks}"
    return _Reason(verdict=VerdictKind.RANK_FROZEN, confidence=Basis.TICKS_STOPPED.confidence, text=text)


def _is_gloo(record: RankRecord) -> bool:
    """Whether no dump knows more than that operations were scheduled, and none holds a send or recv."""
    table = record.operations
    return bool(len(table)) and not (table["state"].any() or table["p2p"].any() or record.heartbeat)


def _by_phase(phase: str) -> _Reason:
    """A rank without a stack whose recorder ticked to the end: it ran, and its phase may show what."""
    subtype = PHASES.get(phase, Subtype.NONE)
    if subtype:
        text = f"is stuck {_BUSY[subtype]}: it runs, in phase {phase} of the training loop"
        return _Reason(verdict=VerdictKind.STUCK_ON_CPU, subtype=subtype, confidence=Basis.PHASE.confidence, text=text)
    text = "runs, but did not issue the operation that the others wait for; without its stack the reason is unknown"
    return _Reason(verdict=VerdictKind.STUCK_ON_CPU, confidence=Basis.NOT_ISSUED.confidence, text=text)


def stopped_ticking(run: Run, rank: int) -> float:
    """Seconds by which a rank's recorder fell silent before the last of the others; 0 if it did not."""
    mine = run.ranks[rank].heartbeat
    others = [r.heartbeat.alive_ns for r in run.ranks.values() if r.heartbeat and r.rank != rank]
    if mine is None or not others or mine.is_stopped:
        return 0.0
    gap_s = (max(others) - mine.alive_ns) / 1e9
    return gap_s if gap_s > 1.0 else 0.0


def _call(edge: Edge | None, chain: Sequence[tuple[int, int]], states: Mapping[int, Situation]) -> str:
    """The call of an operation that no dump holds, from the stack of a rank that waits in it."""
    of_waiters = (states[rank].call for rank, awaited in chain if edge is not None and awaited == edge.awaited)
    return next(filter(None, of_waiters), "") if edge is not None and edge.is_after else ""


def _waiting(
    run: Run, edge: Edge | None, chain: Sequence[tuple[int, int]], states: Mapping[int, Situation]
) -> list[Evidence]:
    if edge is None:
        return []
    number = f"{'after ' * edge.is_after}#{edge.seq}"
    op = operation_waited_for(run, edge) or _call(edge, chain, states) or "a collective"
    kind = states[edge.waiter].kind  # a receive that waits for the same rank is another operation
    is_held = row_of(run, edge) is not None
    more = -1 + sum(
        awaited == chain[0][1] and states[waiter].kind == kind
        and (not is_held or row_of(run, replace(edge, waiter=waiter)) is not None)
        for waiter, awaited in chain
    )  # fmt: skip
    has_left = left_with_error(run.ranks[edge.waiter])
    waits, do = ("waited", "did") if has_left else ("waits", "does" if more == 1 else "do")
    others = f" (as {do} {more} more rank{'s' * (more > 1)})" if more else ""
    text = f"{waits} in {op} {number} of group {run.groups[edge.group]}{others}"
    return [Evidence.at(states[edge.waiter].frame, text=text, rank=edge.waiter, source="flight recorder")]


def _coordinate(run: Run, rank: int) -> str:
    """` (pp 1, dp 0)`: its place on the axes of the mesh that are longer than 1."""
    mine = run.ranks[rank].coordinates
    long = {axis for record in run.ranks.values() for axis, place in record.coordinates.items() if place}
    places = ", ".join(f"{axis} {place}" for axis, place in mine.items() if axis in long)
    return f" ({places})" if places else ""
