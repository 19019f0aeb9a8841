"""Reads the keyboard of a real terminal: also keys that came before the screens, but no answers of the terminal, however late."""

from __future__ import annotations

import os
import re
import select
import time
from codecs import getincrementaldecoder
from typing import ClassVar

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
_KEY = 2  # characters: `alt` with a key is as long as the shortest beginning of an answer


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


class TerminalDriver(LinuxDriver):
    """Textual's driver with the sieve. Bytes that are not UTF-8, such as a letter typed in a Latin-1 terminal, end nothing."""

    typed_before: ClassVar[bytes] = b""

    def run_input_thread(self) -> None:
        """Pass on what is typed until the screens end or are suspended."""
        parser, sieve, decode = XTermParser(self._debug), Sieve(), getincrementaldecoder("utf-8")("replace").decode
        data, type(self).typed_before = self.typed_before, b""
        while not self.exit_event.is_set():
            for event in parser.feed(typed) if (typed := sieve.passed(decode(data), time.monotonic())) else ():
                self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
            data = os.read(self.fileno, _READ_BYTES) if select.select([self.fileno], [], [], _TICK_S)[0] else b""


def driver_after(typed: bytes) -> type[TerminalDriver]:
    """The driver of a terminal in which `typed` was read before the screens stood."""

    class Driver(TerminalDriver):
        typed_before = typed

    return Driver
