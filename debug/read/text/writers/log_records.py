"""Whose a traceback without a prefix is: that of the log record right before it.

`logging.exception(text)` writes the prefix of its format once, before `text`; the traceback follows in the same write, all of its
lines plain (CPython, Lib/logging/__init__.py: `Formatter.format` and `StreamHandler.emit`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from titan_ckpt.debug.read.text.error_kinds import kind_of_error

TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LEVELS = ("ERROR", "CRITICAL", "FATAL", "EXCEPTION")
_OF_ERRORS = re.compile(rf"\b(?:{'|'.join(_LEVELS)})\b")
_HEAD = 200

Named = tuple[str, str, int]  # a writer, by the prefixes of its line


@dataclass(slots=True)
class LogRecords:
    """Follows one file line by line. Where a record of an error stands alone, others may too, and then a traceback behind one may
    be another process's: from there on none is given to anybody."""

    _record: Named | None = None  # who wrote the line before, if that is a record of an error
    _owner: Named | None = None  # of the traceback that is being read
    _is_chained: bool = False
    _has_lone: bool = False

    def owner(self, text: str, named: Named | None, *, is_dated: bool) -> Named | None:
        """Who wrote a line, of which `named` is who its own prefixes name; None where nothing tells."""
        if named is not None or is_dated:
            self._has_lone = self._has_lone or self._record is not None
            self._record, self._owner = named if _announces(text) else None, None
            return named
        if text.startswith(TRACEBACK):
            if self._record is not None:
                self._owner, self._record = None if self._has_lone else self._record, None
            elif not self._is_chained:
                self._owner = None
        elif self._record is not None:
            self._record, self._has_lone = None, True
        if text.strip():
            self._is_chained = text.startswith(CHAINED)
        return self._owner


def _announces(text: str) -> bool:
    """Whether a line is a record of an error that may have a traceback: of one that its peers caused it often has none."""
    head = text[:_HEAD]
    is_record = any(level in head for level in _LEVELS) and _OF_ERRORS.search(head) is not None
    return is_record and TRACEBACK not in text and not kind_of_error(head).is_communication
