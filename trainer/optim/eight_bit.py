"""Numbers in 8 bits: a code per number, and a float32 scale, the largest size, per block of a row (arXiv 2110.02861).

The codes are the dynamic map of that paper: seven decades, the larger the finer. Blocks lie within rows and are the same on every
mesh, so that a resharded state is equal bit for bit. Of the second moment the root is kept, which has half its decades: moments
of weights with small gradients do not become 0 before the first moments do, nor does any root that is not 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.optim.rule import shard_of

SMALLEST = 4096  # tensors of fewer elements keep float32 moments, as do vectors
_MOST, _LEAST, _SHARES = 128, 16, (8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a row: their size, and how many a whole row and this rank's part of it have."""

    size: int
    columns: int  # of this rank's shard
    whole: int
    here: int


def blocks_of(fqn: str, weight: Tensor) -> Blocks | None:
    """The blocks of a weight's rows; None if its moments stay float32. ConfigError if the mesh cuts through a block."""
    if weight.ndim < 2 or weight.numel() < SMALLEST:
        return None
    columns, here = weight.shape[-1], shard_of(weight).shape[-1]
    size = block_size(columns)
    if here != columns and here % size:
        raise ConfigError(
            f"{fqn}: tp cuts its rows of {columns} into parts of {here}, and blocks of {size} into pieces; with moments in 8 "
            'bits choose another tp, or optimizer.moments = "bfloat16"'
        )
    return Blocks(size=size, columns=here, whole=-(-columns // size), here=-(-here // size))


def block_size(columns: int) -> int:
    """A size that divides an eighth of a row if possible, else a larger share, so that tp seldom cuts a block.

    >>> block_size(4096), block_size(11008), block_size(98), block_size(997)
    (128, 86, 49, 128)
    """
    for share in _SHARES:
        part = columns // share
        if columns % share == 0:
            divisors = [size for size in range(min(_MOST, part), _LEAST - 1, -1) if part % size == 0]
            if divisors:
                return divisors[0]
    return _MOST


@functools.lru_cache(maxsize=8)
def codes_of(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 numbers of the dynamic map, sorted."""
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade * (1 if signed else 2)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def quantize(values: Tensor, blocks: Blocks, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales of `values` [rows, columns], float32; one number is its code alone, with a scale of 1."""
    codes = codes_of(values.device, signed=signed)
    between = (codes[1:] + codes[:-1]) / 2.0
    if values.ndim == 0:
        return torch.bucketize(values, between).to(torch.uint8), values.new_ones(())
    rows, columns = values.shape
    in_blocks = F.pad(values, (0, blocks.here * blocks.size - columns)).view(rows, blocks.here, blocks.size)
    scales = in_blocks.abs().amax(dim=-1)
    shares = in_blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    found = torch.bucketize(shares, between)
    if not signed:
        found = torch.where(in_blocks > 0.0, found.clamp(min=1), found)
    return found.to(torch.uint8).view(rows, -1)[:, :columns], scales


def dequantize(codes: Tensor, scales: Tensor, blocks: Blocks, *, signed: bool) -> Tensor:
    """The numbers that `codes` [rows, columns] and `scales` [rows, blocks] stand for, float32."""
    columns = codes.shape[-1]
    values = codes_of(codes.device, signed=signed)[codes.int()]
    return values * scales.repeat_interleave(blocks.size, dim=-1)[:, :columns]
