"""How a tensor is cut over a mesh: boxes, shards and the order of cuts, by torch's conventions.

`Placements` maps an axis (or axes folded into one, `dp_shard+cp`) to `Shard(dim)`; an omitted axis replicates. The order of
the mapping is the order of the cuts: `{"tp": Shard(0), "dp_shard": Shard(0)}` cuts dimension 0 by tp, then each shard by
dp_shard. This is what FSDP2 over TP does and what DTensor writes as `(_StridedShard(0, split_factor=tp), Shard(0))`. Placements
do not include `pp`: the coordinates of `pp` that hold a tensor are its `stages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from titan_ckpt.sharding.mesh import MeshSpec

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along `dim`."""

    dim: int


Placements: TypeAlias = Mapping[str, Shard]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor. Sizes may be 0."""

    offsets: Shape
    sizes: Shape

    @property
    def num_elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.sizes)

    @staticmethod
    def whole(global_shape: Shape) -> Box:
        """The box of the whole tensor."""
        return Box((0,) * len(global_shape), global_shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, None if the boxes do not overlap."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(o1 + s1, o2 + s2)
            for o1, s1, o2, s2 in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(e - s for s, e in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, outer: Box) -> Box:
        """The same box with the corner of `outer` as origin."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def shard_range(size: int, degree: int, index: int) -> tuple[int, int]:
    """(start, length) of shard `index` of `degree`, cut as by `torch.chunk`.

    Shards have ceil(size / degree) elements, then one may be shorter and the rest are empty.

    >>> [shard_range(6, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 0)]
    """
    full = -(-size // degree)
    start = min(full * index, size)
    return start, min(full, size - start)


def shard_box(global_shape: Shape, placements: Placements, mesh: MeshSpec, rank: int) -> Box:
    """The box of a tensor that `rank` holds; sizes may be 0 where a dimension is shorter than the axis.

    >>> shard_box((6, 4), {"dp_shard": Shard(0)}, MeshSpec.parse("dp_shard=4"), rank=3)
    Box(offsets=(6, 0), sizes=(0, 4))
    """
    return box_at(global_shape, placements, mesh, mesh.coordinate(rank))


def box_at(global_shape: Shape, placements: Placements, mesh: MeshSpec, coordinate: Mapping[str, int]) -> Box:
    """`shard_box` by coordinate instead of rank."""
    offsets, sizes = [0] * len(global_shape), list(global_shape)
    for axes, shard in placements.items():
        start, length = shard_range(sizes[shard.dim], mesh.degree(axes), mesh.fold(axes, coordinate))
        offsets[shard.dim] += start
        sizes[shard.dim] = length
    return Box(tuple(offsets), tuple(sizes))


def shard_boxes(global_shape: Shape, placements: Placements, mesh: MeshSpec) -> Iterator[Box]:
    """The distinct non-empty boxes of a tensor in the order of the cuts."""
    axes_list = list(placements)

    def cut(level: int, offsets: list[int], sizes: list[int]) -> Iterator[Box]:
        if level == len(axes_list):
            yield Box(tuple(offsets), tuple(sizes))
            return
        dim, degree = placements[axes_list[level]].dim, mesh.degree(axes_list[level])
        for index in range(degree):
            start, length = shard_range(sizes[dim], degree, index)
            if length == 0:
                return
            yield from cut(
                level + 1,
                [*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]],
                [*sizes[:dim], length, *sizes[dim + 1 :]],
            )

    if 0 in global_shape:
        yield Box.whole(global_shape)
    else:
        yield from cut(0, [0] * len(global_shape), list(global_shape))


def format_placements(placements: Placements) -> str:
    """Placements as text.

    >>> format_placements({"tp": Shard(0), "dp_shard": Shard(0)}), format_placements({})
    ('tp:0 dp_shard:0', 'replicated')
    """
    return " ".join(f"{axes}:{shard.dim}" for axes, shard in placements.items()) or "replicated"


def strides(sizes: Shape) -> Shape:
    """Row-major strides in elements."""
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def span(outer: Box, inner: Box) -> tuple[int, int]:
    """(first, count) of the shortest row-major range of elements of `outer` that contains `inner`."""
    steps = strides(outer.sizes)
    place = inner.relative_to(outer)
    first = sum(offset * step for offset, step in zip(place.offsets, steps, strict=True))
    last = first + sum((size - 1) * step for size, step in zip(place.sizes, steps, strict=True))
    return first, last - first + 1
