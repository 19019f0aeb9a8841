"""What the tools show: tables and JSON on stdout, progress on stderr. No I/O but to these two."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from tabulate import tabulate

from titan_ckpt.console.units import format_size

REDRAW_S = 0.1
BAR_WIDTH = 24


def write_json(value: Any, out: TextIO | None = None) -> None:
    """`value` as indented JSON on stdout. JSON has no infinity and no NaN: both are null."""
    (out or sys.stdout).write(json.dumps(_finite(value), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_text(text: str, out: TextIO | None = None) -> None:
    """`text` as lines on stdout."""
    (out or sys.stdout).write(text if text.endswith("\n") else text + "\n")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> str:
    """A plain table; the columns named in `right` are aligned right, nothing is guessed from the values.

    >>> print(format_table(["step", "size"], [[20, "1.2 MB"], [1200, "9 B"]], right=["step", "size"]))
      step    size
        20  1.2 MB
      1200     9 B
    """
    align = ["right" if header in right else "left" for header in headers]
    return tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align if rows else None)


def age_s(created: str, now_s: float) -> float | None:
    """Seconds since an ISO 8601 time, None where there is none."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return now_s - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class Progress:
    """One line on stderr, redrawn in place, only where stderr is a terminal; thread-safe; a context manager."""

    def __init__(
        self, label: str, total_bytes: int, *, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._total, self._out, self._clock = label, total_bytes, out or sys.stderr, clock
        self._is_shown = self._out.isatty()
        self._lock = threading.Lock()
        self._started, self._drawn_at = clock(), float("-inf")
        self.done_bytes = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def add(self, size_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self.done_bytes += size_bytes
            if self._is_shown and self._clock() - self._drawn_at >= REDRAW_S:
                self._drawn_at = self._clock()
                self._out.write(f"\r\x1b[K{self._line()}")
                self._out.flush()

    def _line(self) -> str:
        share = min(self.done_bytes / self._total, 1.0) if self._total else 1.0
        filled = int(share * BAR_WIDTH)
        rate = self.done_bytes / max(self._clock() - self._started, 1e-6)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        return f"{self._label} [{bar}] {share:4.0%}  {format_size(self.done_bytes)}  {format_size(rate)}/s"
