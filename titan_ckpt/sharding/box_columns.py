"""Boxes by the thousand as numpy columns: all shards of a tensor at once, and the pairs of boxes that overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan_ckpt.sharding.mesh import AXES, FOLD, MeshSpec
from titan_ckpt.sharding.placement import Placements, Shape
from titan_ckpt.sharding.repeating_columns import Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardColumns:
    """All non-empty shards of a tensor: boxes `[n, ndim]`, and the rank of each at coordinate 0 of the replicating axes.

    Replica `r` of the shards is on `ranks + replica_ranks[r]`; pipeline coordinates are not replicas.
    """

    offsets: Int64s
    sizes: Int64s
    ranks: Int64s
    replica_ranks: Int64s


def shard_columns(global_shape: Shape, placements: Placements, mesh: MeshSpec) -> ShardColumns:
    """The shards of a tensor on one pipeline coordinate of `mesh`, in the order of the cuts: `shard_box` for all ranks."""
    ndim = len(global_shape)
    offsets = np.zeros((1, ndim), dtype=np.int64)
    sizes = np.array([global_shape], dtype=np.int64).reshape(1, ndim)
    ranks = np.zeros(1, dtype=np.int64)
    for axes, shard in placements.items():
        steps = _rank_steps(mesh, axes.split(FOLD))
        degree = len(steps)
        index = np.tile(np.arange(degree), len(ranks))
        offsets, sizes = np.repeat(offsets, degree, axis=0), np.repeat(sizes, degree, axis=0)
        length = sizes[:, shard.dim]
        full = -(-length // degree)
        start = np.minimum(full * index, length)
        offsets[:, shard.dim] += start
        sizes[:, shard.dim] = np.minimum(full, length - start)
        ranks = np.repeat(ranks, degree) + np.tile(steps, len(ranks))
    cut_axes = {axis for axes in placements for axis in axes.split(FOLD)} | {"pp"}
    replicas = _rank_steps(mesh, [axis for axis in AXES if axis not in cut_axes])
    keep = (sizes > 0).all(axis=1)
    if not keep.any():  # an empty tensor has one empty shard
        return ShardColumns(
            offsets=np.zeros((1, ndim), dtype=np.int64),
            sizes=np.array([global_shape], dtype=np.int64),
            ranks=np.zeros(1, dtype=np.int64),
            replica_ranks=replicas,
        )
    return ShardColumns(offsets=offsets[keep], sizes=sizes[keep], ranks=ranks[keep], replica_ranks=replicas)


def _rank_steps(mesh: MeshSpec, axes: list[str]) -> Int64s:
    """Ranks along `axes` (row-major, in the order of `axes`) with all other coordinates 0."""
    stride, strides = 1, {}
    for axis, degree in zip(reversed(AXES), reversed(mesh.degrees), strict=True):
        strides[axis], stride = stride, stride * degree
    steps = np.zeros(1, dtype=np.int64)
    for axis in axes:
        steps = np.add.outer(steps, np.arange(mesh.degree(axis), dtype=np.int64) * strides[axis]).ravel()
    return steps


def overlaps(a_offsets: Int64s, a_sizes: Int64s, b_offsets: Int64s, b_sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Index pairs (i of a, j of b) of boxes that overlap, ordered by j, then by position along the dimension that `a` cuts most.

    A sorted join along that dimension, then a filter by the others: near-linear for regular cuts.
    """
    i, j = _candidates(a_offsets, a_sizes, b_offsets, b_sizes)
    begin = np.maximum(a_offsets[i], b_offsets[j])
    end = np.minimum(a_offsets[i] + a_sizes[i], b_offsets[j] + b_sizes[j])
    keep = (begin < end).all(axis=1)
    return i[keep], j[keep]


def _candidates(a_offsets: Int64s, a_sizes: Int64s, b_offsets: Int64s, b_sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs that overlap along the dimension that `a` cuts most; all pairs for scalars."""
    num_a, ndim = a_offsets.shape
    if ndim == 0:
        return np.tile(np.arange(num_a), len(b_offsets)), np.repeat(np.arange(len(b_offsets)), num_a)
    dim = max(range(ndim), key=lambda d: len(np.unique(a_offsets[:, d])))
    order = np.argsort(a_offsets[:, dim], kind="stable")
    starts = a_offsets[order, dim]
    # The running maximum keeps the ends sorted even if boxes of `a` overlap or differ in length.
    ends = np.maximum.accumulate((a_offsets[:, dim] + a_sizes[:, dim])[order])
    low = np.searchsorted(ends, b_offsets[:, dim], side="right")
    high = np.searchsorted(starts, b_offsets[:, dim] + b_sizes[:, dim], side="left")
    counts = np.maximum(high - low, 0)
    first = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return order[first + np.arange(len(first))], np.repeat(np.arange(len(b_offsets)), counts)
