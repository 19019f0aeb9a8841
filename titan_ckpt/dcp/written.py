"""What the ranks wrote for DCP's planner, as the manifest's entries and chunk table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from titan_ckpt.format.manifest import DIGEST_BYTES, ChunkTable, TensorEntry
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.sharding.placement import Box, Placements
from titan_ckpt.state.state_dict import DTYPE_NAME


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
