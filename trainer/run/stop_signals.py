"""SIGTERM and SIGINT ask for a last checkpoint; all ranks stop after the same step.

A signal only sets a flag. At the end of every step the ranks exchange their flags (and a few other numbers of which the largest
counts) in one small reduction on the CPU, so that nobody stops alone. What comes after has `grace_s`; a timer sees to it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

T = TypeVar("T")
NOTHING, TIME_LIMIT, SIGNAL = 0, 1, 2
REASONS = {TIME_LIMIT: "time limit", SIGNAL: "signal"}
HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this rank wants to stop, and why. A context manager that holds the signal handlers.

    `on_late` is called from a thread, with what ran out, when the rank is still inside `grace_s` after it was asked to stop.
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
        """Stop after this step; also called by the recorder's thread while Python itself is stuck."""
        if not self._signum:
            self._signum = signum
            self._limit(self._grace_s, signal.Signals(signum).name)

    @property
    def code(self) -> int:
        """NOTHING, TIME_LIMIT or SIGNAL; the larger one counts."""
        if self._signum:
            return SIGNAL
        return TIME_LIMIT if self._deadline is not None and time.monotonic() > self._deadline else NOTHING

    @property
    def name(self) -> str:
        """The signal's name; empty when there was none on this rank."""
        return signal.Signals(self._signum).name if self._signum else ""

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.request(signum)

    def _limit(self, seconds: float, what: str) -> None:
        if self._on_late is not None:
            timer = threading.Timer(seconds, self._on_late, [f"{what} and then save.grace_s = {self._grace_s:g}"])
            timer.daemon = True
            timer.start()
            self._timers.append(timer)


class Agreement:
    """The largest of each number over all ranks, on a gloo group of its own; collective from its construction on."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._timeout_s = timeout_s
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def limit(self, seconds: float | None) -> None:
        """How long a rank waits for the others from now on; None: as long as at first."""
        if self._group is not None:
            _set_pg_timeout(timedelta(seconds=self._timeout_s if seconds is None else seconds), self._group)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        result: list[float] = values.tolist()
        return result

    def gathered(self, value: T) -> list[T]:
        """Every rank's value on rank 0, nothing elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def everywhere(self, value: T) -> list[T]:
        """Every rank's value on every rank, in order of rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self._group is not None:
            dist.barrier(group=self._group)
