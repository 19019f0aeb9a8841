"""Python's garbage collector at chosen steps, the same on every rank.

Left to itself it runs whenever a rank has made enough objects: each rank pauses at a step of its own, and all of them wait for
whichever pauses. What stands when training begins (modules, the model) is never looked through again.
"""

from __future__ import annotations

import gc


class Collector:
    """Collects after every `every` steps; 0 leaves Python to itself. A context manager."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> Collector:
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after(self, step: int) -> None:
        """Collect where `step` is one of those."""
        if self._every and step % self._every == 0:
            gc.collect()
