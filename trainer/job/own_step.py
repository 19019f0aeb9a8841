"""Calls of a user's hooks and train step, with their answers checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real

from torch import Tensor

from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse
from titan_ckpt.trainer.seams.step import Hooks, StepModel, TrainStep


class HookCalls:
    """The hooks of a run; without any, calls do nothing."""

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks

    def before_step(self, step: int) -> None:
        """Call the hook."""
        if self._hooks is not None:
            with calling("Hooks.before_step", self._hooks):
                self._hooks.before_step(step)

    def after_backward(self, step: int, model: Parallelized) -> None:
        """Call the hook, with gradients that are summed over all ranks that share a weight."""
        if self._hooks is not None:
            model.finish_gradients()
            with calling("Hooks.after_backward", self._hooks):
                self._hooks.after_backward(step, model.named_parameters())

    def after_step(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Call the hook; returns the numbers to record."""
        if self._hooks is None:
            return {}
        with calling("Hooks.after_step", self._hooks):
            found: object = self._hooks.after_step(step, numbers)
        if not isinstance(found, Mapping):
            refuse(
                "Hooks.after_step", self._hooks, f"returned {kind_of(found)}, expected numbers by name; {{}} for none"
            )
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, Real) or name in ("event", "time_s", "step"):
                refuse(
                    "Hooks.after_step",
                    self._hooks,
                    f"returned {name!r}: {kind_of(value)}, expected a number of another name",
                )
        return {name: float(value) for name, value in found.items()}


def run_own_step(
    own: TrainStep, microbatches: Sequence[Mapping[str, Tensor]], model: Parallelized, *, count: int, step: int
) -> Tensor:
    """The losses' sum that a user's train step returns."""
    view = StepModel(
        forward_backward=lambda batch: model.forward_backward(batch, count=count), weights=model.named_parameters()
    )
    with calling("train_step", own):
        total: object = own(microbatches, view, step=step)
    if not isinstance(total, Tensor) or total.numel() != 1:
        refuse(
            "train_step", own, f"returned {kind_of(total)}, expected the sum of the losses as a tensor of one number"
        )
    return total.detach().sum()
