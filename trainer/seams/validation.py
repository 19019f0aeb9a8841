"""The seam of validation: metrics have the form of a loss, sets the form of a data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from titan_ckpt.trainer.seams.loss import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The share of labels with the highest of the logits [..., classes]; a metric has the form of a `Loss`."""

    labels: str = "labels"

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """How many are right."""
        return (output.argmax(dim=-1) == batch[self.labels]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The labels that are not IGNORED."""
        return int((batch[self.labels] != IGNORED).sum())
