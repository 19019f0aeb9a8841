"""The seam of the data: samples by number. The trainer orders, batches and resumes them, exactly, on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from titan_ckpt.errors import DataError
from titan_ckpt.trainer.seams.loss import IGNORED


class DataSource(Protocol):
    """A map from numbers to samples. Called from one thread per rank, a little ahead of the step that needs the sample.

    Optional: `filler()` returns a sample that counts for nothing, which fills up a batch that the data ranks do not divide
    (default: sample 0 with IGNORED for its `labels`); `losses_per_sample`, if it is the same for all samples, saves an exchange
    of counts per step.
    """

    @property
    def fingerprint(self) -> str:
        """A name of the content: a resume with another one is refused."""

    def __len__(self) -> int:
        """The number of samples of an epoch."""

    def sample(self, index: int) -> Mapping[str, Tensor]:
        """The fields of a sample, without a batch dimension; the same names and shapes for every sample."""


def filler_of(source: DataSource) -> Mapping[str, Tensor]:
    """A sample that counts for nothing; DataError if the source has none."""
    own = getattr(source, "filler", None)
    if own is not None:
        made: Mapping[str, Tensor] = own()
        return made
    fields = dict(source.sample(0))
    labels = fields.get("labels")
    if labels is None or labels.is_floating_point():
        raise DataError(
            "the data ranks do not divide train.global_batch_size, and the data source has no sample that counts for nothing: "
            "its fields have no `labels` of whole numbers; give it a method filler(), or choose another global_batch_size"
        )
    return fields | {"labels": torch.full_like(labels, IGNORED)}


def collate(samples: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A microbatch: each field of the samples, stacked."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
