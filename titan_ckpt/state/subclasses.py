"""Wrapper subclasses by torch's own protocol (`__tensor_flatten__`), such as torchao's quantised weights with their scales.

A part of a DTensor's shard is a DTensor too, cut as the whole is, so that it is stored, resharded and loaded like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_ckpt.errors import UsageError
from titan_ckpt.format.structure import Mark
from titan_ckpt.sharding.placement import strides

# Parts that are the same in all shards, though their length may look like a number of blocks.
_TABLES = {"OptimState8bit": ("qmap",), "OptimState4bit": ("qmap",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one tensor by name; a shard without elements has none."""

    tensors: dict[str, torch.Tensor]
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The shape of a whole tensor and of one shard, and the tensor dimensions that the mesh cuts."""

    whole: tuple[int, ...]
    shard: tuple[int, ...]
    dims: frozenset[int]


def parts_of(name: str, tensor: torch.Tensor) -> Parts | None:
    """The parts of `tensor`; None for one that is stored as itself, and on a rank outside of its mesh.

    One tensor alone, in a wrapper of the same shape and dtype, is stored as itself: the weights that torchao casts on their way.
    UsageError for a class that cannot say its parts.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) is torch.Tensor or not _is_made_of_others(local) or local.layout is not torch.strided:
        return None
    made: Any = local
    try:
        names, context = made.__tensor_flatten__()
        found = {part: getattr(local, part).detach() for part in names}
    except Exception as error:
        raise UsageError(
            f"{name}: a {type(local).__name__} cannot be taken apart: {type(error).__name__}: {error}"
        ) from error
    if len(found) == 1 and all(each.shape == local.shape and each.dtype == local.dtype for each in found.values()):
        return None
    cut = _cut_of(tensor, local)
    own: dict[str, int] = {}
    if isinstance(tensor, DTensor):
        found = (
            {part: _as_dtensor(tensor, cut, part, each, own) for part, each in found.items()} if local.numel() else {}
        )
    kind = type(local)
    mark = Mark(
        name=f"{kind.__module__}.{kind.__qualname__}", dtype=str(tensor.dtype).removeprefix("torch."), shape=cut.whole,
        parts=tuple(names), own=own, context=_of_the_whole(context, cut),
    )  # fmt: skip
    return Parts(tensors=found, mark=mark)


def _is_made_of_others(tensor: object) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def without_shapes(context: Any, num_dims: int) -> Any:
    """A context without the sizes in it, which differ from shard to shard, and without devices; for comparing."""
    if _are_sizes(context, num_dims) or isinstance(context, torch.device):
        return None
    if is_dataclass(context) and not isinstance(context, type):
        values = {each.name: without_shapes(getattr(context, each.name), num_dims) for each in fields(context)}
        return (type(context).__qualname__, values)
    if isinstance(context, list | tuple):
        return [without_shapes(each, num_dims) for each in context]
    if isinstance(context, dict):
        return {key: without_shapes(each, num_dims) for key, each in context.items()}
    return context


def _cut_of(tensor: torch.Tensor, local: torch.Tensor) -> _Cut:
    dims = {getattr(each, "dim", None) for each in tensor.placements} if isinstance(tensor, DTensor) else set()
    return _Cut(
        whole=tuple(tensor.shape), shard=tuple(local.shape), dims=frozenset(dim for dim in dims if dim is not None)
    )


def _of_the_whole(context: Any, cut: _Cut) -> Any:
    """A shard's context as that of the whole tensor: sizes that are those of the shard, along dimensions that are cut."""
    if _are_sizes(context, len(cut.whole)):
        sizes = [
            cut.whole[dim] if dim in cut.dims and size == cut.shard[dim] else size for dim, size in enumerate(context)
        ]
        return type(context)(sizes)
    if type(context) in (list, tuple):
        return type(context)(_of_the_whole(each, cut) for each in context)
    if type(context) is dict:
        return {key: _of_the_whole(each, cut) for key, each in context.items()}
    return context


def _are_sizes(value: Any, num_dims: int) -> bool:
    return (
        type(value) in (list, tuple, torch.Size)
        and len(value) == num_dims > 0
        and all(type(each) is int for each in value)
    )


def _as_dtensor(tensor: DTensor, cut: _Cut, name: str, part: torch.Tensor, own: dict[str, int]) -> torch.Tensor:
    """A part of a shard as a DTensor. Where its place in the whole cannot be told, it gets leading dimensions, noted in `own`."""
    mesh, placements = tensor.device_mesh, list(tensor.placements)
    if isinstance(part, DTensor):
        raise UsageError(f"{name}: a DTensor inside of another one's shard cannot be stored")
    if not cut.dims or name in _TABLES.get(type(tensor._local_tensor).__name__, ()):
        placements = [each if each.is_partial() else Replicate() for each in placements]
        whole = tuple(part.shape)
    else:
        whole, unknown = _whole_of(cut, tuple(part.shape))
        leading = [dim for dim, each in enumerate(placements) if getattr(each, "dim", None) in unknown]
        if leading:
            own[name] = part.dim()
            whole = (*(mesh.size(dim) for dim in leading), *whole)
            placements = [
                TorchShard(leading.index(dim)) if dim in leading else _moved(each, len(leading))
                for dim, each in enumerate(placements)
            ]
            part = part.view(*[1] * len(leading), *part.shape)
    meta = TensorMeta(torch.Size(whole), strides(whole), part.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _moved(placement: Any, count: int) -> Any:
    """A placement of a tensor that got `count` leading dimensions."""
    if placement.is_replicate() or placement.is_partial():
        return placement
    factor = getattr(placement, "split_factor", None)
    dim = placement.dim + count
    return TorchShard(dim) if factor is None else _StridedShard(dim, split_factor=factor)


def _whole_of(cut: _Cut, part: Sequence[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """The shape of a part of the whole tensor, from that of a shard's, and the cut dimensions along which it cannot be told.

    Along each dimension that is cut, an element of the part stands for a block of the tensor's. Or the part is flat, one element
    for a block of the flattened tensor, which is cut along its first dimension alone.

    >>> _whole_of(_Cut(whole=(64, 128), shard=(16, 128), dims=frozenset({0})), (16, 4))
    ((64, 4), frozenset())
    >>> _whole_of(_Cut(whole=(64, 128), shard=(16, 128), dims=frozenset({0})), (8,))
    ((32,), frozenset())
    >>> _whole_of(_Cut(whole=(64, 128), shard=(16, 64), dims=frozenset({0, 1})), (16, 1))
    ((64, 1), frozenset({1}))
    """
    if len(part) == len(cut.whole):
        blocks = {dim: _block(cut.whole[dim], cut.shard[dim], part[dim]) for dim in cut.dims}
        sizes = (cut.whole[dim] // (blocks.get(dim) or 1) if blocks.get(dim) else size for dim, size in enumerate(part))
        return tuple(sizes), frozenset(dim for dim, block in blocks.items() if block is None)
    block = _block(prod(cut.whole), prod(cut.shard), part[0]) if len(part) == 1 and cut.dims == {0} else None
    return (tuple(part), cut.dims) if block is None else ((prod(cut.whole) // block,), frozenset())


def _block(whole: int, shard: int, count: int) -> int | None:
    """Elements of the tensor for each of the part, of which a shard has `count`; None for one that may stand for anything."""
    if count == 0 or shard % count or (count == 1 and shard > 1) or whole % (shard // count):
        return None
    return shard // count
