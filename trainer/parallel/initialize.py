"""Initial weights that do not depend on the mesh: each element is a function of (seed, FQN, its index in the global tensor).

A rank computes only its box, with a counter-based generator: the 64-bit mixer of SplitMix64 over the element's index, then
Box-Muller. No rank materialises a global weight, and no random state is shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box, box_at
from titan_ckpt.sharding.placement import Shard as Cut
from titan_ckpt.trainer.model.plan import initial_of
from titan_ckpt.trainer.model.stages import named_weights
from titan_ckpt.trainer.seams.model import Constant, ModelSpec

ROWS_AT_ONCE_BYTES = 64 << 20  # bounds the generator's temporaries
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's two multipliers, as signed 64-bit
_GOLDEN = -0x61C8864680B583EB


@torch.no_grad()
def fill_initial(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Give a whole model in this process the weights that a run of `spec` with this `train.seed` begins with."""
    for fqn, parameter in named_weights(spec, model):
        fill(parameter, fqn, spec, seed, MeshSpec(), {})


def fill(parameter: Tensor, fqn: str, spec: ModelSpec, seed: int, mesh: MeshSpec, place: Mapping[str, int]) -> None:
    """Fill this rank's shard of a weight with its initial values."""
    values = initial_of(spec, fqn)
    if isinstance(values, Constant):
        parameter.fill_(values.value)
    else:
        fill_normal(parameter, fqn, values.std, seed, mesh, place)


@torch.no_grad()
def fill_normal(parameter: Tensor, fqn: str, std: float, seed: int, mesh: MeshSpec, place: Mapping[str, int]) -> None:
    """Fill this rank's shard of `parameter` with normal values of standard deviation `std`."""
    whole, box = tuple(parameter.shape), local_box(parameter, mesh, place)
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    key = _key(seed, fqn)
    width = math.prod(box.sizes[1:])
    rows = max(1, ROWS_AT_ONCE_BYTES // 8 // max(width, 1))
    for start in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - start)
        part = Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.sizes[1:]))
        target[start : start + count] = normal(_indices(whole, part, target.device), key).mul_(std)


def local_box(tensor: Tensor, mesh: MeshSpec, place: Mapping[str, int]) -> Box:
    """The box of the global tensor on this rank. The last dimension of the mesh shards first, tp or that of experts; FSDP then
    shards the result.
    """
    cuts = cut_axes(tensor)
    ordered = {axes: Cut(cuts[axes]) for axes in reversed(cuts)}
    return box_at(tuple(tensor.shape), ordered, mesh, place)


def cut_axes(tensor: Tensor) -> dict[str, int]:
    """Mesh dimension -> tensor dimension it shards; empty for a tensor that is replicated everywhere."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = zip(names, tensor.placements, strict=True)
    return {name: p.dim for name, p in placements if isinstance(p, Shard | _StridedShard)}


def normal(index: Tensor, key: int) -> Tensor:
    """Standard normal values at these counters (int64), as float32."""
    bits = _mix(index * _GOLDEN + key)
    radius = (((bits >> 40) & 0xFFFFFF).float() + 1.0).mul_(2.0**-24)
    angle = ((bits >> 8) & 0xFFFFFF).float().mul_(2.0**-24 * 2.0 * math.pi)
    return radius.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _MIX[0]
    bits = (bits ^ _shift(bits, 27)) * _MIX[1]
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _key(seed: int, fqn: str) -> int:
    key = seed
    for byte in fqn.encode():
        key = (key * 0x100000001B3 + byte) % 2**63  # FNV-1's multiplier
    return key


def _indices(whole: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, count in zip(whole, box.offsets, box.sizes, strict=True):
        index = index[..., None] * size + torch.arange(offset, offset + count, device=device)
    return index
