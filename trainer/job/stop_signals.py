"""SIGTERM and SIGINT request a last checkpoint; all ranks stop after the same step.

A signal only sets a flag. At the end of every step one small reduction on the CPU finds the largest stop code of all ranks, so
that no rank stops alone. The last save then has `grace_s`, enforced by a timer.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopCode(IntEnum):
    """Why a rank wants to stop; the largest code of all ranks counts."""

    NONE = 0
    TIME_LIMIT = 1
    SIGNAL = 2


class StopRequest:
    """Whether this rank wants to stop, and why. A context manager that installs and restores the signal handlers.

    If the context is still open `grace_s` after the request, a timer thread calls `on_late` with the limits that ran out.
    """

    def __init__(
        self, *, max_seconds: float = 0.0, grace_s: float = 0.0, on_late: Callable[[str], None] | None = None
    ) -> None:
        self._max_seconds, self._grace_s, self._on_late = max_seconds, grace_s, on_late
        self._deadline = time.monotonic() + max_seconds if max_seconds else None
        self._signum = 0
        self._timers: list[threading.Timer] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signum in HANDLED:
            self._previous[signum] = signal.signal(signum, self._handle)
        if self._max_seconds:
            self._limit(self._max_seconds + self._grace_s, f"train.max_seconds = {self._max_seconds:g}")
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def request(self, signum: int) -> None:
        """Ask to stop after this step. The recorder's thread calls it too, for a main thread that cannot run signal handlers."""
        if not self._signum:
            self._signum = signum
            self._limit(self._grace_s, signal.Signals(signum).name)

    @property
    def code(self) -> StopCode:
        """This rank's stop code; a signal outranks the time limit."""
        if self._signum:
            return StopCode.SIGNAL
        is_over = self._deadline is not None and time.monotonic() > self._deadline
        return StopCode.TIME_LIMIT if is_over else StopCode.NONE

    @property
    def name(self) -> str:
        """The signal's name; empty if this rank received none."""
        return signal.Signals(self._signum).name if self._signum else ""

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.request(signum)

    def _limit(self, seconds: float, what: str) -> None:
        if self._on_late is not None:
            timer = threading.Timer(seconds, self._on_late, [f"{what} and then save.grace_s = {self._grace_s:g}"])
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
