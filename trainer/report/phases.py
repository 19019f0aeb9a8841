"""The phases of the training loop: timed, passed to the hang recorder, and written as a trace on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

PhaseHook: TypeAlias = Callable[[str, int], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """A finished phase; times in seconds since the epoch, advanced by the monotonic clock."""

    name: str
    step: int
    start_s: float
    end_s: float
    thread: str


@dataclass(slots=True, kw_only=True)
class Phases:
    """`with phases("data", step): ...`; `take()` returns the seconds of each phase since the last take.

    `hook` (the recorder's) is called on the training thread only: the recorder keeps one phase per rank, and a background upload
    is not where a rank hangs. Spans of the steps in `steps` are kept for a trace.
    """

    hook: PhaseHook | None = None
    steps: range = range(0)
    spans: list[Span] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _epoch_s: float = field(default_factory=lambda: time.time() - time.perf_counter())

    @contextmanager
    def __call__(self, name: str, step: int) -> Iterator[None]:
        """Enter a phase; its time counts even if it raises."""
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
        """Seconds per phase of the training thread since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def trace_events(spans: Iterable[Span], *, rank: int, name: str) -> list[dict[str, Any]]:
    """One rank's spans as complete events (`ph: X`) of Chrome's Trace Event Format, times in microseconds.

    A rank is a process of the trace. Clocks of different machines are not aligned.
    """
    spans = list(spans)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(span.thread for span in spans))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}]
    events += [
        {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": thread}}
        for thread, number in threads.items()
    ]
    events += [
        {
            "ph": "X", "pid": rank, "tid": threads[span.thread], "name": span.name, "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6, "args": {"step": span.step},
        }
        for span in spans
    ]  # fmt: skip
    return events


def write_trace(path: str, ranks: Iterable[list[dict[str, Any]]]) -> None:
    """Write the events of all ranks as one file for Perfetto (ui.perfetto.dev)."""
    events = [event for rank in ranks for event in rank]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
