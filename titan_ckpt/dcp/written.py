"""Between DCP's planner and our manifest: what to write of a plan, and what the ranks wrote as entries and chunk table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import UsageError
from titan_ckpt.format.manifest import DIGEST_BYTES, ChunkTable, TensorEntry
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.sharding.placement import Box, Placements
from titan_ckpt.state.state_dict import DTYPE_NAME, LocalShard, cut_order


@dataclass(frozen=True, slots=True)
class Written:
    """One item of a rank's file; `row` is its index among the tensors of `part`, -1 for a non-tensor value."""

    part: RankPart
    row: int
    placements: Placements | None


def entry_of(metadata: Metadata, fqn: str, chunks: list[WriteResult], *, first_chunk: int) -> TensorEntry:
    """A tensor of which `chunks` were written, by DCP's `metadata`."""
    described = cast(TensorStorageMetadata, metadata.state_dict_metadata[fqn])
    placements = chunks[0].storage_data.placements
    is_whole = len(chunks) == 1 and placements is None
    return TensorEntry(
        fqn=fqn,
        dtype=DTYPE_NAME[described.properties.dtype],
        global_shape=tuple(described.size),
        placements={} if is_whole else placements,
        stages=None,
        first_chunk=first_chunk,
        num_chunks=len(chunks),
    )


def table_of(metadata: Metadata, rows: list[WriteResult], number: dict[str, int]) -> ChunkTable:
    """The chunk table of `rows`; `number` is the index of each file by its path."""
    sizes = {
        (fqn, tuple(chunk.offsets)): tuple(chunk.sizes)
        for fqn, entry in metadata.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    boxes = [Box(offset, sizes[(r.index.fqn, offset)]) for r in rows for offset in [tuple(r.index.offset or ())]]
    written: list[Written] = [result.storage_data for result in rows]
    columns = np.array([w.part.columns[w.row] for w in written], dtype=np.int64).reshape(-1, 6).T
    return ChunkTable(
        file=np.array([number[w.part.files[0].path] for w in written], dtype=np.int64),
        offset=columns[1],
        length=columns[2],
        payload_offset=columns[3],
        payload_length=columns[4],
        codec=columns[5],
        box_offsets=np.array([n for box in boxes for n in box.offsets], dtype=np.int64),
        box_sizes=np.array([n for box in boxes for n in box.sizes], dtype=np.int64),
        digests=b"".join(w.part.digests[w.row * DIGEST_BYTES :][:DIGEST_BYTES] for w in written),
    )


def shard_to_write(write: WriteItem) -> LocalShard:
    """The box of a tensor that the planner wants written. UsageError for a dtype that cannot be stored."""
    data = write.tensor_data
    assert data is not None
    dtype = DTYPE_NAME.get(data.properties.dtype)
    if dtype is None:
        raise UsageError(f"{write.index.fqn}: tensors of {data.properties.dtype} cannot be stored; convert it first")
    return LocalShard(
        fqn=write.index.fqn,
        dtype=dtype,
        global_shape=tuple(data.size),
        placements=None,
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def placements_of(planner: SavePlanner, write: WriteItem) -> Placements | None:
    """The tensor's placements, if the planner still has the DTensor (torch's default planner does)."""
    value = getattr(planner, "state_dict", {}).get(write.index.fqn)
    return cut_order(value.device_mesh, tuple(value.placements)) if isinstance(value, DTensor) else None


def result_of(write: WriteItem, part: RankPart, row: int, placements: Placements | None) -> WriteResult:
    """What DCP sends to the coordinator about one item."""
    size_bytes = int(part.columns[row][2]) if row >= 0 else 0
    return WriteResult(index=write.index, size_in_bytes=size_bytes, storage_data=Written(part, row, placements))
