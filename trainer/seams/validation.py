"""The seam of validation: what is computed from a set, and metrics. The sets themselves have the form of a data source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from titan_ckpt.trainer.seams.loss import IGNORED, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One set of a validation on its mesh, as a `Validator` sees it. Every rank must make the same calls of its functions."""

    name: str  # of the set; empty: the held-out samples
    step: int  # finished steps
    microbatches: Sequence[Mapping[str, Tensor]]  # this rank's; labels of samples that only fill up are IGNORED
    means: Callable[[], dict[str, float]]  # `loss` and the metrics over the whole set, and `tokens`: losses in the mean
    outputs: Callable[
        [Mapping[str, Tensor]], Any
    ]  # of the model for a microbatch; None on ranks without the last stage
    total: Callable[[Sequence[float]], list[float]]  # sums over the ranks; give zeros where there are no outputs


class Validator(Protocol):
    """Called for each set when a validation is due, and by `titan-ckpt eval`; without gradients, on every rank."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The numbers of the set, by name; rank 0's are recorded. `loss` is what plots show."""


class Means:
    """The trainer's own validator: the means of the loss and the metrics."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The means over the set."""
        return evaluation.means()


class Metric(Loss, Protocol):
    """A number beside the loss: the sum of something over a batch, and how many were summed. What is recorded is the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The share of labels with the highest of the logits [..., classes]."""

    labels: str = "labels"

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """How many are right."""
        return (output.argmax(dim=-1) == batch[self.labels]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The labels that are not IGNORED."""
        return int((batch[self.labels] != IGNORED).sum())
