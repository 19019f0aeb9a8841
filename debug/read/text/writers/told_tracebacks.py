"""Tracebacks of ranks in what others write: in the rows of torchrun's table, and in a CheckpointException.

Sources: torch/distributed/elastic/multiprocessing/errors/__init__.py (`_format_failure` indents a traceback by two) and
torch/distributed/checkpoint/api.py (`CheckpointException.__str__` gives the traceback of each rank that failed).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from titan_ckpt.debug.read.text.prefixes import Line
from titan_ckpt.debug.read.text.schedulers.process_ends import Ending
from titan_ckpt.debug.read.text.writers.log_records import TRACEBACK, Named

_ROW = f"  traceback : {TRACEBACK}:"
_OF_FAILED = re.compile(r"Traceback \(most recent call last\): \(RANK (?P<rank>\d{1,6})\)$")


@dataclass(slots=True)
class ToldTracebacks:
    """Follows one file line by line."""

    _row: Named | None = None
    _failed: Named | None = None

    def owner(self, line: Line, endings: Sequence[Ending]) -> Named | None:
        """The rank whose traceback a line is a part of, if another process wrote it; the line is made that of a plain traceback.
        `endings`: those read so far, of which the last is that of the row."""
        if self._failed is not None:
            failed, self._failed = self._failed, self._failed if line.text.startswith("  ") else None
            return failed
        if line.text.startswith(TRACEBACK) and (match := _OF_FAILED.match(line.text)):
            self._failed, line.text = ("told", "", int(match["rank"])), f"{TRACEBACK}:"
            return self._failed
        row = endings[-1] if endings and line.text.startswith(_ROW) else None
        if row is not None and row.rank is not None:
            self._row, line.text = ("told", "", row.rank), f"{TRACEBACK}:"
        elif self._row is not None:
            self._row = self._row if line.text.startswith("  ") else None
            line.text = line.text[2:] if self._row else line.text
        return self._row
