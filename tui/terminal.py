"""What the terminal is: its background, asked before the screens start, and the theme that fits it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from pathlib import Path

from rich.console import Console

from titan_ckpt.tui import themes

ANSWER_S = 0.25
_ASK = b"\x1b]11;?\x1b\\\x1b[c"  # the background, then what every terminal answers: no need to wait for silence
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_LAST = re.compile(rb"\x1b\[\?[\d;]*c")
UNUSABLE = ("dumb", "unknown")  # values of TERM: the cursor cannot be moved


def fitting_theme(answer: float | None) -> str:
    """The theme that fits the terminal: light or dark, with the terminal's own colours if it has 16 or fewer, or shall have none.

    `answer`: the lightness of the background as the terminal says, else COLORFGBG counts (rxvt and Konsole set it).
    """
    # As Rich, which draws, sees TERM and COLORTERM.
    has_few = Console(force_terminal=True).color_system in (None, "standard")
    is_light = answer > 0.5 if answer is not None else os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    if has_few or "NO_COLOR" in os.environ:
        return "ansi-light" if is_light else "ansi-dark"
    return (themes.LIGHT if is_light else themes.DARK).name


def ask_background(timeout_s: float = ANSWER_S) -> tuple[float | None, bytes]:
    """Lightness of the terminal's background, 0 to 1, or None if it does not say; and all bytes that came, with what was typed.

    xterm's OSC 11 (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html). If keys were typed before, nothing is asked.
    `driver.Sieve` takes answers out of the bytes, also those that come later.
    """
    try:
        descriptor = sys.stdin.fileno()
        is_terminal = os.isatty(descriptor) and sys.stdout.isatty() and bool(os.environ.get("TERM"))
        if not is_terminal or select.select([descriptor], [], [], 0)[0]:
            return None, b""
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        return None, b""
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        answer = _answer(descriptor, timeout_s)
        return lightness(answer), answer
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _answer(descriptor: int, timeout_s: float) -> bytes:
    os.write(sys.stdout.fileno(), _ASK)
    answer, deadline = b"", time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0 and not _LAST.search(answer):
        if select.select([descriptor], [], [], left)[0]:
            answer += os.read(descriptor, 256)
    return answer


def has_shell() -> bool:
    """Whether a shell with job control started the program: the parent of its process group is in the same session.

    POSIX calls a group without such a parent orphaned: nobody continues it once it has stopped.
    """
    leader = os.getpgrp()
    try:
        stat = Path(f"/proc/{leader}/stat").read_text() if leader != os.getpid() else ""
        parent = int(stat.rpartition(")")[2].split()[1]) if stat else os.getppid()
        return parent > 0 and os.getsid(parent) == os.getsid(0)
    except (OSError, ValueError, IndexError):
        return False


def lightness(answer: bytes) -> float | None:
    """Lightness of the colour in a terminal's answer, 0 to 1.

    >>> lightness(b"\\x1b]11;rgb:ffff/ffff/ffff\\x1b\\\\"), lightness(b"\\x1b[?6c")
    (1.0, None)
    """
    found = _COLOUR.search(answer)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / float(16 ** len(part) - 1) for part in found.groups())
    return round(0.2126 * red + 0.7152 * green + 0.0722 * blue, 3)
