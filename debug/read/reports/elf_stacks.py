"""Stacks by elfutils' `eu-stack` (with any of -v, -m, -s, -i) and by `pystack remote` and `pystack core`.

Formats: elfutils' src/stack.c (`PID 4711 - process`, `TID 4711:`, `#1  0x.. - 1 function - library`, the line of C below it);
pystack's src/pystack/traceback_formatter.py (`Traceback for thread 4711 (python) [Has the GIL] (most recent call last):`, frames
of Python and C with the source line below).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from titan_ckpt.debug.incident.records import Frame, StackSnapshot, Thread
from titan_ckpt.debug.read.reports.gdb import MAX_FRAMES, MAX_THREADS, below_sleeps

_EU_HEAD = re.compile(r"^PID (?P<pid>\d{1,9}) - (?:process|core)\s*$", re.MULTILINE)
_EU_THREAD = re.compile(r"^TID (?P<tid>\d{1,9}):$")
_EU_FRAME = re.compile(r"^#\d{1,6} +0x[0-9a-f]+(?: - 1)?(?: +(?P<function>\S.{0,1900}?))??(?: - (?P<file>/.{1,400}))?$")
_EU_PLACE = re.compile(r"^    (?P<file>\S.{0,400}?):(?P<line>\d{1,9})(?::\d{1,9})?$")
_PYSTACK_HEAD = re.compile(
    r"^Traceback for thread (?P<tid>\d{1,9}) \((?P<name>[^)]{0,64})\) \[(?P<state>[^]]{0,80})\] \(most recent call last\):\s*$",
    re.MULTILINE,
)
_PYSTACK_FRAME = re.compile(
    r'^    \((?P<kind>[A-Za-z]{1,12})\) File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9}), in (?P<function>.{1,2000})$'
)
_LIBRARY = re.compile(r" \((?P<file>/[^()]{1,400}|\?{3})\)$")


def is_eu_stack(head: str) -> bool:
    """Whether a text begins as `eu-stack` writes one process; its warnings may stand first."""
    match = _EU_HEAD.search(head)
    return match is not None and all(line.startswith("eu-stack:") for line in head[: match.start()].split("\n") if line)


def is_pystack(head: str) -> bool:
    """Whether a text begins as pystack writes threads; of a core, what it says of the core stands first."""
    match = _PYSTACK_HEAD.search(head)
    return match is not None and (
        match.start() == 0 or head.startswith(("Using executable", "\nCore file", "Core file"))
    )


def read_eu_stacks(text: str, source: str) -> Iterator[tuple[int | None, StackSnapshot]]:
    """The processes of a text, one after the other, and their threads: the main one has the process's number."""
    heads = list(_EU_HEAD.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        part = text[head.end() : following.start() if following else len(text)]
        pid = int(head["pid"])
        threads = tuple(
            Thread(name=f"TID {tid}", frames=below_sleeps(frames), is_main=tid == pid)
            for tid, frames in _eu_threads(part.split("\n"))
        )
        yield pid, StackSnapshot(source=source, reason="eu-stack", threads=_with_main(threads))


def _eu_threads(lines: list[str]) -> list[tuple[int, list[Frame]]]:
    threads: list[tuple[int, list[Frame]]] = []
    for line in lines:
        if match := _EU_THREAD.match(line):
            if len(threads) >= MAX_THREADS:
                break
            threads.append((int(match["tid"]), []))
        elif threads and len(threads[-1][1]) < MAX_FRAMES and (match := _EU_FRAME.match(line[:2500])):
            function, file = (match["function"] or "??").strip(), match["file"] or "native"
            threads[-1][1].append(Frame(file=f"<{file}>", line=0, function=function[:400]))
        elif (
            threads
            and threads[-1][1]
            and (match := _EU_PLACE.match(line[:500]))
            and not _is_library(threads[-1][1][-1])
        ):
            threads[-1][1][-1] = replace(threads[-1][1][-1], file=f"<{match['file']}>", line=int(match["line"]))
    return threads


def _is_library(frame: Frame) -> bool:
    """Whether a frame's library is known, which says more than a line of C."""
    return frame.file != "<native>"


def read_pystack(text: str, source: str) -> tuple[int | None, StackSnapshot]:
    """The process, which is the thread of the lowest number, and its threads."""
    heads = list(_PYSTACK_HEAD.finditer(text))[:MAX_THREADS]
    pid = min((int(head["tid"]) for head in heads), default=None)
    threads = []
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        part = text[head.end() : following.start() if following else len(text)]
        frames = below_sleeps(_pystack_frames(part.split("\n")))
        is_main = int(head["tid"]) == pid
        threads.append(
            Thread(name=f"{head['name']} {head['tid']}", frames=frames, state=head["state"], is_main=is_main)
        )
    return pid, StackSnapshot(source=source, reason="pystack", threads=tuple(threads))


def _pystack_frames(lines: list[str]) -> list[Frame]:
    """Most recent call first, as everywhere here."""
    frames: list[Frame] = []
    for line in lines:
        if match := _PYSTACK_FRAME.match(line[:3000]):
            if len(frames) < 4 * MAX_FRAMES:
                frames.append(_pystack_frame(match))
        elif line.startswith("        ") and frames and not _is_of_c(frames[-1]) and not frames[-1].text:
            frames[-1] = replace(frames[-1], text=line.strip()[:300])
    return frames[::-1][:MAX_FRAMES]


def _pystack_frame(match: re.Match[str]) -> Frame:
    if match["kind"] == "Python":
        return Frame(file=match["file"], line=int(match["line"]), function=match["function"])
    library = _LIBRARY.search(match["function"])
    function = match["function"][: library.start()] if library else match["function"]
    file = library["file"] if library else match["file"]
    return Frame(file=f"<{file}>", line=0, function=function.removesuffix(" (inlined)")[:400])


def _is_of_c(frame: Frame) -> bool:
    return frame.file.startswith("<")


def _with_main(threads: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """With one thread only (`eu-stack -1`), that one is the main thread."""
    return (replace(threads[0], is_main=True),) if len(threads) == 1 else threads
