"""What the loop is doing now: each phase is timed, told to the recorder of hangs, and kept for a trace when one is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

PhaseHook: TypeAlias = Callable[[str, int], AbstractContextManager[Any]]


@dataclass(slots=True)
class Phases:
    """`with phases("forward", step): ...`; `take()` gives the seconds of each phase since the last take."""

    hooks: list[PhaseHook] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str, step: int) -> Iterator[None]:
        """Enter a phase; its time counts even when it fails."""
        started = time.perf_counter()
        with _all(self.hooks, name, step):
            try:
                yield
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def _all(hooks: list[PhaseHook], name: str, step: int) -> AbstractContextManager[Any]:
    if not hooks:
        return nullcontext()
    return _stacked(hooks, name, step)


@contextmanager
def _stacked(hooks: list[PhaseHook], name: str, step: int) -> Iterator[None]:
    with hooks[0](name, step), _all(hooks[1:], name, step):
        yield
