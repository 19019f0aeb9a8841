"""What the loop is doing now: each phase is timed, told to the recorder of hangs, and kept for a trace when one is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

PhaseHook: TypeAlias = Callable[[str, int], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """A phase that is over; times in seconds since the epoch, by the monotonic clock."""

    name: str
    step: int
    start_s: float
    end_s: float
    thread: str


@dataclass(slots=True, kw_only=True)
class Phases:
    """`with phases("data", step): ...`; `take()` gives the seconds of each phase since the last take.

    `hook` (the recorder's) hears of the training thread only: it keeps one place per rank, and an upload in the background is
    not where a rank hangs. `steps` says which steps' spans are kept for a trace.
    """

    hook: PhaseHook | None = None
    steps: range = range(0)
    spans: list[Span] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _epoch_s: float = field(default_factory=lambda: time.time() - time.perf_counter())

    @contextmanager
    def __call__(self, name: str, step: int) -> Iterator[None]:
        """Enter a phase; its time counts even when it fails."""
        is_main = threading.current_thread() is threading.main_thread()
        hook = self.hook(name, step) if self.hook is not None and is_main else nullcontext()
        started = time.perf_counter()
        try:
            with hook:
                yield
        finally:
            ended = time.perf_counter()
            if is_main:
                self._seconds[name] = self._seconds.get(name, 0.0) + ended - started
            if step in self.steps:
                thread = threading.current_thread().name
                self.spans.append(Span(name, step, self._epoch_s + started, self._epoch_s + ended, thread))

    def take(self) -> dict[str, float]:
        """Seconds by phase of the training thread since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
