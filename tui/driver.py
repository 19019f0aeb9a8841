"""The keyboard and the clipboard of a real terminal: keys that came before the screens are kept, its answers are no keys."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Any, ClassVar, TextIO

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

_TICK_S = 0.1
_HELD_S = 1.0
_READ_BYTES = 4096
# What terminals answer to questions and nobody types: OSC and DCS strings, CSI with a private mark. Textual reads mode reports.
_ANSWER = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[P_^X][^\x1b]*\x1b\\|\x1b\[[?>=](?!\d+;\d\$y)[\d;:]*[ -/]*[@-~]"
)
_BEGUN = re.compile(r"\x1b(?:\][^\x07\x1b]*\x1b?|[P_^X][^\x1b]*\x1b?|\[(?:[?>=][\d;:]*[ -/]*)?)\Z")
_PASTE_START, _PASTE_END = "\x1b[200~", "\x1b[201~"
_KEY = 2  # characters: `alt` with a key is as long as the shortest beginning of an answer


_COPY = "\x1b]52;"  # OSC 52: the text for the clipboard, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_SCREEN_BYTES = 240  # GNU screen drops a DCS string that is longer than 256 bytes


def passed_on(copy: str) -> str:
    """What makes tmux or GNU screen pass `copy`, an OSC 52, on to the terminal around them; "" outside of both.

    Both take a DCS string for the terminal: tmux with a name and each escape doubled, if `allow-passthrough` is on
    (https://github.com/tmux/tmux/wiki/FAQ), screen as it is, in short pieces. `TMUX` and `STY` are not passed over ssh, TERM is.
    """
    name = os.environ.get("TERM", "")
    if os.environ.get("TMUX") or name.startswith("tmux"):
        return "\x1bPtmux;" + copy.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    if os.environ.get("STY") or name.startswith("screen"):
        pieces = (copy[at : at + _SCREEN_BYTES] for at in range(0, len(copy), _SCREEN_BYTES))
        return "".join(f"\x1bP{piece}\x1b\\" for piece in pieces)
    return ""


class Sieve:
    """Takes the answers of the terminal out of what it sends, also those that come in pieces: as keys they would be commands."""

    def __init__(self) -> None:
        self._held, self._held_since_s = "", 0.0

    def passed(self, text: str, now_s: float) -> str:
        """What was typed. A piece that may become an answer is held for a second; then it was a key, or is dropped."""
        text = _ANSWER.sub("", self._held + text)
        begun = _BEGUN.search(text)
        if begun is None:
            self._held = ""
            return text
        if begun.group() != self._held:
            self._held, self._held_since_s = begun.group(), now_s
        elif now_s - self._held_since_s > _HELD_S:
            self._held = ""
            return text if len(begun.group()) == _KEY else text[: begun.start()]
        return text[: begun.start()]


class Pastes:
    """Takes the escapes out of pasted text: Textual would end the paste at one, and what follows would be commands."""

    def __init__(self) -> None:
        self._held, self._is_inside = "", False

    def passed(self, text: str) -> str:
        """The text, without escapes between the marks of a paste. The start of a mark is held until more, or "", comes."""
        is_quiet, text, self._held = not text, self._held + text, ""
        found: list[str] = []
        while text:
            mark = _PASTE_END if self._is_inside else _PASTE_START
            part, end, text = text.partition(mark)
            if not end and (self._is_inside or not is_quiet):
                begun = next((n for n in range(len(mark) - 1, 0, -1) if part.endswith(mark[:n])), 0)
                part, self._held = part[: len(part) - begun], part[len(part) - begun :]
            found += [part.replace("\x1b", "") if self._is_inside else part, end]
            self._is_inside ^= bool(end)
        return "".join(found)


class _Screen:
    """The terminal's file. What is written to one that is gone is dropped: SIGHUP ends the program."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with _unless_gone():
            self._file.write(text)

    def flush(self) -> None:
        with _unless_gone():
            self._file.flush()


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class TerminalDriver(LinuxDriver):
    """Textual's driver with the sieve. Bytes that are not UTF-8, such as a letter typed in a Latin-1 terminal, end nothing."""

    typed_before: ClassVar[bytes] = b""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._file: Any = _Screen(self._file)

    def write(self, data: str) -> None:
        """Write to the terminal; a copy also in the form that a multiplexer passes on, as not each keeps copies by itself."""
        super().write(data)
        if data.startswith(_COPY) and (wrapped := passed_on(data)):
            super().write(wrapped)

    def _sigcont_application(self, *_: object) -> None:
        """Go on after ctrl+z, which took the screens down, or after a stop from outside (`kill -STOP`), which did not.

        After the latter Textual would start a second pair of its threads, and then not end. In the background nothing is done:
        `fg` sends the signal again.
        """
        is_up = self._key_thread is not None and not self._must_signal_resume
        if not is_up:
            super()._sigcont_application()
        elif self._auto_restart and self._has_terminal():
            with contextlib.suppress(RuntimeError):  # the loop has ended: the terminal is gone
                self._loop.call_soon_threadsafe(self._begin_again)  # a signal interrupts what holds locks

    def _begin_again(self) -> None:
        """Set the terminal up and paint anew: a shell has used it meanwhile."""
        self.suspend_application_mode()
        self._must_signal_resume = True
        self.resume_application_mode()

    def _has_terminal(self) -> bool:
        """Whether the program may write: it is no background job."""
        try:
            return os.tcgetpgrp(self.fileno) == os.getpgrp()
        except OSError:
            return True  # no job control at all

    def run_input_thread(self) -> None:
        """Pass on what is typed until the screens end or are suspended."""
        parser, sieve, pastes = XTermParser(self._debug), Sieve(), Pastes()
        decode = getincrementaldecoder("utf-8")("replace").decode
        data, type(self).typed_before = self.typed_before, b""
        while not self.exit_event.is_set():
            typed = sieve.passed(pastes.passed(decode(data)), time.monotonic())
            for event in parser.feed(typed) if typed else ():
                self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
            data = os.read(self.fileno, _READ_BYTES) if select.select([self.fileno], [], [], _TICK_S)[0] else b""


def driver_after(typed: bytes) -> type[TerminalDriver]:
    """The driver of a terminal in which `typed` was read before the screens stood."""

    class Driver(TerminalDriver):
        typed_before = typed

    return Driver
