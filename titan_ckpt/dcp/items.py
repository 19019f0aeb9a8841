"""Turn an item of DCP's save plan into the tensors and values that are stored of it.

Most items are one tensor. A wrapper subclass (torchao's) is stored as its inner tensors and a mark, a quantised tensor as a
value, as `save` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import UsageError
from titan_ckpt.state.flatten import flatten, is_value
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.state.state_dict import DTYPE_NAME, cut_order, local_shard, plain
from titan_ckpt.state.subclasses import parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor or value that is stored of an item: `value` is this rank's shard, as `shard` describes it, or a whole value.

    `below` are the keys that lead to it from the item's own place in the state.
    """

    item: WriteItem
    name: str
    below: tuple[Any, ...]
    shard: LocalShard | None
    value: Any


def pieces_of(planner: SavePlanner, item: WriteItem) -> list[Piece]:
    """What to store of a tensor of the plan. UsageError for one that cannot be stored."""
    fqn, value = item.index.fqn, cast(torch.Tensor, planner.resolve_data(item))
    if not is_value(value) and parts_of(fqn, value) is None:
        return [Piece(item=item, name=fqn, below=(), shard=_shard_to_write(planner, item), value=value)]
    flat = flatten({fqn: _whole(planner, item, value)})
    return [
        Piece(item=item, name=name, below=flat.keys[name][1:], shard=local_shard(name, tensor), value=plain(tensor))
        for name, tensor in flat.tensors.items()
    ] + [
        Piece(item=item, name=name, below=flat.keys[name][1:], shard=None, value=each)
        for name, each in flat.objects.items()
    ]


def _whole(planner: SavePlanner, item: WriteItem, value: torch.Tensor) -> torch.Tensor:
    """The tensor of which `value` is this rank's part. UsageError if the planner does not show it."""
    found = getattr(planner, "state_dict", {}).get(item.index.fqn)
    data = item.tensor_data
    assert data is not None
    if isinstance(found, torch.Tensor):
        return found
    if tuple(data.chunk.sizes) != tuple(data.size):
        raise UsageError(
            f"{item.index.fqn}: this rank has a part of a {type(value).__name__}, and {type(planner).__name__} has no "
            "`state_dict` that holds the whole DTensor: use torch's DefaultSavePlanner, or titan_ckpt.save"
        )
    return value


def _shard_to_write(planner: SavePlanner, write: WriteItem) -> LocalShard:
    """The box of a tensor that the planner wants written. UsageError for a dtype that cannot be stored.

    Its placements, if the planner still has the DTensor (torch's default planner does).
    """
    data = write.tensor_data
    assert data is not None
    dtype = DTYPE_NAME.get(data.properties.dtype)
    if dtype is None:
        raise UsageError(f"{write.index.fqn}: tensors of {data.properties.dtype} cannot be stored; convert it first")
    value = getattr(planner, "state_dict", {}).get(write.index.fqn)
    cuts = cut_order(value.device_mesh, tuple(value.placements)) if isinstance(value, DTensor) else None
    return LocalShard(
        fqn=write.index.fqn,
        dtype=dtype,
        global_shape=tuple(data.size),
        placements=None if cuts is None else tuple((axis, cut.dim) for axis, cut in cuts.items()),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )
