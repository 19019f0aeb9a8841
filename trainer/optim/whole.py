"""A function of whole matrices over divided ones: each is gathered on one rank, computed there, and sent back in parts.

Matrices are dealt out over the ranks that FSDP divides them over, one each at a time, so the work is divided too, and a rank
holds one whole matrix. Ranks along tp, and copies along dp_replicate, compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Function = Callable[[Tensor], Tensor]


class TpCut(NamedTuple):
    """The ranks that have the other parts of a tensor, and the dimension that is cut."""

    group: dist.ProcessGroup
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """This rank's part of a matrix, and the groups that have the others. Rows are cut by FSDP after tp has cut `tp_dim`."""

    index: int
    part: Tensor
    columns: int  # of the part
    rows: int  # of all parts over `rows_group`
    rows_group: dist.ProcessGroup | None
    tp: TpCut | None


def map_whole(parts: Sequence[Tensor], weights: Sequence[Tensor], function: Function) -> list[Tensor]:
    """`function` of each matrix, as parts like `parts`, which are divided like `weights`; collective."""
    pieces = [_piece(index, part, weight) for index, (part, weight) in enumerate(zip(parts, weights, strict=True))]
    found: dict[int, Tensor] = {}
    by_group: dict[dist.ProcessGroup | None, list[_Piece]] = {}
    for piece in pieces:
        by_group.setdefault(piece.rows_group, []).append(piece)
    for group, some in by_group.items():
        size = 1 if group is None else dist.get_world_size(group)
        for start in range(0, len(some), size):
            found |= _round(some[start : start + size], group, function)
    return [found[index].to(part.device) for index, part in enumerate(parts)]


def compute_device(part: Tensor, weight: Tensor) -> torch.device:
    """Where to compute with a part of `weight`: on the mesh's device, also if the optimizer's weights are offloaded."""
    if isinstance(weight, DTensor) and weight.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return part.device


def tp_cut(weight: Tensor) -> TpCut | None:
    """How tp cuts a weight; None for one that is whole on its ranks."""
    return next((TpCut(group, dim) for name, group, dim in _cuts(weight) if name == "tp"), None)


def over_tp(part: Tensor, tp: TpCut | None, function: Function) -> Tensor:
    """`function` of the tensor of which tp's ranks have equal parts; returns this rank's part."""
    if tp is None:
        return function(part)
    size = tp.group.size()
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=tp.group)
    whole = function(torch.cat(parts, dim=tp.dim))
    return whole.chunk(size, dim=tp.dim)[tp.group.rank()].contiguous()


def _cuts(weight: Tensor) -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    """The mesh dimensions that divide a weight: their names and groups, and the dimension that they cut."""
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        for index, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), weight.placements, strict=True)):
            if isinstance(placement, Shard | _StridedShard) and mesh.size(index) > 1:
                yield name, mesh.get_group(index), placement.dim


def _piece(index: int, part: Tensor, weight: Tensor) -> _Piece:
    rows_group, tp, rows = None, tp_cut(weight), part.shape[0]
    if isinstance(weight, DTensor):
        rows = weight.shape[0] // (tp.group.size() if tp is not None and tp.dim == 0 else 1)
        for name, group, dim in _cuts(weight):
            if name != "tp":
                assert dim == 0, "FSDP divides rows"
                rows_group = group
    return _Piece(
        index=index, part=part.to(compute_device(part, weight)), columns=part.shape[1], rows=rows,
        rows_group=rows_group, tp=tp,
    )  # fmt: skip


def _round(pieces: Sequence[_Piece], group: dist.ProcessGroup | None, function: Function) -> dict[int, Tensor]:
    """At most one matrix per rank of `group`: the k-th is computed by the k-th rank."""
    if group is None:
        return {piece.index: over_tp(piece.part, piece.tp, function) for piece in pieces}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = pieces[rank] if rank < len(pieces) else None
    sent = [pieces[k].part.numel() if k < len(pieces) else 0 for k in range(size)]
    got = [0] * size if mine is None else [count * mine.columns for count in _rows(mine.rows, size)]
    flat = torch.cat([piece.part.reshape(-1) for piece in pieces])
    whole = flat.new_empty(sum(got))
    dist.all_to_all_single(whole, flat, got, sent, group=group)
    if mine is not None:
        whole = over_tp(whole.view(mine.rows, mine.columns), mine.tp, function).reshape(-1)
    back = torch.empty_like(flat)
    dist.all_to_all_single(back, whole, sent, got, group=group)
    parts = torch.split(back, sent[: len(pieces)])
    return {piece.index: part.view_as(piece.part) for piece, part in zip(pieces, parts, strict=True)}


def _rows(rows: int, size: int) -> list[int]:
    """The rows of each rank, as torch.chunk divides them.

    >>> _rows(5, 4)
    [2, 2, 1, 0]
    """
    most = -(-rows // size)
    return [max(0, min(most, rows - rank * most)) for rank in range(size)]
