"""A tokenised corpus as a source of samples: each is `seq_len` tokens, with the labels one further.

Shapes: L `seq_len`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_ckpt.trainer.seams.loss import IGNORED


class Tokens(Protocol):
    """Ids with random access. `digest` identifies them; `separator` is the id between documents."""

    @property
    def digest(self) -> str: ...

    @property
    def separator(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Sample i is tokens [i L, i L + L]: L inputs, and the labels shifted by one; with `documents` if masks are on."""

    file: Tokens
    seq_len: int
    has_document_masks: bool = False
    has_positions: bool = False  # as other sources of the run have them

    @property
    def fingerprint(self) -> str:
        """The digest of the tokens."""
        return self.file.digest

    @property
    def losses_per_sample(self) -> int:
        """Every token has a label."""
        return self.seq_len

    def __len__(self) -> int:
        return max(0, (len(self.file) - 1) // self.seq_len)

    def sample(self, index: int) -> dict[str, Tensor]:
        """Tokens and labels, both [L]."""
        ids = torch.from_numpy(self.file.read(index * self.seq_len, self.seq_len + 1)).long()
        return self._fields(ids[:-1], ids[1:])

    def filler(self) -> dict[str, Tensor]:
        """Zeros, none of which counts."""
        return self._fields(torch.zeros(self.seq_len, dtype=torch.int64), torch.full((self.seq_len,), IGNORED))

    def _fields(self, tokens_L: Tensor, labels_L: Tensor) -> dict[str, Tensor]:
        fields = {"tokens": tokens_L, "labels": labels_L}
        if self.has_document_masks:
            fields["documents"] = documents(tokens_L, self.file.separator)
        elif self.has_positions:
            fields["documents"] = torch.zeros_like(tokens_L)
        if self.has_positions:
            fields["positions"] = positions(fields["documents"])
        return fields


def documents(tokens_L: Tensor, separator: int) -> Tensor:
    """Each token's document number within its sample; a separator belongs to the document it ends.

    >>> documents(torch.tensor([5, 6, 0, 7, 0, 8]), separator=0).tolist()
    [0, 0, 0, 1, 1, 2]
    """
    closes_L = (tokens_L == separator).long()
    return closes_L.cumsum(dim=-1) - closes_L


def positions(documents_L: Tensor) -> Tensor:
    """Each token's place in its document.

    >>> positions(torch.tensor([0, 0, 0, 1, 1, 2])).tolist()
    [0, 1, 2, 0, 1, 0]
    """
    places_L = torch.arange(len(documents_L))
    begins_L = torch.ones_like(documents_L, dtype=torch.bool)
    begins_L[1:] = documents_L[1:] != documents_L[:-1]
    return places_L - torch.where(begins_L, places_L, 0).cummax(dim=0).values
