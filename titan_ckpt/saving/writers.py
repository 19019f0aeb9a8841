"""Choose the rank that writes each box: every box once, replicas spread evenly by bytes. Pure, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from titan_ckpt.errors import TitanError
from titan_ckpt.format.manifest import TensorEntry
from titan_ckpt.format.structure import Structure
from titan_ckpt.saving.replicas import BoxKey, Bucket, Replicas, buckets_of
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box, Shape, Shard
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.sharding.tiling import find_flaws


class HeldShard(Protocol):
    """A rank's shard of a tensor (`titan_ckpt.state.state_dict.LocalShard`, without its torch)."""

    @property
    def fqn(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def global_shape(self) -> Shape: ...
    @property
    def placements(self) -> tuple[tuple[str, int], ...] | None: ...
    @property
    def offsets(self) -> Shape: ...
    @property
    def sizes(self) -> Shape: ...
    @property
    def box(self) -> Box: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The division of one state over the ranks.

    `items[rank]` are indices into that rank's list of shards, in file order, `copies[rank]` those of the shards that other ranks
    hold too, one list for each of its `buckets`. `rows[i]` is the index, in all ranks' items
    concatenated, of row `i` of the chunk table. `structure` is the nesting of all ranks' states together.
    """

    items: list[list[int]]
    objects: list[list[str]]
    buckets: list[Bucket]
    copies: list[list[list[int]]]
    tensors: tuple[TensorEntry, ...]
    rows: Int64s
    box_offsets: Int64s
    box_sizes: Int64s
    structure: Structure | None = None


@dataclass(slots=True)
class _Tensor:
    first: HeldShard
    first_rank: int
    boxes: dict[tuple[Shape, Shape], list[tuple[int, int]]] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)


def divide(
    held: Sequence[Sequence[HeldShard]],
    objects: Sequence[Sequence[str]],
    mesh: MeshSpec | None,
    *,
    replicas: Replicas = Replicas.EQUAL,
) -> Share:
    """Choose the writer of every box from the shards of each rank: with `replicas="first"` its lowest rank.

    TitanError if ranks disagree about a tensor or about what a name is, or if together they do not hold all of a tensor.
    """
    tensors = _collect(held)
    _check_kinds(tensors, objects)
    _check_complete(tensors)
    writers = _assign(held, tensors, from_first=replicas == Replicas.FIRST)
    buckets = [] if replicas == Replicas.FIRST else buckets_of(_shared(tensors))
    items, position = _file_order(held, writers)
    base = np.concatenate([[0], np.cumsum([len(order) for order in items])])
    entries: list[TensorEntry] = []
    rows: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for fqn in sorted(tensors):
        boxes = sorted(tensors[fqn].boxes)
        entries.append(_entry(tensors[fqn], first_chunk=len(rows), num_chunks=len(boxes), mesh=mesh))
        for box in boxes:
            rank, index = writers[(fqn, box)]
            rows.append(int(base[rank]) + position[(rank, index)])
            offsets.extend(box[0])
            sizes.extend(box[1])
    return Share(
        items=items,
        objects=_divide_objects(objects),
        buckets=buckets,
        copies=[[bucket.items[rank] for bucket in buckets if rank in bucket.items] for rank in range(len(held))],
        tensors=tuple(entries),
        rows=np.array(rows, dtype=np.int64),
        box_offsets=np.array(offsets, dtype=np.int64),
        box_sizes=np.array(sizes, dtype=np.int64),
    )


def _collect(held: Sequence[Sequence[HeldShard]]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for rank, items in enumerate(held):
        for index, item in enumerate(items):
            tensor = tensors.setdefault(item.fqn, _Tensor(item, rank))
            _check_agreement(tensor, item, rank)
            tensor.ranks.append(rank)
            if item.box.num_elements > 0 or 0 in item.global_shape:
                tensor.boxes.setdefault((item.offsets, item.sizes), []).append((rank, index))
    return tensors


def _check_agreement(tensor: _Tensor, item: HeldShard, rank: int) -> None:
    first = tensor.first
    for name in ("dtype", "global_shape", "placements"):
        expected, found = getattr(first, name), getattr(item, name)
        if expected != found:
            raise TitanError(f"{item.fqn}: rank {tensor.first_rank} has {name} {expected}, rank {rank} has {found}")


def _check_kinds(tensors: Mapping[str, _Tensor], objects: Sequence[Sequence[str]]) -> None:
    """A name is a tensor or another value, on all ranks alike; a reader would get one of them and never hear of the other."""
    for rank, names in enumerate(objects):
        for name in names:
            if name in tensors:
                raise TitanError(
                    f"{name}: rank {tensors[name].first_rank} has a tensor, rank {rank} another value under this name; "
                    "give them different names"
                )


def _check_complete(tensors: dict[str, _Tensor]) -> None:
    """The boxes must tile their tensors: every element on some rank, and in one box only."""
    equal: dict[tuple[Shape, tuple[tuple[Shape, Shape], ...]], list[_Tensor]] = {}
    for tensor in tensors.values():
        equal.setdefault((tensor.first.global_shape, tuple(tensor.boxes)), []).append(tensor)
    for (shape, boxes), alike in equal.items():
        offsets, sizes = (
            np.array([box[n] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape)) for n in (0, 1)
        )
        for flaw in find_flaws([shape], np.zeros(len(boxes), dtype=np.int64), offsets, sizes).values():
            first = alike[0]
            raise TitanError(
                f"{first.first.fqn}: {flaw} of the {len(boxes)} that ranks {_some(first.ranks)} hold; together they must "
                f"hold the whole tensor {shape} once. Is a rank or a stage left out?"
            )


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


def _shared(tensors: dict[str, _Tensor]) -> Iterator[tuple[BoxKey, list[tuple[int, int]]]]:
    """The boxes that several ranks hold, with their holders."""
    for fqn, tensor in tensors.items():
        for box, holders in tensor.boxes.items():
            if len(holders) > 1:
                yield (fqn, box), holders


def _assign(
    held: Sequence[Sequence[HeldShard]], tensors: dict[str, _Tensor], *, from_first: bool
) -> dict[tuple[str, tuple[Shape, Shape]], tuple[int, int]]:
    """The (rank, index) that writes each box: its only holder, else the holder with the fewest bytes so far."""
    load = [0] * len(held)
    writers, shared = {}, []
    for fqn, tensor in tensors.items():
        for box, holders in tensor.boxes.items():
            size_bytes = held[holders[0][0]][holders[0][1]].size_bytes
            if len(holders) == 1 or from_first:
                writers[(fqn, box)] = holders[0]
                load[holders[0][0]] += size_bytes
            else:
                shared.append((-size_bytes, fqn, box, holders))
    for negative_size, fqn, box, holders in sorted(shared):
        writer = min(holders, key=lambda holder: (load[holder[0]], holder[0]))
        writers[(fqn, box)] = writer
        load[writer[0]] -= negative_size
    return writers


def _file_order(
    held: Sequence[Sequence[HeldShard]], writers: dict[tuple[str, tuple[Shape, Shape]], tuple[int, int]]
) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
    """Items per rank in order of name, and the position of each (rank, index) in that order."""
    items: list[list[int]] = [[] for _ in held]
    for rank, index in writers.values():
        items[rank].append(index)
    for rank, order in enumerate(items):
        order.sort(key=lambda index, rank=rank: (held[rank][index].fqn, held[rank][index].offsets))  # type: ignore[misc]
    return items, {(rank, index): n for rank, order in enumerate(items) for n, index in enumerate(order)}


def _entry(tensor: _Tensor, *, first_chunk: int, num_chunks: int, mesh: MeshSpec | None) -> TensorEntry:
    first = tensor.first
    return TensorEntry(
        fqn=first.fqn,
        dtype=first.dtype,
        global_shape=first.global_shape,
        placements=None if first.placements is None else {axes: Shard(dim) for axes, dim in first.placements},
        stages=_stages(tensor.ranks, mesh),
        first_chunk=first_chunk,
        num_chunks=num_chunks,
    )


def _stages(ranks: list[int], mesh: MeshSpec | None) -> tuple[int, ...] | None:
    if mesh is None or mesh.degree("pp") == 1:
        return None
    per_stage = mesh.world_size // mesh.degree("pp")
    stages = tuple(sorted({rank // per_stage for rank in ranks}))
    return None if len(stages) == mesh.degree("pp") else stages


def _divide_objects(objects: Sequence[Sequence[str]]) -> list[list[str]]:
    """Assign each value to the lowest rank that has it."""
    mine: dict[int, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for rank, names in enumerate(objects):
        for name in names:
            if name not in seen:
                seen.add(name)
                mine[rank].append(name)
    return [sorted(mine[rank]) for rank in range(len(objects))]
