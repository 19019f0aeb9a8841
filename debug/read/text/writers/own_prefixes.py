"""Prefixes that no rule knows, by the tracebacks that they stand before."""

from __future__ import annotations

from titan_ckpt.debug.read.text.prefixes import Line
from titan_ckpt.debug.read.text.writers.log_records import TRACEBACK

_MOST_PREFIX, _MOST_PREFIXES = 80, 64


class OwnPrefixes:
    """Prefixes that no rule knows: what stands before a traceback's first line and again before its second one."""

    def __init__(self) -> None:
        self._seen, self._known = set[str](), set[str]()

    def peel(self, line: Line) -> tuple[str, bool]:
        """Take such a prefix off a line; it, or "", and whether its traceback began with the line before."""
        at = line.text.find(f"{TRACEBACK}:", 0, _MOST_PREFIX + len(TRACEBACK))
        if at > 0 and len(self._seen) < _MOST_PREFIXES:
            self._seen.add(line.text[:at])
        if not self._seen:
            return "", False
        begun = next((own for own in self._seen - self._known if line.text.startswith(f'{own}  File "')), "")
        self._known |= {begun} - {""}
        own = begun or next((own for own in self._known if line.text.startswith(own)), "")
        line.text = line.text[len(own) :]
        return own, bool(begun)
