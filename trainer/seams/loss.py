"""The seam of the loss: a sum over what counts in a batch, and how much counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse

IGNORED = -100  # label of what does not count, as in Hugging Face


class Loss(Protocol):
    """A training objective. The trainer divides the sum over all ranks and microbatches by the sum of the counts.

    So the gradient is that of the mean over everything that counts, on any mesh. Under `cp` the batch holds this rank's part of
    the sequence; under `pp` it is called on the last stage.
    """

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses of a microbatch, from the model's output and the fields of the batch."""

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The number of losses in the sum: tokens, samples or pairs."""


def count_of(loss: Loss, batch: Mapping[str, Tensor]) -> int:
    """`loss.count(batch)`, checked: a whole number, 0 or more."""
    with calling("Loss.count", loss):
        count: Any = loss.count(batch)
    try:
        whole = index(count)
    except (TypeError, ValueError, RuntimeError):
        whole = -1
    if whole < 0 or isinstance(count, bool):
        refuse("Loss.count", loss, f"returned {kind_of(count)}, expected a whole number of 0 or more")
    return whole


def sum_of(loss: Loss, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """`loss(output, batch)`, checked: one number, with a gradient if one is wanted."""
    with calling("Loss", loss):
        total: Any = loss(output, batch)
    if not isinstance(total, Tensor) or total.is_complex():
        refuse("Loss", loss, f"returned {kind_of(total)}, expected a tensor: the sum of the losses")
    if total.numel() != 1:
        shape = list(total.shape)
        refuse("Loss", loss, f"returned a tensor of shape {shape}, expected one number: the sum of the losses")
    return total.sum().float()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of logits [..., classes] with the labels [...] of the batch; IGNORED does not count."""

    labels: str = "labels"

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum over the labels that count, in float32."""
        labels = batch[self.labels]
        scores = output.float().reshape(-1, output.shape[-1])
        return F.cross_entropy(scores, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The labels that count."""
        return int((batch[self.labels] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInModel:
    """For a model that takes the labels and returns the sum of its losses itself, as with `LmHead`."""

    labels: str = "labels"

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - the protocol's signature
        """The model's output."""
        return output.sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The labels that are not IGNORED."""
        return int((batch[self.labels] != IGNORED).sum())
