"""A digest of the values of tensors that does not depend on how they are stored: on mesh, files, format, or a wider dtype.

A value counts as the bits of its float32, times a fixed odd 64-bit weight for each of its indices. Such sums, modulo 2**64, of
the boxes of a tensor add up to the sum of the tensor, so every rank sums what it holds. The digest is the xxh3-128 of all names,
shapes and sums. It is made against mistakes, not against intent: who chooses the values can make two models with one digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import TensorEntry
from titan_ckpt.loading.load import read_tensor
from titan_ckpt.sharding.placement import Box, Shape

AT_ONCE = 1 << 16  # values; the temporaries, of 16 bytes each, then stay in a processor's cache
READ_AT_ONCE = 1 << 24  # values of a stored tensor
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Part:
    """A box of tensor `fqn`."""

    fqn: str
    shape: Shape
    box: Box


@torch.no_grad()
def sum_of(values: Tensor, part: Part) -> int:
    """The sum of `values`, this part of a tensor: 64 bits."""
    shape, offsets = (part.shape or (1,)), (part.box.offsets or (0,))
    values = values.reshape(part.box.sizes or (1,))
    weights = [
        _weights(dim, shape[dim])[offset : offset + size].to(values.device)
        for dim, (offset, size) in enumerate(zip(offsets, values.shape, strict=True))
    ]
    return int(_sum(values, weights)) & _MASK


def _sum(values: Tensor, weights: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    width = prod(values.shape[1:])
    if values.ndim > 1 and width > AT_ONCE:
        for row, weight in zip(values, weights[0], strict=True):
            total += _sum(row, weights[1:]) * weight
        return total
    rows = AT_ONCE // max(1, width)
    for some, first in zip(torch.split(values, rows), torch.split(weights[0], rows), strict=True):
        bits = some.float().contiguous().view(torch.int32).to(torch.int64)
        for weight in reversed(weights[1:]):
            bits = (bits * weight).sum(-1)
        total += (bits * first).sum()
    return total


@lru_cache(maxsize=16)
def _weights(dim: int, size: int) -> Tensor:
    """The weights of indices 0 to `size` of dimension `dim`: odd, from the bits of Philox, which numpy keeps stable."""
    bits = np.random.Philox(key=dim).random_raw(size) | np.uint64(1)
    return torch.from_numpy(bits.view(np.int64))


def combine(sums: Mapping[Part, int]) -> str:
    """The digest of tensors whose parts, each box once, have these sums."""
    totals: dict[tuple[str, Shape], int] = {}
    for part, value in sums.items():
        totals[part.fqn, part.shape] = (totals.get((part.fqn, part.shape), 0) + value) & _MASK
    lines = (f"{fqn} {','.join(map(str, shape))} {total:016x}\n" for (fqn, shape), total in sorted(totals.items()))
    return digest("".join(lines).encode()).hex()


def stored_values_digest(checkpoint: Checkpoint, fqns: Iterable[str], *, prefix: str = "") -> str:
    """The digest of tensors of a checkpoint, named without `prefix`. Reads all of them, a chunk at most at a time."""
    sums = {}
    for fqn in fqns:
        entry = checkpoint.manifest.by_fqn[fqn]
        for box in _boxes(checkpoint, entry):
            part = Part(fqn.removeprefix(prefix), entry.global_shape, box)
            sums[part] = sum_of(read_tensor(checkpoint, fqn, box), part)
    return combine(sums)


def _boxes(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[Box]:
    """Boxes that together are the tensor: its chunks, which are read whole if they have digests, else some rows of a chunk."""
    for chunk in checkpoint.manifest.chunks_of(entry):
        offsets, sizes = chunk.box.offsets, chunk.box.sizes
        rows = READ_AT_ONCE // max(1, prod(sizes[1:])) or 1
        if checkpoint.digests is not None or not sizes or sizes[0] <= rows:
            yield chunk.box
            continue
        for start in range(0, sizes[0], rows):
            yield Box((offsets[0] + start, *offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:]))
