"""One writer's lines of one file, while they are read: its events, tracebacks, crash stacks, last lines and steps."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from titan_ckpt.debug.incident.frames import is_library, torch_call, user_frame
from titan_ckpt.debug.incident.kinds import REQUESTED_ENDS, USAGE_ERROR, EventKind
from titan_ckpt.debug.incident.records import Frame, LogEvent, RankLog
from titan_ckpt.debug.read.text import clocks
from titan_ckpt.debug.read.text.crashes import CrashText
from titan_ckpt.debug.read.text.error_kinds import blamed, kind_of_error
from titan_ckpt.debug.read.text.messages import details, recognize
from titan_ckpt.debug.read.text.prefixes import Line
from titan_ckpt.debug.read.text.refusals import Refusals
from titan_ckpt.debug.read.text.routine import BAR, DONE, OF_DONE, RECORD, STEP, GoesOn, Routine, beside_main
from titan_ckpt.debug.read.text.writers.log_records import CHAINED, TRACEBACK

TAIL_LINES = 40
MAX_EVENTS = 400
MAX_FRAMES = 200
MAX_SOURCE = 300  # characters of a source line
MAX_STEPS = 100_000

_MARGIN = re.compile(r" {2,40}[|] ")  # CPython's, before the lines of an exception group
_FRAME = re.compile(r'\s*(?:[|>] )?File "([^"]{1,400})", line (\d{1,9}), in (.{1,400})$')
_RICH_FRAME = re.compile(r"[│|] (/[^:\s]{1,300}):(\d{1,9}) in (\S{1,100})")
_RAISED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s*(.*))?\s*$", re.DOTALL)
_ALONE = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,8}(?:[A-Z]\w{0,60}(?:Error|Exception|Failure|EnforceNotMet)|Exception)"
    r"|(?:[a-z_]\w{0,60}\.){1,8}[A-Z]\w{0,60}(?=: ))(?:: ?(.*))?\s*$"
)
_SUMMARIES = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
_OF_LAUNCHERS = (*_SUMMARIES, "AlgorithmError", "ExecuteUserScriptError", "RayTaskError")
_HOROVOD = "Horovod detected that one or more processes exited"
_WITHOUT_MESSAGE = ("AssertionError", "NotImplementedError")
_ERROR_NAME = re.compile(r"(?:Error|Exception|Interrupt|Exit|Failure|EnforceNotMet|Iteration|Killed)$")
_LOGGED = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b.{0,400}?\b([A-Z]\w{0,80}(?:Error|Exception)): ?(.*)$", re.DOTALL)
_NCCL_DETAIL = re.compile(r"nccl[A-Z]\w{3,40}: |Last error:")
MOST_DETAILS = 4
# `logging.Formatter.default_time_format`, with its milliseconds.
_FLUSHED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\b")
_FIRST_KINDS = (
    EventKind.WATCHDOG,
    EventKind.STORE_WAIT,
    EventKind.COMM_MISMATCH,
    EventKind.COMM_TIMEOUT,
    EventKind.DESYNC,
    EventKind.FATAL_SIGNAL,
)


@dataclass(slots=True)
class Stream:
    """One writer's lines. `rank` is -1 until it is known."""

    source: str
    rank: int = -1
    is_own: bool = False  # one rank wrote all of it, if it is not known which
    first: list[LogEvent] = field(default_factory=list)
    last: deque[LogEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS // 2))
    tail: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    time_s: float | None = None
    zone: str = ""  # of that time
    time_line: int = 0  # the last line that gave a time
    begin: int = 0  # the line at which a traceback began
    last_step: int | None = None
    last_step_line: int = 0
    done_line: int = 0
    step_times: dict[int, float] = field(default_factory=dict)
    frames: list[Frame] | None = None
    chained: bool = False
    thread: str = ""
    bar: int = 0  # how far its last progress bar was; one that closes is written once more
    previous: str = ""  # the line before
    announced: str = ""  # by which log record a traceback was, its numbers removed
    is_flushed: bool = False  # `logging` wrote the line, which holds nothing back
    is_ignored: bool = False  # the interpreter says so of the exception that follows
    crash: CrashText = field(default_factory=CrashText)
    details: int = 0  # lines that may still belong to NCCL's message
    refusals: Refusals = field(default_factory=Refusals)
    routine: Routine = field(default_factory=Routine)
    # Errors of the program's own, which it perhaps outlived.
    open_errors: deque[LogEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS // 2))

    def take(self, number: int, line: Line) -> None:
        """Account for one line, its prefixes removed."""
        text = _MARGIN.sub("", line.text) if line.text.startswith("  ") else line.text
        if not text.strip():
            return
        self.tail.append((number, line.shown or text))
        self.is_flushed = self.is_own and _FLUSHED.match(line.shown) is not None
        self._note_time(number, line)
        self.crash.take(number, text, has_steps=self.last_step_line > 0)
        is_launched = line.local_rank is not None or "attempt_" in self.source
        if ("hread " in text or "retrieved" in text or "rocess-" in text) and (
            name := beside_main(text, is_launched=is_launched)
        ):
            self.thread = name
        elif text.startswith("Exception ignored in"):
            self.is_ignored = True
        elif TRACEBACK in text:
            self.frames, self.begin = [], number
            if not self.chained:
                self.announced = re.sub(r"\d+", "#", self.previous[:200]) if RECORD.search(self.previous[:200]) else ""
        elif self.frames is not None and (frame := _frame(text)):
            if len(self.frames) < MAX_FRAMES:
                self.frames.append(frame)
                self._lend(frame)
        else:
            if self.frames and not self.frames[-1].text and text.startswith("    "):
                self.frames[-1] = replace(self.frames[-1], text=text.strip()[:MAX_SOURCE])
            self._note_event(number, text)
        self.previous = text

    def restart(self) -> None:
        """What was read so far belongs to an earlier attempt of the job."""
        self.first.clear()
        self.last.clear()
        self.tail.clear()
        self.step_times.clear()
        self.last_step, self.frames, self.crash = None, None, CrashText()
        self.previous = self.announced = self.thread = ""
        self.last_step_line, self.done_line, self.details = 0, 0, 0
        self.routine, self.refusals, self.bar, self.chained = Routine(), Refusals(), 0, False
        self.open_errors.clear()

    def add(self, event: LogEvent) -> None:
        """Keep the first and the newest events where there are very many; `unstepped`: no step was logged before."""
        if not self.last_step_line:
            event = replace(event, values={**event.values, "unstepped": "1"})
        (self.first if len(self.first) < MAX_EVENTS // 2 else self.last).append(event)

    @property
    def events(self) -> tuple[LogEvent, ...]:
        """All kept events in their order."""
        return (*self.first, *self.last)

    def _note_time(self, number: int, line: Line) -> None:
        time_s = line.time_s
        if time_s is None and ":" in line.text[:200] and (match := clocks.ANYWHERE.search(line.text[:400])):
            time_s = clocks.seconds(match, 1970)
        if time_s is not None:
            self.time_s, self.zone, self.time_line = time_s, line.zone, number
        if any(word in line.text for word in OF_DONE) and DONE.search(line.text[:400]):
            self.done_line = number
        is_trusted = time_s is not None or (self.frames is None and "rror" not in line.text)
        if "'loss':" in line.text and "'epoch':" in line.text:  # Transformers' Trainer, which names no step
            self.last_step_line = number
        if "<" in line.text and (bar := BAR.search(line.text)):
            if int(bar.group(1)) > self.bar:
                self.last_step_line = number
            self.bar = int(bar.group(1))
        low = line.text.lower() if is_trusted else ""
        if ("step" in low or "iter" in low) and (step := STEP.search(line.text)):
            sign = -1 if line.text[step.start(1) - 2 : step.start(1)] == " -" else 1
            before, self.last_step, self.last_step_line = self.last_step, sign * int(step.group(1)), number
            if before is not None and self.last_step > before and self.crash.has_steps:
                self.crash.go_on()
            if time_s is not None and len(self.step_times) < MAX_STEPS:
                self.step_times.setdefault(self.last_step, time_s)

    def _note_event(self, number: int, text: str) -> None:
        if text.startswith(CHAINED):
            self.chained, self.frames = True, None
            return
        if self.details and self._take_detail(text):
            return
        raised = self._raised(text)
        found = _understood(text, raised, self.frames or ()) or self._refused(text)
        if found is None and raised is None and self.frames is None and ("rror" in text or "xcept" in text):
            found = _alone(text)
        if raised is not None and self.is_ignored:
            found, self.is_ignored = None, False
        if found is not None:
            kind, values = found
            if raised and kind == EventKind.EXCEPTION and (others := blamed(text, self.rank)):
                kind, values = EventKind.COMM_TIMEOUT, {**values, "blames": others}
            self._keep(number, text, kind, values, raised is not None)
            self._open(kind)
            self.details = MOST_DETAILS if "type" in values and "NCCL error" in text else 0
        elif self.frames is None and (
            goes_on := self.routine.take(text, self.time_s, is_flushed=self.is_flushed and self.time_line == number)
        ):
            self._outlive(goes_on)
        if raised or (self.frames and not text.startswith((" ", "\t", "│", "|", "╰"))):
            self.frames = None

    def _open(self, kind: EventKind) -> None:
        """Note an error of the program's own that it logged: whether the program goes on will be seen."""
        if kind in (EventKind.EXCEPTION, EventKind.OOM):
            self.open_errors.append((self.last or self.first)[-1])
            self.routine.mark()

    def _outlive(self, goes_on: GoesOn) -> None:
        """The program went on: in its routine it had caught the errors that it logged, and other ones surely, or if no end of it
        tells otherwise: what Python had in a buffer comes after the traceback of which it ended."""
        for event in self.open_errors:
            is_logged = goes_on == GoesOn.PERHAPS and ("announced" in event.values or "alone" in event.values)
            name = "outlived" if goes_on == GoesOn.SURELY or is_logged else "went_on"
            for box in (self.last, self.first):
                place = next((n for n in range(len(box) - 1, -1, -1) if box[n] is event), None)
                if place is not None:
                    box[place] = replace(event, values={**event.values, name: "1"})
                    break
        self.open_errors.clear()

    def _take_detail(self, text: str) -> bool:
        """Join a line of NCCL's message to the error that began with it: its last lines say what failed."""
        box = self.last or self.first
        is_last = bool(box) and box[-1].text.endswith("Last error:")
        if self.frames is not None or not box or not (is_last or _NCCL_DETAIL.match(text)):
            self.details = 0
            return False
        self.details -= 1
        joined = f"{box[-1].text} {text.strip()}"[:800]
        box[-1] = replace(box[-1], text=joined, kind=kind_of_error(joined))
        return True

    def _refused(self, text: str) -> tuple[EventKind, dict[str, str]] | None:
        """The program, or one that it called, refuses its command line."""
        said = self.refusals.take(text) if self.frames is None else None
        return None if said is None else (EventKind.EXCEPTION, {"type": USAGE_ERROR, "message": said, "alone": "1"})

    def _raised(self, text: str) -> re.Match[str] | None:
        """The last line of a traceback: the exception's type and message."""
        if self.frames is None or text[:1].isspace():
            return None
        return match if (match := _RAISED.match(text)) and (_ERROR_NAME.search(match.group(1)) or self.frames) else None

    def _keep(self, number: int, text: str, kind: EventKind, values: dict[str, str], is_raised: bool) -> None:
        frame, calls = None, tuple(reversed(self.frames or ())) if is_raised else ()
        if is_raised:
            frame = user_frame(calls)
            is_told = self.chained and values.get("type", "").rpartition(".")[2] in REQUESTED_ENDS
            if is_told and self._ended_in(frame, values["type"]):
                return
            values = {**values, **self._of_traceback(kind)}
            text = text if values.get("message") or "cause" not in values else f"{text.strip()} {values['cause']}"
            if self.time_line >= self.begin - 1:
                values["dated"] = self.zone or "local"  # the time is that of the traceback, or of the record before it
        self.add(
            LogEvent(
                kind=kind, rank=self.rank, text=text.strip()[:400], source=self.source, line=number, time_s=self.time_s,
                frame=frame, values=values, calls=calls,
            )
        )  # fmt: skip

    def _ended_in(self, frame: Frame | None, by: str) -> bool:
        """Whether a process was interrupted while it handled an error: that error is what it met, at the line where it was. `by`:
        the type of the interrupting exception."""
        self.chained = False
        box = self.last or self.first
        if not box or "type" not in box[-1].values:
            return False
        met = box[-1]
        is_own = frame is not None and not is_library(frame) and (met.frame is None or is_library(met.frame))
        box[-1] = replace(met, frame=frame if is_own else met.frame, values={**met.values, "interrupted": by})
        return True

    def _lend(self, frame: Frame) -> None:
        """Give a library's error the program's own line, which only the traceback of the error that followed it has; that one may
        be cut off before its last line."""
        box = self.last or self.first
        if not self.chained or is_library(frame) or not box or "type" not in box[-1].values:
            return
        met = box[-1]
        if met.frame is None or is_library(met.frame) or met.frame in (self.frames or ()):
            box[-1] = replace(met, frame=frame)

    def _of_traceback(self, kind: EventKind) -> dict[str, str]:
        """The torch call of a traceback, its thread, and the exceptions that it was raised in the handling of."""
        values: dict[str, str] = {}
        if call := torch_call(reversed(self.frames or [])):
            values["call"] = call
        elif below := _below_torch(self.frames or []):
            values["below"] = below
        elif kind == EventKind.STORE_WAIT and self.frames and not is_library(self.frames[-1]):
            values["direct"] = "1"  # the program called the store itself
        if self.announced:
            values["announced"], self.announced = self.announced, ""
        if self.thread:
            values["thread"], self.thread = self.thread, ""
        if self.chained:
            self.chained = False
            box = self.last or self.first
            if box and "type" in box[-1].values and box[-1].kind != EventKind.WATCHDOG:
                cause = box.pop()
                if not cause.kind.is_communication and kind.is_communication:
                    box.append(replace(cause, values={**cause.values, "handled": "1"}))
                elif _is_of_peers(cause) and not kind.is_communication:
                    box.append(cause)  # what a handler raised of it is no cause
                values["cause"] = cause.text
                values["causes"] = ", ".join(filter(None, (cause.values.get("causes"), cause.values["type"])))
        return values

    def log(self) -> RankLog:
        """The finished record."""
        return RankLog(
            source=self.source, events=self.events, tail=tuple(text for _, text in self.tail),
            tail_line=self.tail[-1][0] if self.tail else 0, last_step=self.last_step,
            last_step_line=self.last_step_line, done_line=self.done_line, last_time_s=self.time_s, step_times=self.step_times,
        )  # fmt: skip


def _frame(text: str) -> Frame | None:
    match = _FRAME.match(text) or (_RICH_FRAME.match(text) if text[:1] in "│|" else None)
    return Frame(file=match.group(1), line=int(match.group(2)), function=match.group(3)) if match else None


def _understood(
    text: str, raised: re.Match[str] | None, frames: Sequence[Frame]
) -> tuple[EventKind, dict[str, str]] | None:
    """The kind and values of a line: by what it says, or as the exception that ended a traceback."""
    said = recognize(text)
    logged = None
    if (raised is None and said is None and "rror" in text) or "xception" in text:
        logged = _LOGGED.search(text[:1000])
    match = raised or logged
    if match is None:
        return said
    if match.group(1).endswith(_SUMMARIES) or _HOROVOD in text:  # a launcher's summary of what its workers logged
        return None
    values = {"type": match.group(1), "message": (match.group(2) or "")[:400]}
    if said is not None and said[0] in _FIRST_KINDS:
        return said[0], {**values, **said[1]} if raised else said[1]
    kind = kind_of_error(
        text, is_torch=logged is not None or any("torch/distributed/" in frame.file for frame in frames)
    )
    alone = {"alone": "1"} if raised is None else {}
    return kind, {**values, **alone, **details(kind, text)}


def _alone(text: str) -> tuple[EventKind, dict[str, str]] | None:
    """An exception's type and message without a traceback: what a program logs of an error, which it may outlive."""
    match = _ALONE.match(text)
    if match is None or match.group(1).endswith(_OF_LAUNCHERS) or _HOROVOD in text:
        return None
    if match.group(2) is None and match.group(1) not in _WITHOUT_MESSAGE:
        return None
    values = {"type": match.group(1), "message": (match.group(2) or "")[:400], "alone": "1"}
    kind = kind_of_error(text)
    return kind, {**values, **details(kind, text)}


def _is_of_peers(event: LogEvent) -> bool:
    """Whether torch raised an error for what its peers did; what sockets of the program's own meet has other types."""
    is_torch = event.values["type"].rpartition(".")[2].startswith(("RuntimeError", "Dist"))
    return is_torch and (event.kind.is_communication or event.kind == EventKind.STORE_WAIT)


def _below_torch(frames: Sequence[Frame]) -> str:
    """The pass of the training step whose C++ raised: "backward" or "forward"; "" if it was another part of the program."""
    inner = frames[-1].file if frames else ""
    names = [f.function for f in reversed(frames)]
    if "/torch/" not in inner:
        return ""
    return next((name for name in names if name in ("backward", "forward")), "")


def merged_log(streams: Sequence[Stream], rank: int) -> RankLog:
    """One log of several streams of one writer in one file, by their lines' order."""
    if len(streams) == 1 and streams[0].rank == rank:
        return streams[0].log()
    last = max(streams, key=lambda stream: stream.tail[-1][0] if stream.tail else 0)
    tail = sorted(line for stream in streams for line in stream.tail)[-TAIL_LINES:]
    steps = [stream.last_step for stream in streams if stream.last_step is not None]
    times: dict[int, float] = {}
    for stream in streams:
        times.update(stream.step_times)
    events = sorted((event for stream in streams for event in stream.events), key=lambda event: event.line)
    return RankLog(
        source=last.source, events=tuple(_of_rank(event, rank) for event in events), tail=tuple(text for _, text in tail),
        tail_line=tail[-1][0] if tail else 0, last_step=max(steps, default=None),
        last_step_line=max(stream.last_step_line for stream in streams), done_line=max(stream.done_line for stream in streams),
        last_time_s=max((stream.time_s for stream in streams if stream.time_s is not None), default=None), step_times=times,
    )  # fmt: skip


def _of_rank(event: LogEvent, rank: int) -> LogEvent:
    return event if event.rank == rank else replace(event, rank=rank)


def values_of(event: LogEvent, **more: str) -> Mapping[str, str]:
    """An event's values and some more."""
    return {**event.values, **{key: value for key, value in more.items() if value}}
