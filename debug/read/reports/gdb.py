"""gdb's stacks of one process: `thread apply all bt`, `bt` and `py-bt`, alone or one after the other.

Formats: gdb's `Thread 2 (Thread 0x7f.. (LWP 4720) "name"):`, `#1  0x.. in f (..) at file:line` or `from lib`; CPython's
Tools/gdb/libpython.py, which shows a frame of Python as `Frame 0x.., for file train.py, line 12, in main (..)` in `bt`, and in
`py-bt` writes `Traceback (most recent call first):` with frames and lines as in a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from titan_ckpt.debug.incident.records import Frame, StackSnapshot, Thread

MAX_THREADS = 512
MAX_FRAMES = 256
_ATTACHED = re.compile(
    r"^(?:Attaching to process|process|\[Inferior 1 \(process) (?P<pid>\d{1,9})\b.{0,200}$", re.MULTILINE
)
_HEAD = re.compile(
    r"\s{0,100}(?:#0 +\S|Traceback \(most recent call first\):)|(?s:.*?)^(?:Thread \d{1,6} \((?:Thread 0x[0-9a-f]+ )?\(?LWP \d"
    r"|\[New LWP \d|\[Thread debugging using libthread_db)",
    re.MULTILINE,
)
_THREAD = re.compile(
    r"^Thread (?P<number>\d{1,6}) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (?P<lwp>\d{1,9})\)?\)?(?: \"(?P<name>[^\"]{0,40})\")?.{0,40}:$"
)
_FRAME = re.compile(r"^#\d{1,6} +(?:0x[0-9a-f]+ in )?(?P<function>.{1,400}?) ?\(")
_AT = re.compile(r"\) at (?P<file>[^()]{1,400}):(?P<line>\d{1,9})$")
_FROM = re.compile(r"\) from (?P<file>.{1,400})$")
_PRETTY = re.compile(
    r"Frame 0x[0-9a-f]+, for file (?P<file>.{1,400}?), line (?P<line>\d{1,9}), in (?P<function>\w{1,200})"
)
_PYTHON = re.compile(r'^  File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9}), in (?P<function>.{1,200})$')
# Below a wait of torch, NCCL, gloo or CUDA: the C library's own functions say nothing.
_SLEEPS = re.compile(
    r"^(?:_{0,4}(?:GI_+)?(?:pthread_\w+|futex\w*|lll_\w+|poll|ppoll|epoll_\w+|select|sem_\w+|clock_nanosleep|nanosleep|read|recv"
    r"|recvmsg|accept4?|syscall|ioctl|sched_yield|new_sem_\w+|cond_\w+)(?:[@.].*)?|std::condition_variable::.*|\?\?)$"
)
_INTERPRETER = re.compile(r"_?PyEval_\w+$")


@dataclass(slots=True)
class _Read:
    """A thread, while it is read: its frames of C and those that `py-bt` shows, most recent call first."""

    lwp: int
    name: str
    native: list[Frame] = field(default_factory=list)
    python: list[Frame] = field(default_factory=list)
    state: str = ""


def is_gdb(head: str) -> bool:
    """Whether a text begins as gdb writes stacks."""
    return _HEAD.match(head) is not None


def read_gdb(text: str, source: str) -> tuple[int | None, StackSnapshot]:
    """The process, where gdb or the numbers of its threads show it, and its threads."""
    attached = _ATTACHED.search(text)
    threads = _threads(text.splitlines())
    first = min((thread.lwp for thread in threads), default=0)
    # The main thread has the number of its process, the smallest of all.
    pid = int(attached["pid"]) if attached else first or None
    main = pid if any(thread.lwp == pid for thread in threads) else first
    read = tuple(
        Thread(name=thread.name, frames=_spoken(thread), state=thread.state, is_main=thread.lwp == main)
        for thread in threads
    )
    return pid, StackSnapshot(source=source, reason="gdb", threads=read)


def _threads(lines: list[str]) -> list[_Read]:
    """The threads of all commands: one that several of them show is one thread. Without headings all is of the one that gdb
    stopped in, the main thread."""
    threads: dict[int, _Read] = {}
    thread: _Read | None = None
    for line in lines:
        if match := _THREAD.match(line):
            lwp = int(match["lwp"])
            if lwp not in threads and len(threads) >= MAX_THREADS:
                break
            thread = threads.setdefault(lwp, _Read(lwp, match["name"] or f"LWP {lwp}"))
        elif line.startswith(("#", "Traceback (most recent call first)", "  ")):
            thread = thread or threads.setdefault(0, _Read(0, "main"))
            _take(thread, line)
    alone = threads.pop(0, None) if len(threads) > 1 else None
    if alone is not None:
        main = threads[min(threads)]
        main.python, main.native = main.python or alone.python, main.native or alone.native
    return list(threads.values())


def _take(thread: _Read, line: str) -> None:
    if match := _PYTHON.match(line):
        frame = Frame(file=match["file"], line=int(match["line"]), function=match["function"])
        if len(thread.python) < MAX_FRAMES:
            thread.python.append(frame)
    elif line.startswith("    ") and thread.python and not thread.python[-1].text:
        thread.python[-1] = replace(thread.python[-1], text=line.strip()[:300])
    elif line.startswith("  Garbage-collecting"):
        thread.state = "Garbage-collecting"
    elif line.startswith("#0 "):  # of the same thread once more, if it has frames
        thread.native = [native] if (native := _native(line)) is not None else []
    elif len(thread.native) < MAX_FRAMES and (native := _native(line)) is not None:
        thread.native.append(native)


def _native(line: str) -> Frame | None:
    """A frame of `bt`; those of C and C++ get a file in angle brackets, as they are no lines of the user's program."""
    if match := _PRETTY.search(line[:2000]):
        return Frame(file=match["file"], line=int(match["line"]), function=match["function"])
    match = _FRAME.match(line[:2000])
    if match is None:
        return None
    function = match["function"]
    if place := _AT.search(line[-500:]):
        return Frame(file=f"<{place['file']}>", line=int(place["line"]), function=function)
    library = _FROM.search(line[-500:])
    return Frame(file=f"<{library['file'] if library else 'native'}>", line=0, function=function)


def _spoken(thread: _Read) -> tuple[Frame, ...]:
    """The frames without the C library's waits above them. Where `py-bt` gave the frames of Python, they follow those of C that
    the innermost of them called."""
    frames = thread.native
    if thread.python:
        called = next((place for place, f in enumerate(frames) if _INTERPRETER.match(f.function)), len(frames))
        frames = [*frames[:called], *thread.python]
    return below_sleeps(frames)


def below_sleeps(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames from the innermost that says what is waited for; all of them if none does."""
    place = next((place for place, frame in enumerate(frames) if not _SLEEPS.match(frame.function)), 0)
    return tuple(frames[place:])
