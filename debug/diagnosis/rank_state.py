"""What each rank was doing when the evidence was taken: waiting in a collective, busy on its CPU, frozen, dead. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from titan_ckpt.debug.diagnosis.ends import all_left_gone
from titan_ckpt.debug.diagnosis.rank_death import (
    dead,
    event_evidence,
    is_interrupt,
    logged_on,
    lost_threads,
    was_told,
)
from titan_ckpt.debug.diagnosis.rank_frozen import frozen, starved
from titan_ckpt.debug.incident.busy_with import busy_with, last_words
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import (
    hang_stack,
    is_library,
    is_native,
    main_thread_state,
    thread_that_waits,
    user_frame,
)
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype
from titan_ckpt.debug.incident.records import Evidence, Frame, LogEvent, RankRecord, Run, Situation
from titan_ckpt.debug.incident.waits import looked_at_ns, waited_at_the_end

_WAITED = (
    EventKind.COMM_TIMEOUT, EventKind.COMM_CLOSED, EventKind.COMM_MISMATCH, EventKind.COMM_ERROR, EventKind.WATCHDOG,
    EventKind.STORE_WAIT,
)  # fmt: skip


def situations(run: Run) -> dict[int, Situation]:
    """Every rank's situation. Where all processes are gone, that a rank's is tells nothing."""
    have_left = any(record.stacks or record.dumps for record in run.ranks.values())
    are_gone = all_left_gone(run)
    records = {rank: replace(record, process_state="") if are_gone else record for rank, record in run.ranks.items()}
    found = {rank: situation(run, record, others_left_some=have_left) for rank, record in records.items()}
    return {**found, **_waiting_by_thread(run, found), **_vanished(run, found)}


LEAST_TOLD = 2
LAST_TICK_NS = 2_000_000_000


def _vanished(run: Run, states: Mapping[int, Situation]) -> dict[int, Situation]:
    """The one rank that left no sign of SIGTERM, with which a launcher ends those that are left when one has died. Its recorder
    ticked to about the end: a process that was stopped falls silent long before."""
    told = [rank for rank, record in run.ranks.items() if was_told(record)]
    missing = set(run.ranks) - set(told)
    if len(told) < LEAST_TOLD or len(missing) != 1:
        return {}
    [rank] = missing
    record, newest_ns = run.ranks[rank], max(looked_at_ns(run.ranks[other]) for other in told)
    beat = record.heartbeat
    if (
        states[rank].kind not in (RankState.UNKNOWN, RankState.SILENT)
        or record.exit is not None
        or record.process_state
    ):
        return {}
    if beat is None or beat.is_stopped or not newest_ns or abs(beat.alive_ns - newest_ns) > LAST_TICK_NS:
        return {}
    text = "its recorder ticked to the end and did not end in order; all others heard SIGTERM, it alone left no sign of that"
    seen = Evidence(text=text, rank=rank, source=beat.source)
    return {
        rank: Situation(
            rank=rank,
            kind=RankState.DEAD,
            call="ended without a trace (SIGKILL, os._exit or a crash of its own)",
            confidence=Basis.VANISHED.confidence,
            evidence=(seen, *last_words(record)),
        )
    }


def _waiting_by_thread(run: Run, states: Mapping[int, Situation]) -> dict[int, Situation]:
    """The ranks that wait for others in a thread beside the main one, in the same operation as others. Where no main thread
    waits for ranks, those whose main thread waits for a lock. (Else it is the main thread that the others wait for.)"""
    calls = {state.call for state in states.values() if state.kind.is_waiting}
    return {
        rank: there
        for rank, state in states.items()
        if state.kind == RankState.ON_CPU and state.call
        if (there := _in_thread(run, state)) is not None
        and (there.call in calls or (not calls and state.detail == Subtype.PYTHON_LOCK))
    }


def _in_thread(run: Run, state: Situation) -> Situation | None:
    """What a rank's thread beside the main one waits in."""
    stack = hang_stack(run.ranks[state.rank])
    beside = thread_that_waits(stack) if stack is not None else None
    if stack is None or beside is None:
        return None
    kind, call = main_thread_state(beside)
    main, thread, *rest = state.evidence
    frame = user_frame(beside.frames, run.wrappers)
    return replace(state, kind=kind, call=call, detail=Subtype.NONE, frame=frame, evidence=(thread, main, *rest))


def situation(run: Run, record: RankRecord, *, others_left_some: bool) -> Situation:
    """Death first, then a stopped process, then what its main thread was in."""
    unknown = RankState.UNKNOWN if record.dumps else RankState.SILENT
    if has_only_operations(record):
        return starved(record, Situation(rank=record.rank, kind=unknown))
    found = (
        dead(record)
        or _interrupted_alone(run, record)
        or frozen(run, record, others_left_some)
        or _by_stack(run, record)
        or _by_log(record)
        or Situation(rank=record.rank, kind=unknown, evidence=(*lost_threads(record)[:1], *last_words(record)))
    )
    return starved(record, _at_the_call_site(run, record, found))


def _at_the_call_site(run: Run, record: RankRecord, found: Situation) -> Situation:
    """A traceback in a log ends in the program's helper that issued the operation: its caller's line is where the rank waits."""
    is_helper = found.frame is not None and (found.frame.file, found.frame.line) in run.wrappers
    if not (is_helper and found.kind.is_waiting and waited_at_the_end(record)):
        return found
    newest = run.operation(record.rank, int(record.operations["created_ns"].argmax()))
    return replace(found, frame=user_frame(newest.frames, run.wrappers) or found.frame)


def has_only_operations(record: RankRecord) -> bool:
    """Whether nothing but operations was collected of a rank: the usual case in a large job, and the fast path."""
    has_ended = record.heartbeat is not None and record.heartbeat.is_stopped
    return not (record.stacks or record.log or record.exit or record.process_state or has_ended)


def _by_stack(run: Run, record: RankRecord) -> Situation | None:
    stack = hang_stack(record)
    if stack is None or stack.main is None:
        return None
    frame = user_frame(stack.main.frames, run.wrappers)
    kind, call = main_thread_state(stack.main)
    below = f" -> {call}" if frame is not None and call not in ("", frame.function) else ""
    text = f"main thread in {frame.function}{below}" if frame is not None else "main thread"
    frame = None if frame is not None and is_native(frame) else frame  # no line of the program's
    seen = Evidence.at(frame, text=text, rank=record.rank, source=stack.source)
    is_busy = kind == RankState.ON_CPU
    if is_busy and (waited := _gave_up_at(record, frame)) is not None:
        return replace(waited, evidence=(seen, *waited.evidence))
    detail, why = busy_with(record, stack) if is_busy else (Subtype.NONE, None)
    words = last_words(record) if is_busy else ()
    beside = thread_that_waits(stack) if is_busy else None
    there: tuple[Evidence, ...] = ()
    if beside is not None and (place := user_frame(beside.frames, run.wrappers)) is not None:
        call = f"its thread {beside.name} in {main_thread_state(beside)[1]} at {place.place}"
        text = f"thread {beside.name} in {place.function} -> {main_thread_state(beside)[1]}"
        there = (Evidence.at(place, text=text, rank=record.rank, source=stack.source),)
    return Situation(
        rank=record.rank,
        kind=kind,
        detail=detail,
        frame=frame,
        call=call,
        confidence=Basis.MAIN_STACK.confidence,
        evidence=tuple(item for item in (seen, *there, why, *lost_threads(record)[:1], *words) if item),
    )


def _gave_up_at(record: RankRecord, frame: Frame | None) -> Situation | None:
    """The wait for a key of the store that a rank gave up at this line, by its log: `store.get` is C++ and has no frame."""
    places = [event.frame for event in record.events if event.kind == EventKind.STORE_WAIT and event.frame is not None]
    if frame is None or all((place.file, place.line) != (frame.file, frame.line) for place in places):
        return None
    found = _by_log(record)
    return found if found is not None and found.kind.is_waiting else None


def _by_log(record: RankRecord) -> Situation | None:
    """Without a stack: a rank whose log reports that peers were absent waited for them, and one that a launcher interrupted
    shows in its traceback where it was."""
    waited = (event for event in record.events if event.kind in _WAITED and not _says_nothing(event))
    event = next((event for event in waited if not _got_over(record, event)), None)
    if event is not None:
        kind = (
            RankState.IN_INIT
            if event.kind == EventKind.STORE_WAIT and not _is_own_wait(record, event)
            else RankState.IN_COLLECTIVE
        )
        raised = [e for e in record.events if e.frame]
        left = [e for e in raised if not _got_over(record, e)] or raised
        frame = left[0].frame if left else None
        return Situation(rank=record.rank, kind=kind, frame=frame, evidence=(event_evidence(event),))
    interrupted = next((event for event in record.events if event.frame and is_interrupt(event)), None)
    if interrupted is not None and interrupted.frame is not None and not is_library(interrupted.frame):
        below = interrupted.values.get("below", "")
        kind = (
            RankState.IN_COLLECTIVE
            if "call" in interrupted.values
            else RankState.IN_TORCH
            if below
            else RankState.ON_CPU
        )
        return Situation(
            rank=record.rank, kind=kind, frame=interrupted.frame, call=interrupted.values.get("call", below),
            confidence=Basis.WITNESSES_AND_LINE.confidence,
            evidence=(event_evidence(interrupted),),
        )  # fmt: skip
    has_ended = record.heartbeat is not None and record.heartbeat.is_stopped and not waited_at_the_end(record)
    if (record.exit is not None and record.exit.code == 0) or (record.exit is None and has_ended):
        ended = Evidence(text="ended normally", rank=record.rank)
        return Situation(rank=record.rank, kind=RankState.FINISHED, evidence=(ended,))
    return None


def _says_nothing(event: LogEvent) -> bool:
    """Whether an error of the communication library is known by its name alone: no call, and neither a timeout nor a peer."""
    return event.kind == EventKind.COMM_ERROR and "alone" in event.values


def _interrupted_alone(run: Run, record: RankRecord) -> Situation | None:
    """A rank that SIGINT ended, first of all and told by no launcher: a person or a tool meant this one. Without its exit nobody
    can tell it from one that all were interrupted for, since it was stuck."""
    event = next((event for event in record.events if _is_sigint(event)), None)
    if event is None or any(map(_is_sigint, _events_of_others(run, record))):
        return None
    if record.exit is None or not record.exit.is_first or record.exit.was_told:
        return None
    return Situation(
        rank=record.rank, kind=RankState.DEAD, detail=Subtype.SIGNAL, frame=event.frame, signal="SIGINT",
        call="was interrupted (SIGINT)", confidence=Basis.INTERRUPTED.confidence, evidence=(event_evidence(event),),
    )  # fmt: skip


def _is_sigint(event: LogEvent) -> bool:
    return "KeyboardInterrupt" in (event.values.get("type"), event.values.get("interrupted"))


def _events_of_others(run: Run, record: RankRecord) -> Iterator[LogEvent]:
    return (event for other in run.ranks.values() if other is not record for event in other.events)


def _got_over(record: RankRecord, event: LogEvent) -> bool:
    """Whether a rank that wrote of a peer's trouble trained on: it retried, caught the error, or quoted another run."""
    return logged_on(record, event)


def _is_own_wait(record: RankRecord, event: LogEvent) -> bool:
    """Whether a program waited for a key of its own in the store: no function of torch did it, as its traceback shows, or as it
    trained already."""
    if "direct" in event.values and "joined" not in event.values:
        return True
    has_trained = record.log is not None and record.log.last_step is not None
    return has_trained and "type" in event.values and "call" not in event.values


def saw_peers_close(run: Run) -> list[int]:
    """Ranks that lost a connection: a peer of theirs ended."""
    return _ranks_with(run, EventKind.COMM_CLOSED)


def saw_timeouts(run: Run) -> list[int]:
    """Ranks whose wait for a peer timed out: that peer was still connected."""
    return [*_ranks_with(run, EventKind.COMM_TIMEOUT), *_ranks_with(run, EventKind.WATCHDOG)]


def has_other_death(run: Run, rank: int) -> bool:
    """Whether another rank is known to have ended for a reason of its own, which explains connections that closed."""
    return any(
        other != rank and (dead(record) is not None or _was_killed_by_mismatch(record))
        for other, record in run.ranks.items()
        if not has_only_operations(record)
    )


def _was_killed_by_mismatch(record: RankRecord) -> bool:
    return any(event.kind == EventKind.COMM_MISMATCH for event in record.events)


def _ranks_with(run: Run, kind: EventKind) -> list[int]:
    return [
        rank
        for rank, record in run.ranks.items()
        if any(event.kind == kind and not _got_over(record, event) for event in record.events)
    ]
