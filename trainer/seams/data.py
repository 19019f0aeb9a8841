"""The seam of the data: samples by number. The trainer orders, batches and resumes them, exactly, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_ckpt.errors import DataError
from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse
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


class CheckedSource:
    """A user's data source, whose answers are compared with the protocol; an OwnCodeError names what is wrong."""

    def __init__(self, source: Any, seam: str) -> None:
        self._source, self._seam = source, seam
        with calling(f"{seam}: len", source):
            self._length = len(source)
        with calling(f"{seam}: fingerprint", source):
            self.fingerprint: str = source.fingerprint
        with calling(f"{seam}: losses_per_sample", source):
            self.losses_per_sample: int | None = getattr(source, "losses_per_sample", None)
        if not self._length:
            refuse(f"{seam}: len", source, "is 0: there is no sample")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            refuse(
                f"{seam}: fingerprint",
                source,
                f"is {kind_of(self.fingerprint)}, expected a text that names the content",
            )
        many = self.losses_per_sample
        if many is not None and (not isinstance(many, int) or isinstance(many, bool) or many < 1):
            refuse(
                f"{seam}: losses_per_sample", source, f"is {kind_of(many)}, expected a whole number from 1 on, or None"
            )
        self._form: dict[str, tuple[torch.Size, torch.dtype]] | None = None

    def __len__(self) -> int:
        return self._length

    def sample(self, index: int) -> Mapping[str, Tensor]:
        """The source's sample, which must have the fields, shapes and dtypes of the first one that was read."""
        with calling(f"{self._seam}: sample({index})", self._source):
            found = self._source.sample(index)
        return self._checked(found, f"{self._seam}: sample({index})")

    def filler(self) -> Mapping[str, Tensor]:
        """The source's own, or its sample 0 without labels."""
        own = getattr(self._source, "filler", None)
        if own is None:
            return without_labels(self.sample(0))
        with calling(f"{self._seam}: filler", self._source):
            found = own()
        return self._checked(found, f"{self._seam}: filler")

    def _checked(self, found: object, seam: str) -> Mapping[str, Tensor]:
        fields = checked_fields(found, seam, self._source)
        form = {name: (value.shape, value.dtype) for name, value in fields.items()}
        self._form = self._form or form
        for name in {**form, **self._form}:
            if form.get(name) != self._form.get(name):
                text = f"{name}: {_form_text(form.get(name))}, in the first {_form_text(self._form.get(name))}"
                refuse(seam, self._source, f"has another form than the first sample read: {text}")
        return fields


def checked_source(make: Callable[[Any], Any], config: Any, seam: str) -> CheckedSource:
    """The data source that a user's function makes of the config."""
    with calling(seam, make):
        source = make(config)
    for name in ("__len__", "sample", "fingerprint"):
        if not hasattr(source, name):
            refuse(seam, make, f"returned {kind_of(source)} without {name}, expected a DataSource")
    return CheckedSource(source, seam)


def _form_text(form: tuple[torch.Size, torch.dtype] | None) -> str:
    return "not there" if form is None else f"{tuple(form[0])} of {form[1]}"


def checked_fields(found: object, seam: str, owner: object) -> Mapping[str, Tensor]:
    """Fields by name, as a user's code returned them."""
    if not isinstance(found, Mapping) or not found:
        refuse(seam, owner, f"returned {kind_of(found)}, expected fields by name: a dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            refuse(seam, owner, f"returned {name!r}: {kind_of(value)}, expected a tensor")
    return found


def filler_of(source: DataSource) -> Mapping[str, Tensor]:
    """A sample that counts for nothing; DataError if the source has none."""
    own = getattr(source, "filler", None)
    if own is not None:
        made: Mapping[str, Tensor] = own()
        return made
    return without_labels(source.sample(0))


def without_labels(sample: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A sample whose labels do not count; DataError if it has none."""
    fields = dict(sample)
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
