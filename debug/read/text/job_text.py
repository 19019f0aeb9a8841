"""One file of text: whose lines they are, what these say, and how processes ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from titan_ckpt.debug.read.text.direction import oldest_first
from titan_ckpt.debug.read.text.endings import Endings
from titan_ckpt.debug.read.text.lines import MAX_MESSAGE, Opener, begins_alike, is_broken, numbered, wrap_width
from titan_ckpt.debug.read.text.nccl_calls import NcclCalls
from titan_ckpt.debug.read.text.prefixes import Line, peel
from titan_ckpt.debug.read.text.streams import Stream
from titan_ckpt.debug.read.text.writers.caught import Caught, forget, mark, wrote_after
from titan_ckpt.debug.read.text.writers.introductions import STARTED, introduction, job_apart, listening_rank, on_host
from titan_ckpt.debug.read.text.writers.labels import Labels, Writer
from titan_ckpt.debug.read.text.writers.log_records import TRACEBACK, LogRecords
from titan_ckpt.debug.read.text.writers.of_run import OfRun
from titan_ckpt.debug.read.text.writers.own_prefixes import OwnPrefixes
from titan_ckpt.debug.read.text.writers.ray import RAY_RANK, RAY_SET_UP, RAY_TASK
from titan_ckpt.debug.read.text.writers.told_tracebacks import ToldTracebacks
from titan_ckpt.debug.read.text.writers.usual_prefixes import SAMPLE, usual_prefixes

NOBODY: Writer = ("job", "", -1)
OWN = "own"  # the kind of writer of the lines without a prefix in a file of one rank
MAX_WRITERS = 200_000


@dataclass(slots=True)
class JobText:
    """What one file said. `writers` are streams by writer; `links` says which rank a writer is and `nodes` which node it is on,
    where lines say so."""

    source: str
    scope: str
    default: Writer = NOBODY
    year: int = 1970
    of_run: OfRun = field(default_factory=OfRun)
    writers: dict[Writer, Stream] = field(default_factory=dict)
    links: dict[Writer, int] = field(default_factory=dict)
    nodes: dict[Writer, int] = field(default_factory=dict)
    tasks: dict[int, set[int]] = field(default_factory=dict)  # the ranks that lines labelled with a task name
    hosts: dict[int, str] = field(default_factory=dict)
    on_hosts: dict[Writer, set[int]] = field(default_factory=dict)  # the ranks that introduced themselves there
    endings: Endings = field(default_factory=Endings)
    shells: dict[int, Writer] = field(default_factory=dict)  # whose lines are notes of endings: a shell's below a rank
    weak: tuple[str, ...] = ()
    num_lines: int = 0
    told_line: int = 0  # where its launcher told the first process to end
    began_s: float | None = None  # the first time that a line has
    num_ranks: int = 0  # of the job, where a report says so
    is_turned: bool = False  # the file has its newest line first: lines are counted from its end
    named: dict[int, int] = field(
        default_factory=dict
    )  # how many lines begin with a rank that is no label: `rank 8: step 1`
    nccl: NcclCalls = field(init=False)
    introduced: int | None = None  # the rank that said first who it is
    apart: str = ""  # which of several jobs it is of, where a line says so
    recorded: set[int] = field(default_factory=set)  # the ranks whose recorder said here where it listens
    _quoted: Writer | None = None  # the process whose error a launcher repeats
    _prefixes: OwnPrefixes = field(default_factory=OwnPrefixes)
    _records: LogRecords = field(default_factory=LogRecords)
    _told: ToldTracebacks = field(default_factory=ToldTracebacks)
    _in_groups: set[int] = field(default_factory=set)  # ranks that torch named by their place in a process group alone
    _prefixed: set[int] = field(default_factory=set)  # ranks that stand before lines
    _groups: set[str] = field(default_factory=set)
    _is_block: bool = False  # it repeats all that this process wrote
    _labels: Labels = field(default_factory=Labels)
    caught: Caught = field(default_factory=Caught)

    def __post_init__(self) -> None:
        self.nccl = NcclCalls(source=self.source)

    @property
    def is_shared(self) -> bool:
        """Whether the program's steps stand in it without a prefix: then all its processes write to it, errors too."""
        return NOBODY in self.writers and self.writers[NOBODY].last_step is not None

    def take(self, number: int, line: Line) -> None:
        """Account for one written line, its prefixes taken off."""
        self.num_lines += 1
        if self.caught.is_quote(number, line.text):
            return
        self.began_s = line.time_s if self.began_s is None else self.began_s
        self.apart = self.apart or job_apart(line.text, self.source)
        writer = self._writer(line)
        if writer[0] != "rank" and ("ank" in line.text or "RANK" in line.text or "ss index" in line.text):
            writer = self._named_inside(line, writer)
        elif "pid" in line.text:
            self._note_start(line.text, writer)
        told = self._told.owner(line, self.endings.found)
        if told is not None:
            self.links.setdefault(told, told[2])
        writer = told or self._quoted_writer(line, writer)
        if self.default == NOBODY:
            named = None if writer == NOBODY else writer
            writer = self._records.owner(line.text, named, is_dated=line.time_s is not None) or NOBODY
        own, is_begun = self._prefixes.peel(line)
        writer = ("prefix", own, 0) if own and writer == NOBODY else writer
        if (own and _NO_ERROR.search(own)) or self.of_run.is_other(writer, line.time_s, self.writers):
            return  # the traceback of a warning, after which the program went on; a line of another run
        if line.is_nccl and "anks" in line.text:
            self.nccl.take(writer, number, line.text, line.task)
        num_notes = len(self.endings.notes)
        if self.endings.take(number, line):
            self._begin_attempt()
        if self.endings.unsaid_line:
            if wrote_after(self.writers.values(), self.endings.unsaid_line):
                self._forget(self.endings.unsaid_line)
            self.told_line, self.endings.unsaid_line = 0, 0
        self.told_line = number if self.endings.told and not self.told_line else self.told_line
        if len(self.endings.notes) > num_notes and writer[0] in ("rank", "local", "pid"):
            self.shells[number] = writer
        stream = self.writers.get(writer)
        if stream is None:
            if len(self.writers) >= MAX_WRITERS:
                return
            rank, is_own = writer[2] if writer[0] == "rank" else -1, writer[0] in ("rank", "local", "pid")
            stream = self.writers[writer] = Stream(source=self.source, rank=rank, is_own=is_own)
        before = stream.last_step
        if is_begun:
            stream.take(number - 1, replace(line, text=f"{TRACEBACK}:", shown=f"{TRACEBACK}:"))
        stream.take(number, line)
        self.caught.note_step(number, stream)
        self.endings.has_steps = self.endings.has_steps or stream.last_step is not None
        if self.endings.may_restart and before is not None and (stream.last_step or 0) < before:
            self.endings.begin_attempt()  # a rank counts its steps again: the job was restarted
            self._begin_attempt(keep=stream)

    def close(self) -> None:
        """Mark what was told of ranks by others, who outlived it where the file goes on with steps; and the exceptions after
        which the job came to further steps. What a test run that passed wrote is its subject."""
        events = (event.line for stream in self.writers.values() for event in (*stream.first, *stream.last))
        ends = (*(ending.line for ending in self.endings.found), *(note.line for note in self.endings.notes))
        if self.caught.is_test_run(self.num_lines, (*events, *ends)):
            self.writers.clear()
            self.endings = Endings()
        self.caught.mark(self.writers.values(), self.endings)
        for stream in self.writers.values():
            crash = stream.crash
            if self.caught.has_gone_on(crash.newest) or (crash.has_steps and self._is_outlived(stream, crash.newest)):
                crash.go_on()
        last = max((max(stream.last_step_line, stream.done_line) for stream in self.writers.values()), default=0)
        for stream in (stream for writer, stream in self.writers.items() if writer[0] == "told"):
            stream.last_step_line = max(stream.last_step_line, last)
            mark(stream, "told", 0)
        for stream in self.writers.values() if self.told_line else ():
            mark(stream, "ending", self.told_line)
        if self._groups and "0" not in self._groups:  # a place in another group than that of all is no rank of the job
            for place in (self._in_groups - self._prefixed) & {
                writer[2] for writer in self.writers if writer[0] == "rank"
            }:
                self.writers[("place", "", place)] = self.writers.pop(("rank", "", place))

    def _is_outlived(self, stream: Stream, line: int) -> bool:
        """Whether a rank says after a line that it is done, or a progress bar of the job goes on."""
        bars = (other.last_step_line for other in self.writers.values() if other.rank < 0 and other.bar)
        return max(stream.done_line, *bars, 0) > line

    def forget_attempt(self) -> None:
        """What was read up to the last failure that the launcher reported is of an attempt that was restarted after it."""
        self._forget(max((ending.line for ending in self.endings.found), default=self.num_lines))
        self.endings.begin_attempt()
        self.told_line = 0

    def _forget(self, until: int) -> None:
        for stream in self.writers.values():
            forget(stream, until)

    def _begin_attempt(self, keep: Stream | None = None) -> None:
        self.told_line = 0
        for stream in self.writers.values():
            if stream is keep:
                step, time_s = stream.last_step, stream.time_s
                stream.restart()
                stream.last_step, stream.time_s = step, time_s
            else:
                stream.restart()

    def _writer(self, line: Line) -> Writer:
        """Who wrote a line, by the most exact of what its prefixes say; other names of a known rank are noted."""
        names: list[Writer] = []
        if line.pid is not None:
            names.append(("pid", line.host, line.pid))
        if line.local_rank is not None:
            names.append(("local", f"{self.scope}|{line.place}", line.local_rank))
        if line.task is not None:
            self.tasks.setdefault(line.task, set())
        if line.rank is not None:
            self._prefixed.add(line.rank)
            if line.task is not None:
                self.tasks[line.task].add(line.rank)
            if line.host:
                self.hosts.setdefault(line.rank, line.host)
            for name in names or ([self.default] if self.default[0] == "local" else ()):
                self.links.setdefault(name, line.rank)
                self._labels.note(name, line.rank, line.text, self.writers)
            return ("rank", "", line.rank)
        if line.is_nccl and self.default[0] == "rank":  # NCCL runs in the rank itself, whose file this is
            self.links.setdefault(names[0], self.default[2])
        if names:
            if line.node is not None:
                self.nodes.setdefault(names[-1], line.node)
            return self._labels.owner(names[-1])
        if self.default is not NOBODY:
            return self._labels.owner(self.default)
        if line.task is not None:
            return ("task", "", line.task)
        if line.node is not None:
            return ("node", "", line.node)
        return ("host", line.host, line.host_kind) if line.host else NOBODY

    def _named_inside(self, line: Line, writer: Writer) -> Writer:
        """A rank that stands in the text: after a progress bar, or where torch names itself."""
        if "[PG " in line.text and (match := _GROUP.search(line.text)):
            self._groups.add(match[1])
        if match := _TORCH_RANK.search(line.text):
            rank, line.text = int(match.group(1)), line.text[match.end() :]
            line.shown = line.text
        elif ("ProcessGroup" in line.text or "atchdog" in line.text) and (match := _OWN_GROUP.search(line.text)):
            rank = int(match.group(1) or match.group(2))
            if rank in self._prefixed and not match.group(1):
                return ("place", "", rank)
            self._in_groups |= set() if match.group(1) else {rank}
        elif match := RAY_RANK.search(line.text):
            self.links[("pid", match["host"], int(match["pid"]))] = int(match["rank"])
            return writer
        elif writer[0] == "pid" and (match := RAY_SET_UP.search(line.text)):
            self.links[writer] = int(match["rank"])
            return writer
        elif (listening := listening_rank(line.text)) is not None:
            self.recorded.add(listening)
            return writer
        else:
            if match := _NAMED.match(line.text):
                self.named[int(match[1])] = self.named.get(int(match[1]), 0) + 1
            if found := on_host(line.text):
                self.hosts.setdefault(*found)
            if own := introduction(line.text):
                self._introduce(*own)
                if writer[0] == "local":
                    self.links.setdefault(writer, own[0])
                elif writer[0] == "host":
                    self.on_hosts.setdefault(writer, set()).add(own[0])
            return writer
        if writer[0] in ("pid", "local"):
            self.links.setdefault(writer, rank)
        if line.task is not None:
            self.tasks[line.task].add(rank)
        return ("rank", "", rank)

    def _note_start(self, text: str, writer: Writer) -> None:
        """The process and the host that a rank names as its own."""
        if (own := introduction(text)) and own[0] == writer[2]:
            self._introduce(*own)
            if found := on_host(text):
                self.hosts.setdefault(*found)
        elif writer[0] == "rank" and (match := STARTED.search(text[:200])):
            self.links.setdefault(("pid", "", int(match["pid"] or match["own"] or match["first"])), writer[2])
            if match["host"]:
                self.hosts.setdefault(writer[2], match["host"])

    def _introduce(self, rank: int, pid: str) -> None:
        """A line such as `rank 3/8 pid 4711`, by which a program says who it is."""
        if self.introduced is None:
            self.introduced = rank
        if pid:
            self.links.setdefault(("pid", "", int(pid)), rank)

    def _quoted_writer(self, line: Line, writer: Writer) -> Writer:
        """Whose line it is below torch.multiprocessing's `-- Process 1 terminated with the following error:`, between composer's
        rulers, or in a record of a logger that goes on after `Traceback`: until a line has a writer of its own."""
        if "-- Process" in line.text and (match := _SPAWN_BLOCK.match(line.text)):
            self._quoted = ("local", f"{self.scope}|", int(match["rank"]))
        elif "RayTaskError(" in line.text and (match := RAY_TASK.search(line.text)):
            self._quoted, line.text = ("pid", match["host"], int(match["pid"])), f"{TRACEBACK}:"  # the worker's follows
        elif "-----" in line.text and (match := _OUTPUT_BLOCK.match(line.text)):
            self._is_block = match["what"] == "Begin"
            self._quoted = ("rank", "", int(match["rank"])) if self._is_block else None
        elif not self._is_block and (line.time_s is not None or line.rank is not None or line.pid is not None):
            is_record = writer[0] == "rank" and line.text.find(TRACEBACK) > 0
            self._quoted = writer if is_record else None
        return writer if self._quoted is None or writer[0] in ("rank", "pid") else self._quoted


_NO_ERROR = re.compile(r"\bWARN(?:ING)?\b")
_OUTPUT_BLOCK = re.compile(r"-{5,40}(?P<what>Begin|End) (?:global )?rank (?P<rank>\d{1,6}) STD(?:OUT|ERR)-{5,40}")
_SPAWN_BLOCK = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_NAMED = re.compile(r"(?:[A-Z]{4,8}:? )?[\[(<]?[Rr]ank[ :=]?(\d{1,6})\b")
_TORCH_RANK = re.compile(r"\[?rank(\d{1,6})\]: ?")
_OWN_GROUP = re.compile(
    r"\[PG (?:ID )?0 (?:PG GUID [^\]]{0,80})?Rank (\d{1,6})\]"
    r"|\[Rank (\d{1,6})\] (?:Watchdog|Process group|NCCL watchdog|Some NCCL|To avoid|Found)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\w{1,40}) (?:PG GUID [^\]]{0,80})?Rank \d{1,6}\]")


def read_text(text: JobText, chunks: Iterable[tuple[bytes, bool]]) -> JobText:
    """Read a file; of chunks marked True (the middle of a huge file) only what is near a landmark."""
    return read_lines(text, numbered(chunks))


def read_lines(text: JobText, physical: Iterable[tuple[int, str]]) -> JobText:
    """Read the lines of a file, or of a part of one, with their numbers."""
    opener = Opener()
    sample: list[tuple[int, str]] = []
    is_sampled = False
    lines, text.is_turned = oldest_first(_joined(_written(opener, physical), opener))
    for number, raw in lines:
        if is_sampled:
            text.take(number, peel(raw, text.weak, text.year))
            continue
        sample.append((number, raw))
        if len(sample) >= SAMPLE:
            is_sampled = True
            _take_sample(text, sample)
    if not is_sampled:
        _take_sample(text, sample)
    text.close()
    text.endings.settle({writer[2] for writer in text.writers if writer[0] in ("rank", "task")})
    return text


def _take_sample(text: JobText, sample: list[tuple[int, str]]) -> None:
    text.weak, lines = usual_prefixes([raw for _, raw in sample], text.year)
    text.caught.look_at([line.text for line in lines])
    for (number, _), line in zip(sample, lines, strict=True):
        text.take(number, line)


def _written(opener: Opener, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    waiting: list[tuple[int, str]] = []
    for number, raw in lines:
        if len(waiting) < SAMPLE and opener.width == 0:
            waiting.append((number, raw))
            if len(waiting) < SAMPLE:
                continue
            opener.width = wrap_width([line for _, line in waiting]) or -1
            for first, held in waiting:
                yield from ((first, line) for line in opener.open(held))
            continue
        yield from ((number, line) for line in opener.open(raw))
    if opener.width == 0:
        opener.width = wrap_width([line for _, line in waiting]) or -1
        for first, held in waiting:
            yield from ((first, line) for line in opener.open(held))
    yield from ((0, line) for line in opener.open(""))  # an entry that the end of the file completes


def _joined(lines: Iterable[tuple[int, str]], opener: Opener) -> Iterator[tuple[int, str]]:
    """Messages that a terminal broke, in one line again."""
    held: tuple[int, str] | None = None
    for number, line in lines:
        if held is not None:
            start = peel(line)
            is_rest = start.text == line and not line.startswith("[") and not begins_alike(held[1], line)
            if is_rest and len(held[1]) < MAX_MESSAGE:
                joined = held[0], held[1] + line
                held = joined if is_broken(joined[1], line, opener.width) else None
                if held is None:
                    yield joined
                continue
            yield held
            held = None
        if is_broken(line, line, opener.width):
            held = number, line
        else:
            yield number, line
    if held is not None:
        yield held
