"""Incremental saves: chunks of an earlier checkpoint that a save can refer to instead of writing them again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, NotCommittedError
from titan_ckpt.format.manifest import DIGEST_BYTES, FileEntry
from titan_ckpt.format.names import marks_folder, step_folder
from titan_ckpt.saving.upload import ChunkKey, Known, RankPart, StoredChunk, chunk_key, part_chunks
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.base import Store

log = logging.getLogger(__name__)


class KnownChunks:
    """The chunks of a run's last checkpoint that match this rank's shards; always empty if the saver is not incremental."""

    def __init__(self, *, is_incremental: bool) -> None:
        self._is_incremental = is_incremental
        self._known: Known | None = None

    def find(self, store: Store, items: list[LocalShard]) -> Known:
        """Those of this saver's last save, or on its first save those of the newest checkpoint in the run.

        On its first save none beside a mark of a deletion: a job that was killed while it deleted leaves one.
        """
        if self._is_incremental and self._known is None:
            try:
                known = known_of_checkpoint(open_checkpoint(store.url, store=store), items)
                self._known = _without_marked(store, known)
            except NotCommittedError:
                self._known = {}
            except CheckpointError as error:
                log.warning("every chunk is written, none is reused: %s", error)
                self._known = {}
        return self._known or {}

    def remember(self, items: Sequence[LocalShard], part: RankPart, step: int) -> None:
        """Keep what a save has just committed as `step`."""
        if self._is_incremental:
            self._known = known_of_save(items, part_chunks(part), step)

    def forget(self) -> None:
        """Write every chunk at the next save: after a failure, files of the earlier checkpoint may be the cause."""
        self._known = {}


def known_of_checkpoint(checkpoint: Checkpoint, items: Iterable[LocalShard]) -> Known:
    """The chunks of `checkpoint` for those `items` that it stores in the same boxes."""
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


def _without_marked(store: Store, known: Known) -> Known:
    folders = {_folder(chunk) for chunk in known.values()}
    marked = {folder for folder in folders if any(store.list(marks_folder(folder)))}
    for folder in sorted(marked):
        log.warning("%s: a deletion began here and has not ended; what is in it is written again", store.where(folder))
    return {key: chunk for key, chunk in known.items() if _folder(chunk) not in marked}


def _folder(chunk: StoredChunk) -> str:
    """The attempt's folder in the run that holds a chunk of another step."""
    return os.path.dirname(chunk.file.path.removeprefix("../"))


def known_of_save(items: Sequence[LocalShard], chunks: Sequence[StoredChunk], step: int) -> Known:
    """The chunks that a save has just committed as `step`."""
    return {
        chunk_key(item): replace(chunk, file=from_elsewhere(chunk.file, step))
        for item, chunk in zip(items, chunks, strict=True)
    }


def from_elsewhere(file: FileEntry, step: int) -> FileEntry:
    """A file of `step`, with its path relative to another step of the run."""
    return file if file.path.startswith("../") else replace(file, path=f"../{step_folder(step)}/{file.path}")
