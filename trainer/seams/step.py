"""The seam of the step: what is added to a microbatch, such as the output of a frozen model; hooks; a step of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from titan_ckpt.trainer.seams.model import ModelSpec

Forward: TypeAlias = Callable[[Mapping[str, Tensor]], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenModel:
    """A second model that is not trained, divided over the mesh like the first: a reference or a teacher.

    Its weights are not in the run's checkpoints; they are read again from `start` whenever the run starts.
    """

    spec: ModelSpec
    start: str = ""  # URL[@STEP] of a checkpoint or Hugging Face folder; empty: the initial weights of train.seed


class Prepare(Protocol):
    """Called with every microbatch on its device, in training and validation, without gradients."""

    def __call__(self, batch: Mapping[str, Tensor], frozen: Mapping[str, Forward]) -> Mapping[str, Tensor]:
        """The batch that the model and the loss see.

        `frozen[name](batch)` is the output of a frozen model: on the ranks of the last pipeline stage, where the loss is; None
        elsewhere. Every rank must call it.
        """


class Hooks:
    """Calls around the steps of a run, on every rank at the same points; override those that are needed.

    What they remember over steps belongs in `state_dict`, so that a resumed run does what an uninterrupted one would.
    """

    def state_dict(self) -> dict[str, Any]:
        """What every checkpoint keeps: values and small tensors by name, the same on every rank; of values, rank 0's are kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's state, before the first step; not called for one that has none. Tensors are whole, on the CPU."""

    def before_step(self, step: int) -> None:
        """Before the batch of `step` is taken."""

    def after_backward(self, step: int, weights: Mapping[str, nn.Parameter]) -> None:
        """With the whole gradient of the step, before its norm is taken and clipped; it may be changed in place.

        `weights` are those of this rank's stages by FQN; they and `weights[fqn].grad` are DTensors where they are divided.
        """

    def after_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002 - for subclasses
        """After the update. `numbers` has `grad_norm`, `lr` and, where it is logged, `loss`; what is returned is recorded."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What a `TrainStep` works with."""

    forward_backward: Callable[[Mapping[str, Tensor]], Tensor]  # adds gradients; returns the sum of this rank's losses
    weights: Mapping[str, nn.Parameter]  # of this rank's stages, by FQN; DTensors where they are divided


class TrainStep(Protocol):
    """Forward and backward of a step, in place of one call of `forward_backward` per microbatch."""

    def __call__(self, microbatches: Sequence[Mapping[str, Tensor]], model: StepModel, *, step: int) -> Tensor:
        """Leave the gradients of the step in the weights, for clipping and update; return the sum of the losses to be logged.

        The ranks must make the same number of calls of `forward_backward`, each with a batch of one microbatch's size.
        """
