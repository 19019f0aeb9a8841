"""Run Python's garbage collector at the same steps on every rank.

By default it runs whenever a rank has allocated enough objects: each rank pauses at a different step, and all ranks wait each
time. Objects that exist when training begins (modules, the model) are frozen and never scanned again.
"""

from __future__ import annotations

import gc


class Collector:
    """Collects every `every` steps, as a context manager; 0 leaves Python's collector alone."""

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
        """Collect if it is due after `step`."""
        if self._every and step % self._every == 0:
            gc.collect()
