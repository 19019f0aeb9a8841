"""The seam of the step: what is added to a microbatch before the model sees it, such as the output of a second, frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

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
