"""Whether a rank's process did not run, or got no processor, or its Python did not run because something held the GIL. Pure."""

from __future__ import annotations

import signal

from titan_ckpt.debug.diagnosis.rank_death import signal_of
from titan_ckpt.debug.incident.busy_with import in_gc, last_words
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import (
    is_importing,
    is_recorders,
    main_frame,
    main_thread_state,
    user_frame,
)
from titan_ckpt.debug.incident.kinds import RankState, Subtype
from titan_ckpt.debug.incident.records import (
    COMPLETED,
    Evidence,
    Frame,
    RankRecord,
    Run,
    Situation,
    StackSnapshot,
)

OWN_DUMP_NS = 2_000_000_000  # our own dump may hold the GIL; the watching thread ticks meanwhile, at least this often


def frozen(run: Run, record: RankRecord, others_left_some: bool) -> Situation | None:
    """A stopped process, a held GIL, or a rank that left nothing and ignored SIGTERM while others left evidence."""
    return _stopped(run, record) or _gil_held(run, record) or _ignored_sigterm(run, record, others_left_some)


STARVED_NS, TIMES_RUN = 5_000_000_000, 3  # less, or a third of the time on a processor: crowded, but it goes on
_RUNNABLE = (RankState.ON_CPU, RankState.GIL_HELD, RankState.UNKNOWN, RankState.SILENT)


def starved(record: RankRecord, found: Situation) -> Situation:
    """`found`, or that the rank would run and gets no processor: then the fault is its host's, whatever line it is at."""
    beat = record.heartbeat
    if found.kind not in _RUNNABLE or beat is None or beat.queued_ns < max(STARVED_NS, TIMES_RUN * beat.ran_ns):
        return found
    text = (
        f"its main thread was ready to run for {beat.queued_ns / 1e9:.0f} s since it last came further, and had a processor for "
        f"{beat.ran_ns / 1e9:.1f} s"
    )
    queued = Evidence(text=text, rank=record.rank, source=beat.source)
    return Situation(
        rank=record.rank, kind=RankState.ON_CPU, detail=Subtype.STARVED, frame=found.frame,
        confidence=Basis.STARVED.confidence, evidence=(queued, *found.evidence),
    )  # fmt: skip


def _stopped(run: Run, record: RankRecord) -> Situation | None:
    state = record.process_state
    if state[:1] not in ("T", "t"):
        return None
    stopped = Evidence(text=f"the kernel says the process is stopped (state {state})", rank=record.rank)
    return Situation(
        rank=record.rank, kind=RankState.FROZEN, confidence=Basis.PROCESS_STOPPED.confidence,
        frame=_last_call_site(run, record), evidence=(stopped, *last_words(record)),
    )  # fmt: skip


def _gil_held(run: Run, record: RankRecord) -> Situation | None:
    gil = next((s for s in record.stacks if s.reason.endswith("gil")), None)
    if gil is None or (gil.main and main_thread_state(gil.main)[0] != RankState.ON_CPU):
        return None  # a thread that waits in torch has released the GIL
    is_still_there = _is_still_there(record, gil)
    if gil.main and is_importing(gil.main.frames) and not is_still_there:
        return None  # loading a large extension keeps the GIL for seconds, on a busy machine for longer
    if _silent_ns(run, record) < OWN_DUMP_NS and not is_still_there and _is_our_dump(gil):
        return None
    if _was_alive_later(run, record) and not is_still_there:
        return None
    text = "the watching thread could not run: something holds the GIL; stack taken by the C timer"
    held = Evidence(text=text, rank=record.rank, source=gil.source)
    return Situation(
        rank=record.rank, kind=RankState.GIL_HELD, detail=Subtype.GC if in_gc(gil) else Subtype.GIL_HELD,
        frame=main_frame(gil), confidence=Basis.GIL_STACK.confidence, evidence=(held, *last_words(record)),
    )  # fmt: skip


def _ignored_sigterm(run: Run, record: RankRecord, others_left_some: bool) -> Situation | None:
    if record.stacks or record.has_flight_recorder or not others_left_some or record.exit is None:
        return None
    if not record.exit.was_told or signal_of(record.exit.code) != signal.SIGKILL:
        return None
    text = "left no dump and did not react to SIGTERM: the launcher had to SIGKILL it"
    return Situation(
        rank=record.rank, kind=RankState.FROZEN, confidence=Basis.IGNORED_SIGTERM.confidence,
        frame=_last_call_site(run, record),
        evidence=(Evidence(text=text, rank=record.rank, source=record.exit.source), *last_words(record)),
    )  # fmt: skip


def _is_our_dump(stack: StackSnapshot) -> bool:
    """Whether the recorder itself held the GIL: torch imports much of itself for its first dump."""
    return any(f.function == "_flight_recorder_dump" for thread in stack.threads for f in thread.frames)


def _is_still_there(record: RankRecord, gil: StackSnapshot) -> bool:
    """Whether the process kept computing in the same call: C code lets a signal handler run, then takes the GIL again. Where the
    innermost frame has changed, Python ran in between: slowly, as on a machine whose processors others use."""
    later = (stack for stack in record.stacks if stack is not gil and stack.main and stack.main.frames)
    is_there = any(_innermost(stack) == _innermost(gil) for stack in later) or _needed_sigkill(record)
    return is_there and record.process_state.startswith("R")


def _needed_sigkill(record: RankRecord) -> bool:
    """Whether SIGTERM did not end it: a tick at its end may be the handler's, which C code lets run, then takes the GIL again."""
    return record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == signal.SIGKILL


def _innermost(stack: StackSnapshot) -> tuple[str, int]:
    """The innermost call of the main thread, without a handler of our recorder, which a signal lets run inside of any call."""
    frames = [frame for frame in (stack.main.frames if stack.main else ()) if not is_recorders(frame)]
    return (frames[0].file, frames[0].line) if frames else ("", 0)


def _was_alive_later(run: Run, record: RankRecord) -> bool:
    """Whether the watching thread ran until about the end: then the GIL was free again."""
    others = any(other.heartbeat and other.rank != record.rank for other in run.ranks.values())
    return record.heartbeat is not None and others and _silent_ns(run, record) < 1_000_000_000


def _silent_ns(run: Run, record: RankRecord) -> int:
    """For how long the other recorders ticked on after this rank's last tick; 0 if unknown."""
    others = [r.heartbeat.alive_ns for r in run.ranks.values() if r.heartbeat and r.rank != record.rank]
    return max(0, max(others) - record.heartbeat.alive_ns) if others and record.heartbeat else 0


def _last_call_site(run: Run, record: RankRecord) -> Frame | None:
    """Where it issued its last operation; None if its training loop has come to another phase since."""
    if not len(record.operations):
        return None
    last, beat = record.operations[-1], record.heartbeat
    if beat is not None and beat.phase and last["state"] == COMPLETED and beat.phase_ns > last["created_ns"] > 0:
        return None
    return user_frame(run.operation(record.rank, -1).frames, run.wrappers)
