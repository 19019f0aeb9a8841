"""Group target files whose shards come from the same source chunks, to write them together. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from titan_ckpt.resharding.target import TargetLayout
from titan_ckpt.rewrite.plan import SourceTensor
from titan_ckpt.sharding.box_columns import overlaps
from titan_ckpt.sharding.repeating_columns import Int64s

_MERGE_EVERY = 64


def group_ranks(target: TargetLayout, sources: list[SourceTensor], *, max_files: int) -> list[list[int]]:
    """Target ranks in groups of at most `max_files`, in order of rank.

    Ranks that share a source chunk are in one group, so that the chunk is read once. More than `max_files` connected ranks are
    split in order of rank, which keeps tensor-parallel neighbours together.
    """
    root = {rank: rank for rank in target.ranks_with_files()}

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    for code in _edges(target, sources).tolist():
        a, b = (find(rank) for rank in divmod(code, target.mesh.world_size))
        root[max(a, b)] = min(a, b)
    together: dict[int, list[int]] = {}
    for rank in root:
        together.setdefault(find(rank), []).append(rank)
    return [ranks[i : i + max_files] for ranks in together.values() for i in range(0, len(ranks), max_files)]


def _edges(target: TargetLayout, sources: list[SourceTensor]) -> Int64s:
    """Pairs of ranks that share a source chunk, each encoded as rank * world_size + rank."""
    known: dict[tuple[bytes, bytes], tuple[Int64s, Int64s]] = {}
    found: list[Int64s] = []
    for index, source in enumerate(sources):
        tensor = target.tensors[index]
        offsets, sizes = target.boxes_at(index)
        key = (source.box_offsets.tobytes() + source.box_sizes.tobytes(), offsets.tobytes() + sizes.tobytes())
        if key not in known:
            known[key] = _sharing(*overlaps(source.box_offsets, source.box_sizes, offsets, sizes))
        first, other = known[key]
        ranks = target.rank[tensor.first_chunk : tensor.first_chunk + tensor.num_chunks]
        codes = ranks[first] * target.mesh.world_size + ranks[other]
        found.append(np.unique(codes[ranks[first] != ranks[other]]))
        if len(found) >= _MERGE_EVERY:
            found = [np.unique(np.concatenate(found))]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *found]))


def _sharing(chunks: Int64s, shards: Int64s) -> tuple[Int64s, Int64s]:
    """(first, other): every shard that touches a chunk, paired with the first shard that does."""
    order = np.lexsort((shards, chunks))
    chunks, shards = chunks[order], shards[order]
    starts = np.flatnonzero(np.diff(chunks, prepend=-1))
    counts = np.diff(np.append(starts, len(chunks)))
    return np.repeat(shards[starts], counts), shards


def spread(groups: Iterable[list[int]], workers: int, worker: int) -> list[list[int]]:
    """The groups that worker number `worker` writes."""
    return [group for index, group in enumerate(groups) if index % workers == worker]
