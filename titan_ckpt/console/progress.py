"""Progress on stderr: one line drawn by rich on a terminal, or events for programs."""

from __future__ import annotations

import sys
import threading
import time
from typing import IO, TYPE_CHECKING, TextIO

from titan_ckpt.console.escapes import escape_line, escape_text
from titan_ckpt.console.output import are_events_wanted, is_quiet, write_event, write_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REDRAW_S = 0.1
EVENT_S = 1.0
BAR_WIDTH = 24


class ProgressLine:
    """Counts bytes, or what `unit` says, towards `total`; shows the share, the rate and the time left. Thread-safe.

    A context manager: the line is erased at the end. Nothing is written unless `stream` (default: stderr) is a terminal. Where
    events are wanted there is one at the start, one a second, and one at the end.
    """

    def __init__(
        self,
        label: str,
        total: int = 0,
        *,
        unit: str = "bytes",
        is_shown: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._stream = stream or sys.stderr
        is_wanted = is_shown and not is_quiet()
        self._has_events = is_wanted and are_events_wanted()
        self._is_shown = is_wanted and not self._has_events and self._stream.isatty()
        self._lock = threading.Lock()
        self._drawn: tuple[Progress, TaskID] | None = None
        self._drawn_at = float("-inf")
        self._began_at = time.monotonic()
        self.done = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(is_finished=kind is None)

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

    def close(self, *, is_finished: bool = True) -> None:
        """Erase the line; the last event says whether all is done."""
        if self._has_events:
            self._write_event(is_finished=is_finished)
            self._has_events = False
        if self._drawn is not None:
            self._drawn[0].stop()
            self._drawn = None

    def _write_event(self, *, is_finished: bool = False) -> None:
        seconds = round(time.monotonic() - self._began_at, 3)
        write_event(
            "progress", what=self._label, unit=self._unit, done=self.done, total=self._total or None, seconds=seconds,
            is_finished=is_finished,
        )  # fmt: skip

    def _draw(self) -> None:
        if self._has_events and time.monotonic() - self._drawn_at >= EVENT_S:
            self._drawn_at = time.monotonic()
            self._write_event()
        if not self._is_shown or not self._total:
            return
        if self._drawn is None:
            progress = _rich_progress(self._stream, is_bytes=self._unit == "bytes")
            self._drawn = progress, progress.add_task(escape_line(self._label), total=self._total, completed=self.done)
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
