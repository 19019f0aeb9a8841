"""A progress line on stderr, drawn only for a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from titan_ckpt.console.units import format_duration, format_size

REDRAW_S = 0.1


class Bar:
    """Counts bytes towards `total_bytes`; a context manager that leaves a clean line."""

    def __init__(self, verb: str, total_bytes: int) -> None:
        self._verb, self._total, self._done = verb, total_bytes, 0
        self._started = time.monotonic()
        self._drawn = 0.0
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        if self._is_shown and now - self._drawn > REDRAW_S:
            self._drawn = now
            left_s = (now - self._started) * max(0, self._total - self._done) / max(1, self._done)
            sys.stderr.write(
                f"\r\x1b[K{self._verb} {format_size(self._done)} of {format_size(self._total)}, {format_duration(left_s)} left"
            )
            sys.stderr.flush()
