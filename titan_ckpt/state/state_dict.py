"""The box of each tensor that this rank holds, and the bytes of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_ckpt.errors import TitanError, UsageError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.sharding.mesh import AXES, FOLD
from titan_ckpt.sharding.placement import Box, Placements, Shard, shard_range
from titan_ckpt.state.local_shard import LocalShard

TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENT_SIZE}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def local_shard(fqn: str, tensor: torch.Tensor) -> LocalShard:
    """The shard of `tensor` on this rank. UsageError for partial sums, a sparse one or an unknown dtype."""
    dtype = DTYPE_NAME.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise UsageError(f"{fqn}: tensors of {tensor.dtype}, {tensor.layout} cannot be stored in a checkpoint")
    global_shape = tuple(tensor.shape)
    if type(tensor) is torch.Tensor or not isinstance(tensor, ShardedTensor | DTensor):
        return LocalShard(
            fqn=fqn,
            dtype=dtype,
            global_shape=global_shape,
            placements=(),
            offsets=(0,) * len(global_shape),
            sizes=global_shape,
        )
    if isinstance(tensor, ShardedTensor):
        return _shard_of_fsdp1(fqn, tensor, dtype)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(f"{fqn}: placement {tensor.placements} holds partial sums; reduce it before saving")
    cuts = _cuts(tensor.device_mesh, tuple(tensor.placements))
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = tuple((names[index], dim) for index, dim in cuts) if _are_axes(names, cuts) else None
    box = _own_box(fqn, tensor, cuts)
    return LocalShard(
        fqn=fqn,
        dtype=dtype,
        global_shape=global_shape,
        placements=placements,
        offsets=box.offsets,
        sizes=box.sizes,
    )


def _shard_of_fsdp1(fqn: str, tensor: ShardedTensor, dtype: str) -> LocalShard:
    """The shard of a tensor in a `SHARDED_STATE_DICT` of FSDP1. UsageError for several shards on this rank."""
    shards = tensor.local_shards()
    if len(shards) != 1:
        raise UsageError(f"{fqn}: this rank holds {len(shards)} shards of a ShardedTensor, and one can be stored")
    box = shards[0].metadata
    return LocalShard(
        fqn=fqn,
        dtype=dtype,
        global_shape=tuple(tensor.shape),
        placements=None,
        offsets=tuple(box.shard_offsets),
        sizes=tuple(box.shard_sizes),
    )


def has_part_of(tensor: torch.Tensor) -> bool:
    """Whether this rank holds some of the tensor: not of a DTensor on a mesh of other ranks, or if FSDP1 left none for it."""
    if type(tensor) is torch.Tensor:
        return True
    if isinstance(tensor, ShardedTensor):
        return bool(tensor.local_shards())
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def cut_order(mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> Placements | None:
    """DTensor placements as axis -> Shard in the order of the cuts; None if a mesh dimension is not one of our axes."""
    names, cuts = mesh.mesh_dim_names or (), _cuts(mesh, placements)
    return {names[index]: Shard(dim) for index, dim in cuts} if _are_axes(names, cuts) else None


def _are_axes(names: tuple[str, ...], cuts: list[tuple[int, int]]) -> bool:
    return all(index < len(names) and all(a in AXES for a in names[index].split(FOLD)) for index, _ in cuts)


def _cuts(mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of each cut, in the order of the cuts.

    `_StridedShard(dim, split_factor=f)` cuts after the later mesh dimensions whose degrees have the product `f`.
    """
    cuts: list[tuple[int, int]] = []
    for index in reversed(range(len(placements))):
        placement = placements[index]
        if isinstance(placement, TorchReplicate):
            continue
        dim = _shard_dim(placement)
        position, product = 0, 1
        while product < getattr(placement, "split_factor", 1):
            if position == len(cuts):
                raise UsageError(
                    f"placement {placement} on a mesh of {tuple(mesh.shape)} cannot be stored in a checkpoint"
                )
            product *= mesh.size(cuts[position][0]) if cuts[position][1] == dim else 1
            position += 1
        cuts.insert(position, (index, dim))
    return cuts


def _own_box(fqn: str, tensor: DTensor, cuts: list[tuple[int, int]]) -> Box:
    """The box of this rank's shard, by the cuts of FSDP2 and TP: `torch.chunk` of the shard left by the cut before.

    If the shape of the local tensor disagrees, use DTensor's own arithmetic. The two differ for some uneven sizes of FSDP over
    TP, where `torch.chunk` is right.
    """
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    for index, dim in cuts:
        start, length = shard_range(sizes[dim], tensor.device_mesh.size(index), coordinate[index])
        offsets[dim], sizes[dim] = offsets[dim] + start, length
    held = tuple(tensor.to_local().shape)
    if tuple(sizes) == held:
        return Box(tuple(offsets), held)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != held:
        raise TitanError(f"{fqn}: the local tensor is {held}, but placements {tensor.placements} give {tuple(sizes)}")
    return Box(tuple(offset), held)


def _shard_dim(placement: TorchPlacement) -> int:
    dim = getattr(placement, "dim", None)
    if not isinstance(placement, TorchShard) and dim is None:
        raise UsageError(f"placement {placement} cannot be stored in a checkpoint")
    return int(dim)  # type: ignore[arg-type]


def detached_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a detached plain tensor that shares its memory; an empty one of a tensor of which it holds none."""
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard with the values that it shows: a lazily conjugated or negated view is computed."""
    return detached_shard(tensor).resolve_conj().resolve_neg()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Writable view of the memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # it may keep any stride, which `view` refuses
        flat = flat.as_strided((1,), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
