"""The layout of a reshard's target: which rank holds which chunk, and where in that rank's file. No torch, no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from titan_ckpt.errors import PlanError
from titan_ckpt.format.manifest import ChunkTable, Manifest, ObjectEntry, TensorEntry
from titan_ckpt.format.torch_blob import align, envelope
from titan_ckpt.resharding.placement_rules import FSDP_AXES, PlacementRule, check_dims, match_rule, tensor_parallel
from titan_ckpt.sharding.box_columns import ShardColumns, shard_columns
from titan_ckpt.sharding.mesh import FOLD, MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec, PipelineStyle, StageTable, count_layers, stage_table
from titan_ckpt.sharding.placement import Box, Placements, Shape, Shard
from titan_ckpt.sharding.repeating_columns import Column, Int64s, SharedColumn

_FSDP = ("dp_shard", "cp", FSDP_AXES, "dp_shard+ep", "cp+ep", f"{FSDP_AXES}+ep")  # `ep` alone is how experts are cut
_EP_OVER_CP = "cp+ep"  # beside dp_shard: how the trainer cuts experts over all ranks of cp; alone: FSDP's
_ROLES = ("model.", "optimizer.state.")


class CutOrigin(StrEnum):
    """Where a tensor's cut on the target mesh comes from."""

    RECORDED = "recorded"  # the source's manifest
    RULE = "rule"  # a user's rule
    TABLE = "table"  # the table of Llama-shaped models
    DEFAULT = "default"  # FSDP shards dimension 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlacement:
    """How a tensor is cut on the target mesh, and where its cuts come from."""

    placements: Placements
    stages: tuple[int, ...] | None
    origins: frozenset[CutOrigin]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AxisCut:
    """One axis's (or folded axes') cut of a tensor, None if it does not cut; no `origin` if the axis has degree 1."""

    axes: str
    shard: Shard | None
    origin: CutOrigin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placer:
    """Chooses placements on mesh `target` for tensors saved on mesh `source` (None: not recorded)."""

    source: MeshSpec | None
    target: MeshSpec
    rules: tuple[PlacementRule, ...] = ()
    stages: StageTable | None = None

    def place(self, entry: TensorEntry) -> TargetPlacement:
        """The placement of `entry`. PlanError if the target has a tensor-parallel axis and no rule gives its cut of `entry`."""
        is_parameter = self.source is None or entry.fqn.startswith(_ROLES)
        stages = self.stages.coordinates(entry.fqn) if self.stages is not None and is_parameter else None
        rule = match_rule(self.rules, entry.fqn)
        if rule is not None:
            check_dims(entry.fqn, rule, len(entry.global_shape))
            return TargetPlacement(placements=rule, stages=stages, origins=frozenset({CutOrigin.RULE}))
        if not entry.global_shape or not is_parameter:
            return TargetPlacement(placements={}, stages=stages, origins=frozenset({CutOrigin.RECORDED}))
        entry = _with_own_ep(entry)
        experts = self._model_axis(entry, "ep")
        fsdp_axes = self._fsdp_axes(are_experts=experts.shard is not None)
        cuts = [self._model_axis(entry, "tp"), experts, self._fsdp(entry, fsdp_axes)]
        dims = {cut.axes: cut.shard for cut in cuts if cut.shard is not None}
        check_dims(entry.fqn, dims, len(entry.global_shape))
        return TargetPlacement(
            placements=self._in_recorded_order(entry, dims, fsdp_axes),
            stages=stages,
            origins=frozenset(cut.origin for cut in cuts if cut.origin is not None),
        )

    def _is_known(self, entry: TensorEntry, axes: Iterable[str]) -> bool:
        """Whether the source shows how these axes cut the tensor: its mesh had them, or its placements name them anyway."""
        if self.source is None or entry.placements is None:
            return False
        return any(axis in entry.placements for axis in axes) or any(self.source.degree(axis) > 1 for axis in axes)

    def _model_axis(self, entry: TensorEntry, axis: str) -> _AxisCut:
        """The cut of `tp` or `ep`: as recorded, else from the table of Llama-shaped models."""
        if self._is_known(entry, (axis,)):
            assert entry.placements is not None
            return _AxisCut(axes=axis, shard=entry.placements.get(axis), origin=CutOrigin.RECORDED)
        if self.target.degree(axis) == 1:
            return _AxisCut(axes=axis, shard=None, origin=None)
        table = tensor_parallel(entry.fqn)
        if table is not None:
            return _AxisCut(axes=axis, shard=table.get(axis), origin=CutOrigin.TABLE)
        if axis == "ep":
            return _AxisCut(axes=axis, shard=None, origin=None)
        raise PlanError(
            f"{entry.fqn}: no placements known for axis {axis} (the source mesh is {self.source or 'not recorded'}, and the name "
            f"is not in the table of Llama-shaped models). Describe how it is cut in a file: [placements] "
            f'"{entry.fqn}" = ["{axis}:0", "{FSDP_AXES}:0"], and give it with --placements'
        )

    def _fsdp_axes(self, *, are_experts: bool) -> str:
        """The axes that FSDP shards over on the target: of dp_shard, cp and, but for experts, ep those that it has."""
        found = [axis for axis in ("dp_shard", "cp") if self.target.degree(axis) > 1] or ["dp_shard"]
        has_ep = self.target.degree("ep") > 1 and not are_experts
        return FOLD.join([*found, "ep"] if has_ep else found)

    def _fsdp(self, entry: TensorEntry, fsdp_axes: str) -> _AxisCut:
        """FSDP's cut: as recorded, else dimension 0, as `fully_shard` does."""
        if self._is_known(entry, _FSDP):
            placements = entry.placements or {}
            recorded = next((placements[axes] for axes in _FSDP if axes in placements), None)
            return _AxisCut(axes=fsdp_axes, shard=recorded, origin=CutOrigin.RECORDED)
        origin = CutOrigin.DEFAULT if self.target.degree(fsdp_axes) > 1 else None
        return _AxisCut(axes=fsdp_axes, shard=Shard(0), origin=origin)

    def _in_recorded_order(self, entry: TensorEntry, dims: Mapping[str, Shard], fsdp_axes: str) -> Placements:
        """The cuts in the source's order if it has both, else tensor parallelism before FSDP."""
        recorded = [fsdp_axes if axes in _FSDP else axes for axes in entry.placements or {}]
        order = sorted(dims, key=lambda axes: recorded.index(axes) if axes in recorded else -1)
        return {axes: dims[axes] for axes in (order if len(recorded) > 1 else dims)}


def _with_own_ep(entry: TensorEntry) -> TensorEntry:
    """`entry` with experts that were cut over cp and ep as if cut by ep: on another mesh, `ep` is an axis of its own."""
    placements = entry.placements or {}
    if _EP_OVER_CP not in placements or "dp_shard" not in placements:
        return entry
    return replace(entry, placements={"ep" if axes == _EP_OVER_CP else axes: cut for axes, cut in placements.items()})


def stages_for(manifest: Manifest, mesh: MeshSpec, *, stages_per_rank: int | None = None) -> StageTable | None:
    """Pipeline coordinates on `mesh`; None without a pipeline. Without a recorded pipeline, layers are divided evenly.

    `stages_per_rank` overrides the recorded number, for a target with another pipeline schedule.
    """
    if mesh.degree("pp") == 1:
        return None
    spec = _pipeline(manifest)
    if stages_per_rank is not None:
        spec = replace(
            spec, stages_per_rank=stages_per_rank, style=spec.style if stages_per_rank == 2 else PipelineStyle.LOOP
        )
    return stage_table(spec, mesh.degree("pp"))


def _pipeline(manifest: Manifest) -> PipelineSpec:
    if manifest.pipeline is not None:
        return PipelineSpec.from_dict(manifest.pipeline)
    num_layers = count_layers([tensor.fqn for tensor in manifest.tensors])
    if num_layers == 0:
        raise PlanError("mesh with pp > 1: the source records no pipeline, and no tensor name has a layer number")
    return PipelineSpec(num_layers=num_layers)


@dataclass(frozen=True, kw_only=True)
class TargetLayout:
    """Every chunk of the target checkpoint. `rank`: the rank of each row of `table`; `blob_end`: where each rank's blobs end."""

    mesh: MeshSpec
    tensors: tuple[TensorEntry, ...]
    table: ChunkTable
    rank: Column
    first_coordinate: Int64s
    blob_end: Int64s
    objects: tuple[ObjectEntry, ...]

    @cached_property
    def _by_rank(self) -> tuple[Int64s, Int64s]:
        rank = np.asarray(self.rank)
        counts = np.bincount(rank, minlength=self.mesh.world_size)
        return np.argsort(rank, kind="stable"), np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def _first_rows(self) -> list[int]:
        return [tensor.first_chunk for tensor in self.tensors]

    def rows_of(self, rank: int) -> Int64s:
        """Rows of the chunks in a rank's file, in file order."""
        order, starts = self._by_rank
        return order[starts[rank] : starts[rank + 1]]

    def tensor_of(self, row: int) -> TensorEntry:
        """The tensor of a row."""
        return self.tensors[self._index_of(row)]

    def _index_of(self, row: int) -> int:
        return bisect_right(self._first_rows, row) - 1

    def box(self, row: int) -> Box:
        """The box of a row."""
        index = self._index_of(row)
        tensor = self.tensors[index]
        ndim = len(tensor.global_shape)
        start = int(self.first_coordinate[index]) + (row - tensor.first_chunk) * ndim
        at = slice(start, start + ndim)
        return Box(tuple(self.table.box_offsets[at].tolist()), tuple(self.table.box_sizes[at].tolist()))

    def boxes(self, fqn: str) -> tuple[Int64s, Int64s]:
        """(offsets, sizes) of a tensor's chunks, each `[num_chunks, ndim]`."""
        index = next(index for index, tensor in enumerate(self.tensors) if tensor.fqn == fqn)
        return self.boxes_at(index)

    def boxes_at(self, index: int) -> tuple[Int64s, Int64s]:
        """`boxes` of the `index`-th tensor."""
        tensor = self.tensors[index]
        shape = (tensor.num_chunks, len(tensor.global_shape))
        at = slice(int(self.first_coordinate[index]), int(self.first_coordinate[index + 1]))
        return self.table.box_offsets[at].reshape(shape), self.table.box_sizes[at].reshape(shape)

    def ranks_with_files(self) -> list[int]:
        """Ranks that hold at least one chunk or value."""
        ranks = set(np.unique(np.asarray(self.rank)).tolist())
        return sorted(ranks | ({0} if self.objects else set()))

    def file_bytes(self) -> Int64s:
        """Size of every rank's file."""
        sizes = self.blob_end.copy()
        sizes[0] = max([sizes[0], *(entry.offset + entry.length for entry in self.objects)])
        return sizes


def lay_out(
    tensors: Iterable[tuple[TensorEntry, TargetPlacement]],
    objects: Iterable[ObjectEntry],
    mesh: MeshSpec,
    attempt_path: str,
) -> TargetLayout:
    """Assign every shard to a rank (of a replica's holders, to the emptiest) and stack each rank's blobs.

    `objects` are the source's values; they go to rank 0's file, `attempt_path`.
    """
    items = list(tensors)
    cuts = _Cuts(mesh)
    shards = [cuts.of(entry.global_shape, placed.placements) for entry, placed in items]
    frames = [cuts.frames(entry.dtype, shard) for (entry, _), shard in zip(items, shards, strict=True)]
    ranks = _deal([placed for _, placed in items], shards, frames, mesh)
    counts = [len(shard.ranks) for shard in shards]
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    widths = [count * len(entry.global_shape) for (entry, _), count in zip(items, counts, strict=True)]
    rank = SharedColumn(ranks)
    prefix, payload, length = (SharedColumn([f[column] for f in frames]) for column in range(3))
    offset, blob_end = _stack(ranks, [f[2] for f in frames], mesh.world_size)
    table = ChunkTable(
        file=rank, offset=offset, length=length, payload_offset=prefix, payload_length=payload,
        codec=SharedColumn([np.broadcast_to(np.int64(0), count) for count in counts]),
        box_offsets=SharedColumn([s.offsets.ravel() for s in shards]), box_sizes=SharedColumn([s.sizes.ravel() for s in shards]),
        digests=None,
    )  # fmt: skip
    entries = [
        replace(entry, placements=placed.placements, stages=placed.stages, first_chunk=int(first), num_chunks=count)
        for (entry, placed), first, count in zip(items, firsts, counts, strict=False)
    ]
    return TargetLayout(
        mesh=mesh,
        tensors=tuple(entries),
        table=table,
        rank=rank,
        first_coordinate=np.concatenate([[0], np.cumsum(widths)]).astype(np.int64),
        blob_end=blob_end,
        objects=tuple(_place_objects(objects, int(blob_end[0]), attempt_path)),
    )


class _Cuts:
    """Shards and frames; equal patterns are computed once."""

    def __init__(self, mesh: MeshSpec) -> None:
        self._mesh = mesh
        self._cuts: dict[tuple[Shape, tuple[tuple[str, Shard], ...]], ShardColumns] = {}
        self._frames: dict[tuple[str, int], Int64s] = {}

    def of(self, global_shape: Shape, placements: Placements) -> ShardColumns:
        key = (global_shape, tuple(placements.items()))
        if key not in self._cuts:
            self._cuts[key] = shard_columns(global_shape, placements, self._mesh)
        return self._cuts[key]

    def frames(self, dtype: str, shard: ShardColumns) -> Int64s:
        """Lengths of every shard's prefix, payload and blob, `[3, n]`."""
        key = (dtype, id(shard))
        if key not in self._frames:
            distinct, inverse = np.unique(shard.sizes, axis=0, return_inverse=True)
            rows = [envelope(dtype, tuple(sizes)) for sizes in distinct.tolist()]
            lengths = np.array([(len(f.prefix), f.payload_length, f.length) for f in rows], dtype=np.int64)
            self._frames[key] = np.ascontiguousarray(lengths[inverse.reshape(-1)].T)
        return self._frames[key]


def _deal(
    placed: list[TargetPlacement], shards: list[ShardColumns], frames: list[Int64s], mesh: MeshSpec
) -> list[Int64s]:
    """The rank of every shard of every tensor: first shards with one holder, then the rest, largest first."""
    load = np.zeros(mesh.world_size, dtype=np.int64)
    per_stage = mesh.world_size // mesh.degree("pp")
    dealt: list[Int64s] = [np.zeros(0, dtype=np.int64)] * len(placed)

    known: dict[tuple[int, tuple[int, ...] | None], Int64s] = {}

    def holders(index: int) -> Int64s:
        shard, stages = shards[index], placed[index].stages
        key = (id(shard), stages)
        if key not in known:
            coordinates = np.arange(mesh.degree("pp")) if stages is None else np.array(stages)
            replicas = np.add.outer(coordinates * per_stage, shard.replica_ranks).ravel()
            known[key] = np.add.outer(shard.ranks, replicas)
        return known[key]

    shared = []
    for index in range(len(shards)):
        candidates = holders(index)
        if candidates.shape[1] > 1:
            shared.append(index)
            continue
        dealt[index] = candidates[:, 0]
        load[dealt[index]] += frames[index][2]

    for index in sorted(shared, key=lambda i: -int(frames[i][2, 0])):
        candidates = holders(index)
        best = np.argmin(load[candidates], axis=1)
        dealt[index] = candidates[np.arange(len(candidates)), best]
        load[dealt[index]] += frames[index][2]
    return dealt


def _stack(ranks: list[Int64s], lengths: list[Int64s], world_size: int) -> tuple[Int64s, Int64s]:
    """Offset of every blob in its rank's file, and the end of each rank's last blob. A rank has at most one shard of a tensor."""
    blob_end, filled = np.zeros(world_size, dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    offset, row = np.empty(sum(map(len, ranks)), dtype=np.int64), 0
    for rank, length in zip(ranks, lengths, strict=True):
        start = filled[rank]
        blob_end[rank] = start + length
        filled[rank] = start + -(-length // align(1)) * align(1)
        offset[row : row + len(rank)] = start
        row += len(rank)
    return offset, blob_end


def _place_objects(objects: Iterable[ObjectEntry], end: int, path: str) -> Iterator[ObjectEntry]:
    for entry in objects:
        yield replace(entry, file=path, offset=end)
        end += entry.length
