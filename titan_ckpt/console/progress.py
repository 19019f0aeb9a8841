"""One progress line on stderr, drawn by rich and only on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import IO, TYPE_CHECKING, TextIO

from titan_ckpt.console.escapes import escape_line, escape_text
from titan_ckpt.console.output import is_quiet, write_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REDRAW_S = 0.1
BAR_WIDTH = 24


class ProgressLine:
    """Counts bytes or items towards `total`; shows the share, the rate and the time left. Thread-safe.

    A context manager: the line is erased at the end. Nothing is written unless `stream` (default: stderr) is a terminal.
    """

    def __init__(
        self,
        label: str,
        total: int = 0,
        *,
        is_bytes: bool = True,
        is_shown: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._label, self._total, self._is_bytes = escape_line(label), total, is_bytes
        self._stream = stream or sys.stderr
        self._is_shown = is_shown and self._stream.isatty() and not is_quiet()
        self._lock = threading.Lock()
        self._drawn: tuple[Progress, TaskID] | None = None
        self._drawn_at = float("-inf")
        self.done = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, amount: int) -> None:
        """Count `amount` more as done."""
        with self._lock:
            self.done += amount
            self._draw()

    def show(self, done: int, total: int) -> None:
        """Set how much is done, and of how much."""
        with self._lock:
            self.done, self._total = done, total
            self._draw()

    def print(self, text: str) -> None:
        """Write `text` above the line."""
        if self._drawn is None:
            write_text(text, self._stream)
            self._stream.flush()
        else:
            self._drawn[0].console.out(escape_text(text), highlight=False)

    def close(self) -> None:
        """Erase the line."""
        if self._drawn is not None:
            self._drawn[0].stop()
            self._drawn = None

    def _draw(self) -> None:
        if not self._is_shown or not self._total:
            return
        if self._drawn is None:
            progress = _rich_progress(self._stream, is_bytes=self._is_bytes)
            self._drawn = progress, progress.add_task(self._label, total=self._total, completed=self.done)
            progress.start()
        progress, task = self._drawn
        now = time.monotonic()
        is_due = now - self._drawn_at >= REDRAW_S
        self._drawn_at = now if is_due else self._drawn_at
        progress.update(task, completed=self.done, total=self._total, refresh=is_due)


def _rich_progress(stream: IO[str], *, is_bytes: bool) -> Progress:
    """A line that is redrawn by the caller, without a thread of its own."""
    from rich.console import Console  # 50 ms, which a command without a terminal need not pay
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = [DownloadColumn(), TransferSpeedColumn()] if is_bytes else [MofNCompleteColumn()]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        TaskProgressColumn(),
        *counts,
        TimeRemainingColumn(),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        speed_estimate_period=3600,  # a training step may take longer than rich's 30 s
    )
