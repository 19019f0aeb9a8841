"""Stack dumps as text: faulthandler's, py-spy's, and our recorder's (faulthandler's with source lines added)."""

from __future__ import annotations

import re
from dataclasses import replace

from titan_ckpt.debug.incident.records import Frame, StackSnapshot, Thread

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+|\d+)(?: \[([^\]]*)\])?")
_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (.+)$')
_PYSPY_THREAD = re.compile(r'^Thread (\d+) \(([^)]*)\)(?:: "?([^"]*)"?)?')
_PYSPY_FRAME = re.compile(r"^\s{4}(\S.{0,400}?) \(([^()]{1,400}?)(?::(\d{1,9}))?\)$")  # without a line: --native
_STATE = re.compile(r"^\s*(Garbage-collecting|<no Python frame>|<cannot .*>)$")
MAX_THREADS = 512


def parse_stacks(text: str, source: str, reason: str) -> StackSnapshot:
    """All threads in `text`. The main thread is the one py-spy or our recorder names, else the one that faulthandler
    prints last (it walks threads from the newest to the oldest)."""
    threads: list[Thread] = []
    name, state, frames, is_current = "", "", list[Frame](), False

    def close() -> None:
        if name and len(threads) < MAX_THREADS:
            threads.append(Thread(name=name, frames=tuple(frames), state=state, is_current=is_current))

    for line in text.splitlines():
        head = _PYSPY_THREAD.match(line) if "most recent call" not in line else None
        faulthandler = _THREAD.match(line) if head is None and line.rstrip().endswith(":") else None
        if head or faulthandler:
            close()
            name, state, frames = _thread_name(head, faulthandler), "", []
            is_current = faulthandler is not None and faulthandler.group(1) == "Current thread"
            if head:
                state = head.group(2)
        elif match := _FRAME.match(line):
            file, number, rest = match.groups()
            function, _, source_text = rest.partition("  | ")
            frames.append(Frame(file=file, line=_line(number), function=function.strip(), text=source_text.strip()))
        elif match := _PYSPY_FRAME.match(line):
            function, file, number = match.groups()
            line_number = _line(number or "0")
            frames.append(Frame(file=bracketed(file, line_number), line=line_number, function=function))
        elif match := _STATE.match(line):
            state = match.group(1)
    close()
    return StackSnapshot(source=source, reason=reason, threads=_mark_main(threads))


def _thread_name(pyspy: re.Match[str] | None, faulthandler: re.Match[str] | None) -> str:
    if pyspy:
        return pyspy.group(3) or pyspy.group(1)
    assert faulthandler is not None
    return (faulthandler.group(3) or faulthandler.group(2)).strip() or faulthandler.group(2)


_OF_C = re.compile(r"\.(?:S|c|cc|cpp|cxx|cu|h|hpp|inl)$")


def bracketed(file: str, line: int) -> str:
    """The file of a frame of py-spy's; in angle brackets if it is of C: a library without a line, or C's source with one."""
    return file if line and not _OF_C.search(file) else f"<{file}>"


def _line(digits: str) -> int:
    return int(digits[:9])


def _mark_main(threads: list[Thread]) -> tuple[Thread, ...]:
    named = next((i for i, thread in enumerate(threads) if "MainThread" in thread.name), None)
    main = named if named is not None else _last_script(threads)
    return tuple(replace(thread, is_main=i == main) for i, thread in enumerate(threads))


def _last_script(threads: list[Thread]) -> int:
    """The thread whose outermost frame is a module's body, else the last one."""
    for i, thread in enumerate(threads):
        if thread.frames and thread.frames[-1].function == "<module>":
            return i
    return len(threads) - 1
