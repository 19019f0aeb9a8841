"""The seam of the optimizer: the rule of updates, and the learning rate.

Groups of weights with their own rate and decay are settings: `[[optimizer.groups]]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse


class Update(Protocol):
    """One update of one weight, in place. Tensors are this rank's shards, or whole ones if the spec says so."""

    def __call__(
        self,
        fqn: str,
        weight: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """`step` counts from 1; `lr` and `weight_decay` are those of the weight's group at this step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerSpec:
    """A rule of updates in place of `optimizer.name`. Its state is saved, and resharded like the weights.

    An update that treats each number by itself, as Adam's does, is exact on shards. One that needs whole matrices, as Shampoo's,
    sets `whole`; then every rank gathers the weight, gradient and state of one weight after the other.
    """

    name: str  # recorded in checkpoints; a resume with another one is refused
    state: Mapping[str, torch.dtype]  # tensors to keep for every weight, of its shape; zeros at first
    update: Update
    whole: bool = False


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
