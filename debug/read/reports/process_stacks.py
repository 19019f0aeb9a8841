"""Stack dumps of whole processes by py-spy, gdb and others, of one process or of many in one file; the process says who it is.

Formats: `py-spy dump` (its src/dump.rs: `Process 4711: python train.py`, then threads) and `py-spy dump --json`;
`ray stack` (ray/scripts/scripts.py) puts `Stack dump for` and the line of `ps` before each process; `gdb.py` reads
gdb's, `elf_stacks.py` those of eu-stack and pystack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titan_ckpt.debug.incident.records import Frame, StackSnapshot, Thread
from titan_ckpt.debug.read.reports.elf_stacks import is_eu_stack, is_pystack, read_eu_stacks, read_pystack
from titan_ckpt.debug.read.reports.gdb import is_gdb, read_gdb
from titan_ckpt.debug.read.stacks import bracketed, parse_stacks
from titan_ckpt.parsing.json_values import JsonValue

MAX_THREADS = 512
_HEAD = 4096  # characters that show who wrote a text
_PROCESS = re.compile(r"^Process (?P<pid>\d{1,9}): (?P<command>.{0,4000})$", re.MULTILINE)
_HEADING = re.compile(
    r"^(?:\W{0,8}|[=#>*+-]{2,40} .{0,80}?\b)(?:[Gg]lobal[ _-]?)?[Rr]ank[ _:=#-]{0,3}(?P<rank>\d{1,6})\b.{0,80}$",
    re.MULTILINE,
)
_LOOK_BACK = 300  # characters before a process in which a script may have put a heading
_PLACE = re.compile(r"--local[-_]rank[= ](?P<local>\d{1,6})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """The stacks of one process; `pid`, `rank` and `local_rank` as far as the dump shows them."""

    stacks: StackSnapshot
    pid: int | None = None
    rank: int | None = None
    local_rank: int | None = None


def is_process_stacks(head: str) -> bool:
    """Whether a text begins as py-spy, gdb, eu-stack or pystack writes one."""
    first = head.lstrip()
    return bool(
        (
            (re.match(r"Process \d{1,9}: |Stack dump for \w", first) or _HEADING.match(first))
            and _PROCESS.search(first)
            and re.search(r"^(?:Python v\d|Thread \d)", first, re.MULTILINE)
        )
        or is_gdb(head)
        or is_eu_stack(head)
        or is_pystack(head)
    )


def read_process_stacks(text: str, source: str) -> Iterator[ProcessStacks]:
    """One entry per process."""
    heads = list(_PROCESS.finditer(text))
    if not heads:
        for pid, stacks in _native_stacks(text, source):
            yield ProcessStacks(stacks=stacks, pid=pid)
        return
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        part = text[head.end() : following.start() if following else len(text)]
        place, rank = _PLACE.search(head["command"]), _rank_above(text, head.start())
        yield ProcessStacks(
            stacks=parse_stacks(part, source, "pyspy"), pid=int(head["pid"]), rank=rank,
            local_rank=int(place["local"]) if place else None,
        )  # fmt: skip


def _native_stacks(text: str, source: str) -> Iterable[tuple[int | None, StackSnapshot]]:
    if is_eu_stack(text[:_HEAD]):
        return read_eu_stacks(text, source)
    return [read_pystack(text, source) if is_pystack(text[:_HEAD]) else read_gdb(text, source)]


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
