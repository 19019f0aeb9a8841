"""Chunks that an earlier checkpoint of the run holds, so that an incremental save refers to them instead of writing them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.format.manifest import DIGEST_BYTES, FileEntry
from titan_ckpt.format.names import step_folder
from titan_ckpt.saving.upload import ChunkKey, Known, StoredChunk, chunk_key
from titan_ckpt.state.state_dict import LocalShard


def known_of_checkpoint(checkpoint: Checkpoint, items: Iterable[LocalShard]) -> Known:
    """Those of `items` that `checkpoint` holds in the same boxes; the others have to be written."""
    manifest, digests = checkpoint.manifest, checkpoint.digests
    files = {file.path: file for file in manifest.files}
    known: dict[ChunkKey, StoredChunk] = {}
    for item in items:
        entry = manifest.by_fqn.get(item.fqn)
        if entry is None or entry.dtype != item.dtype or digests is None:
            continue
        offsets, sizes = manifest.boxes(entry)
        boxes = list(zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True))
        if (item.offsets, item.sizes) in boxes:
            index = boxes.index((item.offsets, item.sizes))
            chunk, row = manifest.chunk(entry, index), entry.first_chunk + index
            known[chunk_key(item)] = StoredChunk(
                file=from_elsewhere(files[chunk.file], checkpoint.step), offset=chunk.offset, length=chunk.length,
                payload_offset=chunk.payload_offset, payload_length=chunk.payload_length, codec=chunk.codec,
                digest=digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES],
            )  # fmt: skip
    return known


def known_of_save(items: Sequence[LocalShard], chunks: Sequence[StoredChunk], step: int) -> Known:
    """What a save of ours has just committed as `step`."""
    return {
        chunk_key(item): replace(chunk, file=from_elsewhere(chunk.file, step))
        for item, chunk in zip(items, chunks, strict=True)
    }


def from_elsewhere(file: FileEntry, step: int) -> FileEntry:
    """A file of `step` as another step of the run names it."""
    return file if file.path.startswith("../") else replace(file, path=f"../{step_folder(step)}/{file.path}")
