"""Processes that a signal ended, as they, their libraries and the system write it: CPython's fault handler, glibc, glog, UCX, the
kernel, shells and systemd."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Values = dict[str, str]

MAX_CRASH_LINES = 2_000
_FATAL_HEAD = "Fatal Python error: "
_CRASH = re.compile(
    rf"{_FATAL_HEAD}|Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!"
    r"|(?:Current thread|Thread) 0x[0-9a-f]+ .{0,80}\(most recent call first\)"
)


@dataclass(slots=True)
class CrashText:
    """The stacks that CPython's fault handler wrote into a log (Modules/faulthandler.c), for a signal or for a timer; the newest
    begins at line `newest`. `has_steps`: the rank had logged steps before; without these, steps that follow may have been held
    back, in the buffer of a pipe. `outlived`: the lines of threads of stacks after which the rank went on."""

    lines: list[str] = field(default_factory=list)
    newest: int = 0
    has_steps: bool = False
    outlived: set[str] = field(default_factory=set)

    def take(self, number: int, text: str, *, has_steps: bool) -> None:
        """Account for one line of the log."""
        is_head = "Python error" in text or "imeout (" in text or "hread 0x" in text
        match = _CRASH.search(text) if is_head else None
        self.newest = number if match is not None else self.newest
        if self.lines and len(self.lines) < MAX_CRASH_LINES:
            self.lines.append(text)
        elif not self.lines and match is not None:
            self.lines, self.has_steps = [text[match.start() :]], has_steps

    def go_on(self) -> None:
        """The rank went on after these stacks: a timer wrote them, or somebody asked."""
        if self.lines and not self.lines[0].startswith(_FATAL_HEAD):
            self.outlived.update(line.strip() for line in self.lines if "hread 0x" in line)
            self.lines = []

    def is_outlived_by(self, other: CrashText) -> bool:
        """Whether the same rank wrote these stacks to another log, too, and went on there."""
        threads = {line.strip() for line in self.lines if "hread 0x" in line}
        return self is not other and not other.lines and bool(threads) and threads <= other.outlived


SIGNAL_WORDS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Illegal instruction": "SIGILL", "Floating point exception": "SIGFPE",
    "general protection fault": "SIGSEGV", "segfault at": "SIGSEGV",
}  # fmt: skip
_FATAL = re.compile(r"Fatal Python error: (?P<error>.{1,200})$")
# What glibc writes before it aborts: assert/assert.c, debug/fortify_fail.c, malloc/malloc.c.
GLIBC_WORDS = (
    "Assertion `", "*** stack smashing detected ***", "*** buffer overflow detected ***", "double free or corruption",
    "free(): ", "malloc(): ", "malloc_consolidate(): ", "munmap_chunk(): ", "realloc(): ", "corrupted size vs. prev_size",
    "corrupted double-linked list",
)  # fmt: skip
_GLIBC = re.compile(
    r"(?:\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*: terminated|double free or corruption \(\S{1,12}\)"
    r"|(?:free|malloc|malloc_consolidate|munmap_chunk|realloc)\(\): (?:invalid|corrupted|memory corruption|unaligned|mismatching|"
    r"double free|unsorted)\b.{0,80}|corrupted (?:size vs\. prev_size|double-linked list).{0,40}"
    r"|\S{1,200}: \S{1,300}:\d{1,7}: .{1,1000}: Assertion `.{1,1000}' failed\.)$"
)


def glibc(text: str) -> Values | None:
    """Memory that is damaged, or an assertion of C that fails: then the process ends with SIGABRT."""
    match = _GLIBC.match(text.strip()[:3000])
    return {"error": match.group(0)[:200], "signal": "SIGABRT"} if match else None


_OWN_PID = re.compile(
    r"\b(?P<program>[\w.-]{1,40})\[(?P<pid>\d{1,9})\]:? (?:segfault|general protection|trap)"
    r"|\*\*\* SIG\w+ .{0,60}received by PID (?P<by>\d{1,9})"
)


_BY_PID = re.compile(r"\*\*\* (?P<signal>SIG[A-Z]{3,6}) \(@0x[0-9a-f]{1,16}\) received by PID (?P<pid>\d{1,9})")
_CORE = re.compile(r"Process (?P<pid>\d{1,9}) \([^()]{1,40}\) of user \d{1,10} (?:dumped core|terminated abnormally)")


def glog(text: str) -> Values | None:
    """glog's signal handler (src/signalhandler.cc): `*** SIGSEGV (@0x0) received by PID 4711 (TID 0x7f) from PID 0; ...`."""
    match = _BY_PID.search(text)
    is_end = match is not None and match["signal"] not in ("SIGTERM", "SIGABRT")
    return {"error": match["signal"], "signal": match["signal"], "pid": match["pid"]} if match and is_end else None


def dumped(text: str) -> Values | None:
    """systemd-coredump's record (src/coredump/coredump.c): `Process 4711 (python) of user 1000 dumped core.`"""
    match = _CORE.search(text)
    return {"pid": match["pid"]} if match else None


def fatal(text: str) -> Values | None:
    """The interpreter's fatal error, or a word of a signal with the process that it ended."""
    if match := _FATAL.search(text):
        return {"error": match["error"]}
    word = next((word for word in SIGNAL_WORDS if word in text), None)
    if word is None:
        return None
    match = _OWN_PID.search(text)
    pid = (match["pid"] or match["by"]) if match else ""
    of_program = foreign(match["program"]) if match else {}
    return {"error": word, "signal": SIGNAL_WORDS[word], **({"pid": pid} if pid else {}), **of_program}


# What the kernel calls the processes of training: the name of the main thread, of 15 characters.
_OF_TRAINING = re.compile(
    r"(?i)py|torch|pt_|train|tune|rank|ray|main|worker|speed|accelerate|megatron|nemo|launch|job|sh$"
)


def foreign(program: str | None) -> Values:
    """The name of a process that is no rank's, whatever its number: a child's, or one of another host."""
    return {} if program is None or _OF_TRAINING.search(program) else {"program": program}
