"""The seam of the learning rate. Groups of weights with their own rate and decay are settings: `[[optimizer.groups]]`."""

from __future__ import annotations

import math
from numbers import Real
from typing import Protocol

from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse


class Schedule(Protocol):
    """A pure function of the step, so that a resumed run has the same rates. It replaces warm-up and `optimizer.schedule`."""

    def __call__(self, step: int, total_steps: int) -> float:
        """The share of `optimizer.lr` for the update after `step` finished steps."""


def share_of(schedule: Schedule, step: int, total_steps: int) -> float:
    """`schedule(step, total_steps)`, checked: a finite number, 0 or more."""
    seam = f"schedule({step}, {total_steps})"
    with calling(seam, schedule):
        share: object = schedule(step, total_steps)
    if isinstance(share, bool) or not isinstance(share, Real) or not math.isfinite(share) or share < 0.0:
        refuse(seam, schedule, f"returned {kind_of(share)}, expected a share of optimizer.lr: a number of 0 or more")
    return float(share)
