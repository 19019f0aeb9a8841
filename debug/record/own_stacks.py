"""This process's own stacks as text, in faulthandler's form."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from types import FrameType

from titan_ckpt.location import redact_text


def all_stacks() -> list[str]:
    """Every thread's stack, in faulthandler's form, innermost call first; the main thread last as there."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me, main = threading.get_ident(), threading.main_thread().ident
    lines = []
    for ident, top in sorted(sys._current_frames().items(), key=lambda item: item[0] == main):
        head = "Current thread" if ident == me else "Thread"
        label = "MainThread" if ident == main else names.get(ident, "?")
        lines.append(f"{head} 0x{ident:016x} [{label}] (most recent call first):")
        frame: FrameType | None = top
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        lines.append("")
    return lines


_PLACE = re.compile(r'^  File "([^"]+)", line (\d+) in ')


def with_source(lines: list[str]) -> bytes:
    """The same stacks with `  | source line` behind the main thread's frames."""
    is_main, found = False, []
    for line in lines:
        is_main = "[MainThread]" in line if line.startswith(("Thread", "Current")) else is_main
        match = _PLACE.match(line) if is_main else None
        text = redact_text(linecache.getline(match.group(1), int(match.group(2))).strip()) if match else ""
        found.append(f"{line}  | {text}" if text else line)
    return "\n".join(found).encode("utf-8", "replace")
