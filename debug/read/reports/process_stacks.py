"""Stack dumps of whole processes by py-spy and gdb, of one process or of many in one file; the process says who it is.

Formats: `py-spy dump` (its src/dump.rs: `Process 4711: python train.py`, then threads) and `py-spy dump --json`;
`ray stack` (ray/scripts/scripts.py) puts `Stack dump for` and the line of `ps` before each process;
gdb's `thread apply all bt` (`Thread 2 (Thread 0x7f.. (LWP 4720) "name"):`, `#1  0x.. in f (..) at file:line` or `from lib`),
where libpython's gdb extension shows Python frames as `Frame 0x.., for file train.py, line 12, in main (..)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from titan_ckpt.debug.incident.records import Frame, StackSnapshot, Thread
from titan_ckpt.debug.read.stacks import bracketed, parse_stacks
from titan_ckpt.parsing.json_values import JsonValue

MAX_THREADS = 512
MAX_FRAMES = 256
_PROCESS = re.compile(r"^Process (?P<pid>\d{1,9}): (?P<command>.{0,4000})$", re.MULTILINE)
_HEADING = re.compile(r"^\W{0,8}(?:[Gg]lobal[ _-]?)?[Rr]ank[ _:=#-]{0,3}(?P<rank>\d{1,6})\b.{0,80}$", re.MULTILINE)
_LOOK_BACK = 300  # characters before a process in which a script may have put a heading
_PLACE = re.compile(r"--local[-_]rank[= ](?P<local>\d{1,6})\b")
_ATTACHED = re.compile(
    r"^(?:Attaching to process|process|\[Inferior 1 \(process) (?P<pid>\d{1,9})\b.{0,200}$", re.MULTILINE
)
_GDB_THREAD = re.compile(
    r"^Thread (?P<number>\d{1,6}) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (?P<lwp>\d{1,9})\)?\)?(?: \"(?P<name>[^\"]{0,40})\")?.{0,40}:$"
)
_GDB_FRAME = re.compile(r"^#\d{1,6} +(?:0x[0-9a-f]+ in )?(?P<function>.{1,400}?) ?\(")
_GDB_AT = re.compile(r"\) at (?P<file>[^()]{1,400}):(?P<line>\d{1,9})$")
_GDB_FROM = re.compile(r"\) from (?P<file>.{1,400})$")
_GDB_PYTHON = re.compile(
    r"Frame 0x[0-9a-f]+, for file (?P<file>.{1,400}?), line (?P<line>\d{1,9}), in (?P<function>\w{1,200})"
)
# Below a wait of torch, NCCL, gloo or CUDA: the C library's own functions say nothing.
_WAITING = re.compile(
    r"^(?:_{0,2}(?:GI_+)?(?:pthread_\w+|futex\w*|lll_\w+|poll|ppoll|epoll_\w+|select|sem_\w+|clock_nanosleep|nanosleep|read|recv"
    r"|recvmsg|accept4?|syscall|ioctl|sched_yield|new_sem_\w+|cond_\w+)(?:@.*)?|std::condition_variable::.*|\?\?)$"
)
_CALLED = re.compile(r"c10d::|gloo::|nccl\w*|cu(?:da)?[A-Z]\w+Synchronize|hip\w+Synchronize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """The stacks of one process; `pid`, `rank` and `local_rank` as far as the dump shows them."""

    stacks: StackSnapshot
    pid: int | None = None
    rank: int | None = None
    local_rank: int | None = None


def is_process_stacks(head: str) -> bool:
    """Whether a text begins as py-spy or gdb writes one."""
    first = head.lstrip()
    return bool(
        (
            (re.match(r"Process \d{1,9}: |Stack dump for \w", first) or _HEADING.match(first))
            and _PROCESS.search(first)
            and re.search(r"^(?:Python v\d|Thread \d)", first, re.MULTILINE)
        )
        or re.search(r"^Thread \d{1,6} \((?:Thread 0x[0-9a-f]+ )?\(?LWP \d", head, re.MULTILINE)
    )


def read_process_stacks(text: str, source: str) -> Iterator[ProcessStacks]:
    """One entry per process."""
    heads = list(_PROCESS.finditer(text))
    if not heads:
        yield _of_gdb(text, source)
        return
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        part = text[head.end() : following.start() if following else len(text)]
        place, rank = _PLACE.search(head["command"]), _rank_above(text, head.start())
        yield ProcessStacks(
            stacks=parse_stacks(part, source, "pyspy"), pid=int(head["pid"]), rank=rank,
            local_rank=int(place["local"]) if place else None,
        )  # fmt: skip


def _rank_above(text: str, at: int) -> int | None:
    """The rank in the heading that a loop over ranks wrote right above a dump (`=== rank 2 ===`)."""
    above = text[max(0, at - _LOOK_BACK) : at].rstrip().rpartition("\n")[2]
    match = _HEADING.match(above)
    return int(match["rank"]) if match else None


def is_pyspy_json(document: JsonValue) -> bool:
    """Whether a document is `py-spy dump --json`: a list of threads."""
    value = document.value
    return bool(isinstance(value, list) and value and isinstance(value[0], dict) and "thread_id" in value[0])


def read_pyspy_json(document: JsonValue, source: str) -> ProcessStacks:
    """DamagedError for values of wrong types."""
    threads, pid = [], None
    for entry in document.entries():
        found, name = entry.find("pid"), entry.find("thread_name")
        pid = found.whole() if found is not None and pid is None else pid
        label = name.text(200) if name is not None and name.value is not None else str(entry["thread_id"].value)[:40]
        frames = tuple(_json_frame(frame) for frame in entry["frames"].entries())
        threads.append(Thread(name=label, frames=frames, is_main=label == "MainThread"))
    if threads and not any(thread.is_main for thread in threads):
        last = next((i for i, t in enumerate(threads) if t.frames and t.frames[-1].function == "<module>"), -1)
        threads[last] = Thread(name=threads[last].name, frames=threads[last].frames, is_main=True)
    return ProcessStacks(
        stacks=StackSnapshot(source=source, reason="pyspy", threads=tuple(threads[:MAX_THREADS])), pid=pid
    )


def _json_frame(frame: JsonValue) -> Frame:
    line = frame["line"].whole()
    return Frame(file=bracketed(frame["filename"].text(4096), line), line=line, function=frame["name"].text(4096))


# ----------------------------------------------------------------------------------------------------------- gdb


@dataclass(slots=True)
class _Native:
    """A thread of gdb's, while it is read."""

    lwp: int
    name: str
    frames: list[Frame]


def _of_gdb(text: str, source: str) -> ProcessStacks:
    threads: list[_Native] = []
    for line in text.splitlines():
        if match := _GDB_THREAD.match(line):
            if len(threads) >= MAX_THREADS:
                break
            threads.append(_Native(int(match["lwp"]), match["name"] or f"LWP {match['lwp']}", []))
        elif threads and len(threads[-1].frames) < MAX_FRAMES and (frame := _native_frame(line)) is not None:
            threads[-1].frames.append(frame)
    attached = _ATTACHED.search(text)
    first = min((thread.lwp for thread in threads), default=None)
    pid = (
        int(attached["pid"]) if attached else first
    )  # the main thread has the number of its process, the smallest of all
    return ProcessStacks(
        pid=pid,
        stacks=StackSnapshot(
            source=source,
            reason="gdb",
            threads=tuple(
                Thread(name=thread.name, frames=_spoken(thread.frames), is_main=thread.lwp == (pid or first))
                for thread in threads
            ),
        ),
    )


def _native_frame(line: str) -> Frame | None:
    """A frame of gdb's; C and C++ frames get a file in angle brackets, as they are no lines of the user's program."""
    if match := _GDB_PYTHON.search(line[:2000]):
        return Frame(file=match["file"], line=int(match["line"]), function=match["function"])
    match = _GDB_FRAME.match(line[:2000])
    if match is None:
        return None
    function = match["function"]
    if place := _GDB_AT.search(line[-500:]):
        return Frame(file=f"<{place['file']}>", line=int(place["line"]), function=function)
    library = _GDB_FROM.search(line[-500:])
    return Frame(file=f"<{library['file'] if library else 'native'}>", line=0, function=function)


def _spoken(frames: list[Frame]) -> tuple[Frame, ...]:
    """The frames from the innermost that says what is waited for: the C library's waits above it are left out."""
    for place, frame in enumerate(frames):
        if _CALLED.search(frame.function):
            return tuple(frames[place:])
        if not _WAITING.match(frame.function):
            break
    return tuple(frames)
