"""The seam of the learning rate. Groups of weights with their own rate and decay are settings: `[[optimizer.groups]]`."""

from __future__ import annotations

from typing import Protocol


class Schedule(Protocol):
    """A pure function of the step, so that a resumed run has the same rates. It replaces warm-up and `optimizer.schedule`."""

    def __call__(self, step: int, total_steps: int) -> float:
        """The share of `optimizer.lr` for the update after `step` finished steps."""
