"""Whether a rank died, and what killed it: an exception of its own, a signal, a process that is gone. Pure."""

from __future__ import annotations

import re
import signal

from titan_ckpt.debug.incident.busy_with import last_words, speaks_of_others
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import crash_frame, crashed_thread, hang_stack, main_thread_state
from titan_ckpt.debug.incident.kinds import REQUESTED_ENDS, USAGE_ERROR, EventKind, RankState, Subtype
from titan_ckpt.debug.incident.parting_words import wrote_on
from titan_ckpt.debug.incident.records import Evidence, Exit, LogEvent, RankRecord, Situation
from titan_ckpt.debug.incident.waits import pending, waited_at_the_end

_OWN = (EventKind.EXCEPTION, EventKind.OOM)
_DETAILS = {EventKind.OOM: Subtype.OOM, EventKind.DEVICE_ERROR: Subtype.DEVICE}
_FAILURES = (
    *_OWN, EventKind.COMM_CLOSED, EventKind.COMM_TIMEOUT, EventKind.COMM_ERROR, EventKind.COMM_MISMATCH,
    EventKind.WATCHDOG, EventKind.STORE_WAIT,
)  # fmt: skip


def dead(record: RankRecord) -> Situation | None:
    """How a rank died; None if nothing shows that it did, or if a library aborted it because of its peers."""
    found = _raised(record)
    if found is not None:
        return found
    if _is_unclear_abort(record):
        return _reported(record)
    return _ended_by_signal(record) or _reported(record) or _gone(record) or _left_with_status(record)


def own_exception(record: RankRecord) -> LogEvent | None:
    """The first error of the program's own, if this rank logged it before any error that its peers caused.

    A traceback is preferred over the log line that announces it, because it has the line of code.
    """
    events = [event for event in record.events if not _was_survived(record, event)]
    first = next((event for event in events if event.kind in _FAILURES or _is_own(event)), None)
    if first is None or not _is_own(first):
        return None
    if is_interrupt(first):
        return None
    same = (event for event in events if event.frame and event.kind == first.kind)
    return next(same, first)


def _is_own(event: LogEvent) -> bool:
    """Whether it is an error of the program or of its GPU, as the program raised or logged it."""
    return event.kind in _OWN or (event.kind == EventKind.DEVICE_ERROR and "type" in event.values)


def is_interrupt(event: LogEvent) -> bool:
    """Whether an exception is how a process answers a launcher that ends it; its traceback shows where the program was."""
    is_requested = event.values.get("type", "").rpartition(".")[2] in REQUESTED_ENDS
    return is_requested or ("type" in event.values and _OF_SIGNAL.search(event.values.get("message", "")) is not None)


_OF_SIGNAL = re.compile(
    r"\b(?:SIG(?:TERM|INT|USR1|USR2)|[Ss]ignal (?:15|2|10|12))\b"
)  # what a handler of the program raises


def lost_threads(record: RankRecord) -> list[Evidence]:
    """The exceptions that ended threads of a process that lived on."""
    return [event_evidence(event) for event in record.events if _was_survived(record, event)]


def _was_survived(record: RankRecord, event: LogEvent) -> bool:
    """Whether the process lived on after an exception: it ended only a thread, was caught and logged, or came from the end
    that a launcher made of the process."""
    if not _is_own(event):
        return False
    if "told" in event.values and record.log is not None and record.log.source != event.source:
        return True  # its own file tells better what became of it
    if "alone" in event.values and not _ended_itself(record):
        return event.values["type"] != USAGE_ERROR or wrote_on(record, event)  # which ends a program at once
    if "ending" in event.values and not _ended_itself(record):
        return True  # it came of the end that the launcher made
    if "handled" in event.values or ended_well(record) or _is_routine(record, event):
        return True
    if event.values.get("thread"):  # which ends no process, unless that chose to end of it
        is_of_peers = "met_peers" in event.values or "felt" in event.values
        return is_of_peers or hang_stack(record) is not None or not _ended_itself(record)
    return logged_on(record, event) or _works_on(record, event) or _was_told_first(record)


def _ended_itself(record: RankRecord) -> bool:
    """Whether a launcher shows that it failed, and was not told to end."""
    return record.exit is not None and record.exit.code != 0 and not record.exit.was_told


def last_error(record: RankRecord) -> LogEvent | None:
    """An error without a traceback that is the last thing logged by a rank of which no exit is known: it may have ended of it."""
    event = next((event for event in reversed(record.events) if "alone" in event.values), None)
    is_last = event is not None and record.exit is None and not logged_on(record, event) and not wrote_on(record, event)
    return event if is_last else None


ROUTINE_TIMES = 2


def _works_on(record: RankRecord, event: LogEvent) -> bool:
    """Whether its recorder ticks and its main thread waits in an operation of its routine: in the backward pass, or at a line
    where it completed the same operation before. No process that ends of an error comes there, nor does a handler."""
    beat, stack = record.heartbeat, hang_stack(record)
    if beat is None or beat.is_stopped or record.exit is not None or event.source.endswith(".error.json"):
        return False
    if stack is None or stack.main is None or not waited_at_the_end(record):
        return False
    state, call = main_thread_state(stack.main)
    table = record.operations
    last = table[table["created_ns"].argmax()]
    alike = ~pending(table)
    for column in ("group", "op", "sizes", "dtypes", *(() if call == "backward" else ("frames",))):
        alike &= table[column] == last[column]
    return state.may_wait and int(alike.sum()) >= ROUTINE_TIMES


def ended_well(record: RankRecord) -> bool:
    """Whether its process gave 0 to exit(3), by its launcher or by its recorder: whatever it had raised, it caught."""
    if record.exit is not None:
        return record.exit.code == 0
    return record.heartbeat is not None and record.heartbeat.is_stopped and record.heartbeat.status == 0


OFTEN = 3


def _is_routine(record: RankRecord, event: LogEvent) -> bool:
    """Whether a rank of which no exit is known logged the same error at the same line again and again: it catches it.

    The last one was caught too if the rank lived on, or if the same log record announced it as one before."""
    if record.exit is not None or event.frame is None or (record.heartbeat is not None and record.heartbeat.status):
        return False
    alike = [other for other in record.events if (other.kind, other.frame) == (event.kind, event.frame)]
    if len(alike) < OFTEN:
        return False
    announced = event.values.get("announced")
    is_announced = bool(announced) and any(other.values.get("announced") == announced for other in alike[:-1])
    return event != alike[-1] or is_announced or record.heartbeat is not None or wrote_on(record, event)


def logged_on(record: RankRecord, event: LogEvent) -> bool:
    """Whether the rank logged a training step after it, or what it had logged again and again: then it was caught. Of a rank that
    failed, steps that all come after it may have waited in a buffer: Python's standard output into a pipe has one, of blocks."""
    log = record.log
    if log is None or "outlived" in event.values:
        return log is not None
    if "went_on" in event.values and (record.exit is None or record.exit.code == 0):
        return True
    if "alone" in event.values and _is_own(event) and (wrote_on(record, event) or _is_habit(record, event)):
        return True
    may_be_buffered = "unstepped" in event.values and record.exit is not None and record.exit.code != 0
    last = log.done_line if may_be_buffered and log.last_step_line > 0 else max(log.last_step_line, log.done_line)
    is_later = event.source == log.source and last > event.line
    is_dated = event.time_s is not None and (
        "dated" in event.values or event.source != log.source
    )  # else it may be later
    return is_later or (is_dated and any(time_s > (event.time_s or 0.0) for time_s in log.step_times.values()))


def _is_habit(record: RankRecord, event: LogEvent) -> bool:
    """Whether a rank of which no exit is known outlived an error of the same type before."""
    kin = (other for other in record.events if other.line < event.line and other.source == event.source)
    return record.exit is None and any(other.values.get("type") == event.values["type"] for other in kin)


def _was_told_first(record: RankRecord) -> bool:
    """Whether its recorder heard SIGTERM while the main thread ran the program as ever: an exception came of that signal."""
    told = [stack for stack in record.stacks if "sigterm" in stack.reason and stack.main and stack.main.frames]
    if not told or (record.exit is not None and not record.exit.was_told):
        return False
    before = hang_stack(record)
    return before is not None and before.main is not None and main_thread_state(before.main)[0] != RankState.IN_TEARDOWN


def _raised(record: RankRecord) -> Situation | None:
    error = own_exception(record)
    if error is None:
        return None
    is_port = any(word in error.text for word in _PORT_TAKEN)
    return Situation(
        rank=record.rank,
        kind=RankState.DEAD,
        detail=Subtype.NONE if is_port else _DETAILS.get(error.kind, Subtype.PYTHON_EXCEPTION),
        call="found its port in use (another process has it, or one of an earlier attempt is not gone yet)"
        if is_port
        else "",
        frame=error.frame,
        confidence=Basis.OWN_EXCEPTION.confidence,
        evidence=(event_evidence(error),),
    )


_PORT_TAKEN = ("EADDRINUSE", "ddress already in use")


def _ended_by_signal(record: RankRecord) -> Situation | None:
    number = signal_of(record.exit.code) if record.exit else 0
    if record.exit and number and not record.exit.was_told and number not in (signal.SIGTERM, signal.SIGINT):
        return _killed(record, record.exit, number)
    fatal = next((event for event in record.events if event.kind == EventKind.FATAL_SIGNAL), None)
    if fatal is not None and "went_on" in fatal.values and not _ended_itself(record):
        return None
    if fatal is not None and not ("Aborted" in fatal.text and _was_aborted(record)):
        stack = next((s for s in record.stacks if s.reason.startswith("fatal")), None)
        return Situation(
            rank=record.rank, kind=RankState.DEAD, detail=Subtype.SIGNAL, frame=crash_frame(stack),
            confidence=Basis.FATAL_LOG.confidence,
            evidence=(event_evidence(fatal), *crashed_thread(record, stack), *last_words(record)),
        )  # fmt: skip
    crash = next((s for s in record.stacks if s.reason == "fatal" and s.threads), None)
    if crash is not None:
        text = "the interpreter's fault handler wrote its stack: a signal ended it"
        wrote = Evidence(text=text, rank=record.rank, source=crash.source)
        return Situation(
            rank=record.rank, kind=RankState.DEAD, detail=Subtype.SIGNAL, frame=crash_frame(crash),
            confidence=Basis.FATAL_STACK.confidence,
            evidence=(wrote, *crashed_thread(record, crash), *last_words(record)),
        )  # fmt: skip
    return _aborted_on_cpu(record)


def _aborted_on_cpu(record: RankRecord) -> Situation | None:
    """A rank that SIGABRT ended while its main thread was in the program's own code, with nothing pending: no library aborted it
    for a wait."""
    aborted = next((s for s in record.stacks if s.reason == "fatal abort" and s.main and s.main.frames), None)
    if aborted is None or aborted.main is None or _was_aborted(record) or waited_at_the_end(record):
        return None
    if main_thread_state(aborted.main)[0] != RankState.ON_CPU:
        return None
    wrote = Evidence(
        text="SIGABRT ended it in its own code, with nothing pending", rank=record.rank, source=aborted.source
    )
    return Situation(
        rank=record.rank, kind=RankState.DEAD, detail=Subtype.SIGNAL, frame=crash_frame(aborted), signal="SIGABRT",
        confidence=Basis.ABORTED.confidence,
        evidence=(wrote, *crashed_thread(record, aborted), *last_words(record)),
    )  # fmt: skip


# Xid errors that a process on the GPU does not end of: 45 follows the end of another process, 63 and 64 tell of a memory row that
# is set aside, 92 counts corrected errors (NVIDIA's "XID Errors").
HARMLESS_XIDS = ("45", "63", "64", "92")
# What a program's own memory access on the GPU makes: a graphics engine exception, a page fault, a reset of the channel.
XIDS_OF_PROGRAMS = ("13", "31", "43")
_REPORTS = (EventKind.KILLED, EventKind.DEVICE_ERROR, EventKind.NODE_LOST)


def _reported(record: RankRecord) -> Situation | None:
    """What a kernel, a driver or a scheduler says of a rank's process, its GPU or its host."""
    if record.exit is not None and (record.exit.code == 0 or record.exit.was_told):
        return None
    event = next((event for event in record.events if event.kind in _REPORTS and _is_end(record, event)), None)
    if event is None:
        return None
    detail = Subtype.DEVICE if event.kind == EventKind.DEVICE_ERROR else Subtype.HOST
    is_program = event.values.get("xid") in XIDS_OF_PROGRAMS
    detail = Subtype.PYTHON_EXCEPTION if is_program else detail
    if event.kind == EventKind.KILLED:
        detail = Subtype.OOM if event.values.get("cause") == "oom" else Subtype.SIGNAL
        detail = Subtype.HOST if event.values.get("cause") == "evicted" else detail
    return Situation(
        rank=record.rank, kind=RankState.DEAD, detail=detail, signal=event.values.get("signal", ""),
        call=f"made its GPU fault (Xid {event.values['xid']}, by an access of the program's)" if is_program else "",
        confidence=Basis.REPORTED.confidence, evidence=(event_evidence(event), *last_words(record)),
    )  # fmt: skip


def _is_end(record: RankRecord, event: LogEvent) -> bool:
    """Whether a report is of something that ends a process: no request to end, no mere warning, nothing that it outlived."""
    of_file = (other for other in record.events if other.source == event.source and other.line >= event.line)
    if any("went_on" in other.values if other.line == event.line else other.kind.is_communication for other in of_file):
        return False
    if event.values.get("xid") in HARMLESS_XIDS or event.values.get("signal") in ("SIGTERM", "SIGINT", "SIGHUP"):
        return False
    return not logged_on(record, event)


def _is_unclear_abort(record: RankRecord) -> bool:
    """Whether SIGABRT ended it, and its log does not rule out that a library did that."""
    is_aborted = record.exit is not None and signal_of(record.exit.code) == signal.SIGABRT
    has_stuck_watchdog = any(event.kind == EventKind.HEARTBEAT for event in record.events)
    is_of_others = speaks_of_others(record) and not has_stuck_watchdog
    return is_aborted and (_was_aborted(record) or record.log is None or is_of_others)


def _killed(record: RankRecord, ended: Exit, number: int) -> Situation:
    name = signal.Signals(number).name
    lack = next((event for event in record.events if _is_lack_of_memory(event)), None)
    stack = next((s for s in record.stacks if s.reason.startswith("fatal")), None)
    killed = Evidence(text=f"exit code {ended.code}: killed by {name}", rank=record.rank, source=ended.source)
    return Situation(
        rank=record.rank,
        kind=RankState.DEAD,
        detail=Subtype.OOM if lack is not None else Subtype.SIGNAL,
        frame=crash_frame(stack),
        signal=name,
        confidence=Basis.KILLED.confidence,
        evidence=(
            killed,
            *((event_evidence(lack),) if lack is not None else ()),
            *(crashed_thread(record, stack) if stack is not None and stack.current is not None else ()),
            *last_words(record),
        ),
    )


def _is_lack_of_memory(event: LogEvent) -> bool:
    """Whether the program, a scheduler or the kernel (which names the process that it killed) says so."""
    return event.kind == EventKind.OOM or (event.kind == EventKind.KILLED and event.values.get("cause") == "oom")


def _gone(record: RankRecord) -> Situation | None:
    if record.process_state != "gone" or (record.heartbeat and record.heartbeat.is_stopped):
        return None
    gone = Evidence(text="its process is gone, and it did not end in good order", rank=record.rank)
    return Situation(
        rank=record.rank,
        kind=RankState.DEAD,
        confidence=Basis.PROCESS_GONE.confidence,
        evidence=(gone, *last_words(record)),
    )


def _left_with_status(record: RankRecord) -> Situation | None:
    """A rank that ended itself with an exit code, and not because of its peers."""
    beat = record.heartbeat
    if beat is None or not beat.is_stopped or not beat.status or _was_aborted(record) or was_told(record):
        return None
    if waited_at_the_end(record) or (record.exit is not None and record.exit.was_told):
        return None
    left = Evidence(text=f"ended with exit code {beat.status}", rank=record.rank, source=beat.source)
    return Situation(
        rank=record.rank, kind=RankState.DEAD, detail=Subtype.EXIT_CODE, call=f"left with exit code {beat.status}",
        confidence=Basis.EXIT_STATUS.confidence, evidence=(left, *last_words(record)),
    )  # fmt: skip


def was_told(record: RankRecord) -> bool:
    """Whether a rank's recorder heard SIGTERM."""
    reasons = [*(dump.reason for dump in record.dumps), *(stack.reason for stack in record.stacks)]
    return any("sigterm" in reason for reason in reasons)


def is_absent(record: RankRecord) -> bool:
    """Whether nothing was collected of a rank, except perhaps an exit code that victims have too."""
    exit_ = record.exit
    number = signal_of(exit_.code) if exit_ else 0
    is_usual = exit_ is None or (exit_.was_told and number == signal.SIGTERM) or number == signal.SIGABRT
    failed = exit_ is not None and exit_.code > 0 and not number
    found = (record.dumps, record.stacks, record.log, record.heartbeat, record.has_recorder)
    is_running = not record.process_state or record.process_state[:1] in "RSD"
    return not any(found) and is_running and (is_usual or failed)


def _was_aborted(record: RankRecord) -> bool:
    """Whether the communication library aborted the process (NCCL's watchdog, gloo on a wrong size): then it is a victim."""
    return any(event.kind.is_communication or event.kind == EventKind.WATCHDOG for event in record.events)


def signal_of(code: int) -> int:
    """The signal that an exit code stands for (-9 and 137 are SIGKILL), or 0."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return number if number in _SIGNALS else 0


_SIGNALS = frozenset(int(number) for number in signal.Signals)


def event_evidence(event: LogEvent) -> Evidence:
    """A line of a log as evidence."""
    return Evidence.at(event.frame, text=event.text, rank=event.rank, source=f"{event.source}:{event.line}")
