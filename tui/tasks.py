"""Run work in background threads. Quitting never waits for a slow store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textual.app import App
from textual.message import Message

from titan_ckpt.console import background
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import TitanError


@dataclass
class Finished(Message):
    """A task ended with `result`, or failed with `error`."""

    what: str
    result: Any
    error: Exception | None
    done: Callable[[Any], None]
    failed: Callable[[str], None]


@dataclass
class TaskOutput(Message):
    """Output of a running task; `show` is called with it on the UI thread."""

    value: Any
    show: Callable[[Any], None]


class ByteProgress:
    """Tells how much of a long read is done, at each percent."""

    def __init__(self, tell: Callable[[str], object], total_bytes: int = 0) -> None:
        self._tell, self._total, self._read, self._percent = tell, total_bytes, 0, -1

    def add(self, size_bytes: int) -> None:
        """Add bytes that were read."""
        self.show(self._read + size_bytes, self._total)

    def show(self, read_bytes: int, total_bytes: int) -> None:
        """Set how many bytes were read, and of how many."""
        self._read, self._total = min(read_bytes, total_bytes), total_bytes
        percent = 100 * self._read // max(total_bytes, 1)
        if percent > self._percent:
            self._percent = percent
            self._tell(f"{format_size(self._read)} of {format_size(total_bytes)} ({percent}%)")


def start(
    app: App[Any], what: str, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[str], None]
) -> None:
    """Run `work` in a thread, then post Finished to the app."""

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 (passed on: shown if expected, raised on the UI thread if not)
            error = caught
        app.post_message(Finished(what, result, error, done, failed))

    background.start(what, run)


def finish(message: Finished) -> None:
    """Call the task's callbacks on the UI thread. Expected errors become text, others are raised."""
    if message.error is None:
        message.done(message.result)
    elif isinstance(message.error, TitanError | OSError):
        message.failed(str(message.error))
    else:
        raise message.error
