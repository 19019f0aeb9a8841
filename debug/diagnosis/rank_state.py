"""What each rank was doing when the evidence was taken: waiting in a collective, busy on its CPU, frozen, dead. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.busy_with import busy_with, in_gc, last_words
from titan_ckpt.debug.incident.frames import crash_frame, crashed_thread, is_library, user_frame
from titan_ckpt.debug.incident.records import Evidence, Frame, LogEvent, RankRecord, Run, StackSnapshot, Thread

IN_COLLECTIVE, IN_P2P, IN_INIT, IN_TEARDOWN, ON_CPU = "in_collective", "in_p2p", "in_init", "in_teardown", "on_cpu"
DEAD, FROZEN, GIL_HELD, FINISHED, SILENT, UNKNOWN = "dead", "frozen", "gil_held", "finished", "silent", "unknown"

_INIT = ("init_process_group", "_new_process_group_helper", "_store_based_barrier", "rendezvous", "new_group",
         "_new_group_with_tag", "split_group", "_create_tcp_store", "next_rendezvous")  # fmt: skip
_TEARDOWN = ("destroy_process_group", "_shutdown", "_exit_function", "_python_exit")
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
OWN_DUMP_NS = 2_000_000_000  # the recorder dumps in threads of their own: the watching one ticks meanwhile, if seldom
# files of the recorder itself, in today's place and where releases before 0.2 had them
_RECORDER = ("/debug/record/recorder.py", "/debug/recorder.py", "debug\\recorder.py")
_HOOKS = ("/debug/record/hooks.py", "/debug/hooks.py")
_WAITS = re.compile(r"\.wait\(|synchronize\(|\.item\(|\.cpu\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What one rank was doing. `frame` is the user's line; `detail` the subtype (of being busy, or of death)."""

    rank: int
    kind: str
    detail: str = ""
    frame: Frame | None = None
    call: str = ""
    evidence: tuple[Evidence, ...] = ()
    confidence: float = 0.5


def situations(run: Run) -> dict[int, Situation]:
    """Every rank's situation."""
    have_left = any(record.stacks or record.dumps for record in run.ranks.values())
    return {rank: situation(run, record, others_left_some=have_left) for rank, record in run.ranks.items()}


def situation(run: Run, record: RankRecord, *, others_left_some: bool) -> Situation:
    """Death first, then a stopped process, then what its main thread was in."""
    if _says_nothing(record):
        return Situation(rank=record.rank, kind=UNKNOWN if record.dumps else SILENT)
    return (
        _dead(record)
        or _frozen(run, record, others_left_some)
        or _by_stack(run, record)
        or _by_log(record)
        or Situation(rank=record.rank, kind=UNKNOWN if record.dumps else SILENT, evidence=last_words(record))
    )


def _says_nothing(record: RankRecord) -> bool:
    """Whether there is nothing of a rank that tells what it was doing, but operations perhaps: so it is with most of many."""
    has_ended = record.heartbeat is not None and record.heartbeat.is_stopped
    return not (record.stacks or record.log or record.exit or record.process_state or has_ended)


# --------------------------------------------------------------------------------------------------------- death

_FAILURES = ("exception", "oom", "comm_closed", "comm_timeout", "comm_error", "comm_mismatch", "watchdog", "store_wait")


def own_exception(record: RankRecord) -> LogEvent | None:
    """The first error of the program's own that this rank logged before any error of its peers' making.

    A traceback is preferred over the log line that announces it, because it tells the line of code.
    """
    events = [event for event in (record.log.events if record.log else ()) if not _was_survived(record, event)]
    first = next((event for event in events if event.kind in _FAILURES), None)
    if first is None or first.kind not in ("exception", "oom"):
        return None
    if first.values.get("type", "").rpartition(".")[2] in ("SignalException", "KeyboardInterrupt", "SystemExit"):
        return None
    same = (event for event in events if event.frame and event.kind == first.kind)
    return next(same, first)


def _was_survived(record: RankRecord, event: LogEvent) -> bool:
    """Whether an exception ended a thread of the process only, whose main thread was seen to hang, or had to be told to end."""
    has_lived = hang_stack(record) is not None or (record.exit is not None and record.exit.was_told)
    return bool(event.values.get("thread")) and has_lived


def _lost_threads(record: RankRecord) -> list[Evidence]:
    """The exceptions that ended threads of the process."""
    return [_event(event) for event in (record.log.events if record.log else ()) if _was_survived(record, event)]


def _dead(record: RankRecord) -> Situation | None:
    error = own_exception(record)
    exit_ = record.exit
    if error is not None and (exit_ is None or exit_.code != 0):
        subtype = "oom" if error.kind == "oom" else "python_exception"
        return Situation(
            rank=record.rank, kind=DEAD, detail=subtype, frame=error.frame, confidence=0.95,
            evidence=(_event(error),),
        )  # fmt: skip
    number = signal_of(exit_.code) if exit_ else 0
    if number == signal.SIGABRT and (_was_aborted(record) or record.log is None):
        return None
    if exit_ and number and not exit_.was_told and number not in (signal.SIGTERM, signal.SIGINT):
        return _killed(record, number)
    fatal = next((event for event in (record.log.events if record.log else ()) if event.kind == "fatal_signal"), None)
    if fatal is not None and not ("Aborted" in fatal.text and _was_aborted(record)):
        stack = next((s for s in record.stacks if s.reason.startswith("fatal")), None)
        return Situation(
            rank=record.rank, kind=DEAD, detail="signal", frame=crash_frame(stack), confidence=0.9,
            evidence=(_event(fatal), *crashed_thread(record, stack), *last_words(record)),
        )  # fmt: skip
    crash = next((s for s in record.stacks if s.reason == "fatal" and s.threads), None)
    if crash is not None:
        text = "the interpreter's fault handler wrote its stack: a signal ended it"
        return Situation(
            rank=record.rank, kind=DEAD, detail="signal", frame=crash_frame(crash), confidence=0.9,
            evidence=(
                Evidence(text=text, rank=record.rank, source=crash.source), *crashed_thread(record, crash), *last_words(record)
            ),
        )  # fmt: skip
    if record.process_state == "gone" and not (record.heartbeat and record.heartbeat.is_stopped):
        text = "its process is gone, and it did not end in good order"
        gone = Evidence(text=text, rank=record.rank)
        return Situation(rank=record.rank, kind=DEAD, confidence=0.8, evidence=(gone, *last_words(record)))
    return None


def is_absent(record: RankRecord) -> bool:
    """Whether nothing was collected of a rank but perhaps an exit code that all kinds of ranks have in the end."""
    exit_ = record.exit
    number = signal_of(exit_.code) if exit_ else 0
    is_usual = exit_ is None or (exit_.was_told and number == signal.SIGTERM) or number == signal.SIGABRT
    failed = exit_ is not None and exit_.code > 0 and not number
    found = (record.dumps, record.stacks, record.log, record.heartbeat, record.has_recorder)
    is_running = not record.process_state or record.process_state[:1] in "RSD"
    return not any(found) and is_running and (is_usual or failed)


def _was_aborted(record: RankRecord) -> bool:
    """Whether the communication library aborted the process (NCCL's watchdog, gloo on a wrong size): a victim, no culprit."""
    return any(
        event.kind.startswith("comm_") or event.kind == "watchdog"
        for event in (record.log.events if record.log else ())
    )


def signal_of(code: int) -> int:
    """The signal that an exit code stands for (-9 and 137 are SIGKILL), or 0."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return number if number in {s.value for s in signal.Signals} else 0


def _killed(record: RankRecord, number: int) -> Situation:
    assert record.exit is not None
    name = signal.Signals(number).name
    events = record.log.events if record.log else ()
    is_oom = any(event.kind == "oom" for event in events)
    stack = next((s for s in record.stacks if s.reason.startswith("fatal")), None)
    where = Evidence(
        text=f"exit code {record.exit.code}: killed by {name}", rank=record.rank, source=record.exit.source, line=0
    )
    return Situation(
        rank=record.rank, kind=DEAD, detail="oom" if is_oom else "signal", frame=_frame_of(stack), call=name,
        confidence=0.95, evidence=(where, *last_words(record)),
    )  # fmt: skip


def _event(event: LogEvent) -> Evidence:
    return Evidence(
        text=event.text, rank=event.rank, source=f"{event.source}:{event.line}",
        file=event.frame.file if event.frame else "", line=event.frame.line if event.frame else 0,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- frozen, GIL


def _frozen(run: Run, record: RankRecord, others_left_some: bool) -> Situation | None:
    state = record.process_state
    if state[:1] in ("T", "t"):
        text = f"the kernel says the process is stopped (state {state})"
        return Situation(
            rank=record.rank, kind=FROZEN, confidence=0.97, frame=_last_call_site(run, record),
            evidence=(Evidence(text=text, rank=record.rank), *last_words(record)),
        )  # fmt: skip
    gil = next((s for s in record.stacks if s.reason.endswith("gil")), None)
    is_free = gil is not None and _silent_ns(run, record) < OWN_DUMP_NS and not _still_there(record, gil)
    if gil is not None and is_free and _is_our_dump(gil):
        gil = None
    if gil is not None and gil.main and _inside(gil.main)[0] != ON_CPU:
        gil = None  # it waits in torch, which lets the GIL go
    if gil is not None and (not _was_alive_later(run, record) or _still_there(record, gil)):
        text = "the watching thread could not run: something holds the GIL; stack taken by the C timer"
        return Situation(
            rank=record.rank, kind=GIL_HELD, detail="gc" if in_gc(gil) else "gil_held", frame=_frame_of(gil), confidence=0.95,
            evidence=(Evidence(text=text, rank=record.rank, source=gil.source), *last_words(record)),
        )  # fmt: skip
    left_nothing = not record.stacks and not any(dump.kind == "flight_recorder" for dump in record.dumps)
    if not left_nothing or not others_left_some:
        return None
    told = record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == signal.SIGKILL
    if told and record.exit is not None:
        text = "left no dump and did not react to SIGTERM: the launcher had to SIGKILL it"
        return Situation(
            rank=record.rank, kind=FROZEN, confidence=0.9, frame=_last_call_site(run, record),
            evidence=(Evidence(text=text, rank=record.rank, source=record.exit.source), *last_words(record)),
        )  # fmt: skip
    return None


def _is_our_dump(stack: StackSnapshot) -> bool:
    """Whether the recorder itself kept the GIL: torch imports much of itself for its first dump."""
    return any(f.function == "_flight_recorder_dump" for thread in stack.threads for f in thread.frames)


def _still_there(record: RankRecord, gil: StackSnapshot) -> bool:
    """Whether the process kept computing at the same line: C code lets a signal's handler run, and takes the GIL again."""
    later = hang_stack(record)
    same = later is not None and _frame_of(later) is not None and _place(_frame_of(later)) == _place(_frame_of(gil))
    return same and record.process_state.startswith("R")


def _place(frame: Frame | None) -> tuple[str, int]:
    return (frame.file, frame.line) if frame else ("", 0)


def _was_alive_later(run: Run, record: RankRecord) -> bool:
    """Whether the watching thread ran until about the end: then the GIL was free again."""
    others = any(other.heartbeat and other.rank != record.rank for other in run.ranks.values())
    return record.heartbeat is not None and others and _silent_ns(run, record) < 1_000_000_000


def _silent_ns(run: Run, record: RankRecord) -> int:
    """For how long the others' recorders ticked on after this rank's last tick; 0 where that is not known."""
    others = [r.heartbeat.alive_ns for r in run.ranks.values() if r.heartbeat and r.rank != record.rank]
    return max(0, max(others) - record.heartbeat.alive_ns) if others and record.heartbeat else 0


def _last_call_site(run: Run, record: RankRecord) -> Frame | None:
    if not len(record.operations):
        return None
    return user_frame(run.operation(record.rank, -1).frames, run.wrappers)


# ---------------------------------------------------------------------------------------------------------- stacks


def hang_stack(record: RankRecord) -> StackSnapshot | None:
    """The snapshot that shows where the main thread hung: not one that the main thread wrote itself, earliest reason first."""
    usable = [
        s for s in record.stacks if s.main and s.main.frames and not s.main.is_current and not _is_dumping(s.main, s)
    ]
    return min(usable, key=lambda s: (_lateness(s.reason), s.source), default=None)


def _is_dumping(main: Thread, stack: StackSnapshot) -> bool:
    """Whether the main thread was in our recorder, in an excepthook, or in the function that another thread wrote this file
    from: it is already past what it died of."""
    if any(frame.file.endswith(_RECORDER) for frame in main.frames[:4]):
        return True
    if any(frame.function.endswith(("excepthook", "_exitfunc")) for frame in main.frames):
        return True
    writer = next((thread for thread in stack.threads if thread.is_current), None)
    inner = main.frames[0]
    return writer is not None and not is_library(inner) and any(_alike(frame, inner) for frame in writer.frames[:4])


def _alike(a: Frame, b: Frame) -> bool:
    return (a.file, a.function) == (b.file, b.function)


def _lateness(reason: str) -> int:
    if reason in ("", "stall") or reason.startswith("stall"):
        return 0
    return 1 if "gil" in reason or "term" in reason.lower() or "demand" in reason else 2


def _frame_of(stack: StackSnapshot | None) -> Frame | None:
    return user_frame(stack.main.frames) if stack and stack.main else None


def _by_stack(run: Run, record: RankRecord) -> Situation | None:
    stack = hang_stack(record)
    if stack is None or stack.main is None:
        return None
    main = stack.main
    frame = user_frame(main.frames, run.wrappers)
    kind, call = _inside(main)
    seen = Evidence(
        text=f"main thread in {frame.function}" + (f" -> {call}" if call else ""), rank=record.rank, source=stack.source,
        file=frame.file, line=frame.line,
    ) if frame else Evidence(text="main thread", rank=record.rank, source=stack.source)  # fmt: skip
    detail, why = ("", None) if kind != ON_CPU else busy_with(record, stack)
    words = last_words(record) if kind == ON_CPU else ()
    return Situation(
        rank=record.rank, kind=kind, detail=detail, frame=frame, call=call, confidence=0.9,
        evidence=tuple(item for item in (seen, why, *_lost_threads(record)[:1], *words) if item),
    )  # fmt: skip


def _inside(main: Thread) -> tuple[str, str]:
    """The kind of wait that a main thread is in, and the name of the library call."""
    is_waiting = False
    for frame in main.frames[:12]:
        if frame.function == "wait" and frame.file.endswith(_HOOKS):
            is_waiting = True  # our wrapper of Work.wait; a blocking call shows its own name further out
            continue
        if not is_library(frame):
            if is_waiting:
                return IN_COLLECTIVE, "wait"
            return (
                (IN_COLLECTIVE, "wait") if _WAITS.search(frame.text) and "work" in frame.text.lower() else (ON_CPU, "")
            )
        name, file = frame.function, frame.file
        if name in _TEARDOWN and ("torch/" in file or "threading" in file or "concurrent" in file):
            return IN_TEARDOWN, name
        if name in _INIT:
            return IN_INIT, _outermost(main, _INIT) or name
        if "torch/distributed" in file and name in _P2P:
            return IN_P2P, name
        if (
            file.endswith(("distributed_c10d.py", "_functional_collectives.py", "_symmetric_memory/__init__.py"))
            and name != "wrapper"
        ):
            return IN_COLLECTIVE, name
    return ON_CPU, ""


def _outermost(main: Thread, names: Sequence[str]) -> str:
    return next((frame.function for frame in reversed(main.frames) if frame.function in names), "")


# ------------------------------------------------------------------------------------------------------------ logs


def _by_log(record: RankRecord) -> Situation | None:
    """Without a stack: a rank that reported its peers' absence was waiting for them."""
    events = record.log.events if record.log else ()
    for event in events:
        kind = {"store_wait": IN_INIT}.get(event.kind, IN_COLLECTIVE)
        if event.kind in ("comm_timeout", "comm_closed", "comm_mismatch", "comm_error", "watchdog", "store_wait"):
            frame = next((e.frame for e in events if e.frame), event.frame)
            return Situation(rank=record.rank, kind=kind, frame=frame, confidence=0.7, evidence=(_event(event),))
    has_ended = record.heartbeat is not None and record.heartbeat.is_stopped
    if (record.exit is not None and record.exit.code == 0) or (record.exit is None and has_ended):
        text = "ended normally"
        return Situation(
            rank=record.rank, kind=FINISHED, confidence=0.9, evidence=(Evidence(text=text, rank=record.rank),)
        )
    return None


def saw_peers_close(run: Run) -> list[int]:
    """Ranks that lost a connection: a peer of theirs ended."""
    return _ranks_with(run, "comm_closed")


def has_other_death(run: Run, rank: int) -> bool:
    """Whether another rank is known to have ended for a reason of its own: that explains connections that closed."""
    return any(
        other != rank and (_dead(record) is not None or _was_killed_by_mismatch(record))
        for other, record in run.ranks.items()
        if not _says_nothing(record)
    )


def _was_killed_by_mismatch(record: RankRecord) -> bool:
    return any(event.kind == "comm_mismatch" for event in (record.log.events if record.log else ()))


def saw_timeouts(run: Run) -> list[int]:
    """Ranks whose wait for a peer ran out: that peer was still connected."""
    return [*_ranks_with(run, "comm_timeout"), *_ranks_with(run, "watchdog")]


def _ranks_with(run: Run, kind: str) -> list[int]:
    return [r for r, record in run.ranks.items() if record.log and any(e.kind == kind for e in record.log.events)]


def awaited_in_store(run: Run) -> Mapping[int, int]:
    """How many ranks waited for each rank's key in the rendezvous store."""
    counts: dict[int, int] = {}
    for record in run.ranks.values():
        keys = {
            e.values["rank"]
            for e in (record.log.events if record.log else ())
            if "rank" in e.values and e.kind == "store_wait"
        }
        for key in keys:
            counts[int(key)] = counts.get(int(key), 0) + 1
    return counts
