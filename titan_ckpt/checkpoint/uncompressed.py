"""A view of a checkpoint with every chunk decoded, so that reshard and rewrite plans need not know codecs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import UsageError
from titan_ckpt.format.codec import PLANES_ZSTD, EncodedPayload, read_raw
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, FileEntry
from titan_ckpt.store.base import Buffer, ObjectInfo, Store

_MARK = "#payload-"


class DecodedStore(Store):
    """Read-only view of another store in which the paths of encoded payloads yield raw bytes."""

    def __init__(self, store: Store, payloads: dict[str, EncodedPayload]) -> None:
        super().__init__(store.url)
        self._store, self._payloads = store, payloads

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        found = self._payloads.get(path)
        if found is None:
            self._store.read_into(path, start, buffer)
        else:
            read_raw(self._store, found, start, buffer.cast("B"))

    def where(self, path: str) -> str:
        return self._store.where(path.partition(_MARK)[0])

    def stat(self, path: str) -> ObjectInfo:
        return self._store.stat(path.partition(_MARK)[0])

    def folders(self, prefix: str = "") -> list[str]:
        return self._store.folders(prefix)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def is_link(self, path: str) -> bool:
        return self._store.is_link(path)

    def is_taken(self, path: str) -> bool:
        return self._store.is_taken(path)

    def leftovers(self, prefix: str = "") -> Iterator[tuple[ObjectInfo, str]]:
        return self._store.leftovers(prefix)

    def honours_conditions(self) -> bool:
        return self._store.honours_conditions()

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def held_by_writes(self, num_files: int) -> int:
        return self._store.held_by_writes(num_files)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:  # noqa: ARG002
        raise UsageError(f"{self.where(path)}: a decoded view of a checkpoint is read-only")

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:  # noqa: ARG002
        raise UsageError(f"{self.where(path)}: a decoded view of a checkpoint is read-only")

    def delete(self, paths: Iterable[str]) -> None:
        raise UsageError(f"{self}: a decoded view of a checkpoint is read-only ({list(paths)[:3]})")


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every chunk raw, decoded while it is read; `checkpoint` itself if nothing is encoded."""
    manifest = checkpoint.manifest
    table = manifest.chunks
    if PLANES_ZSTD not in manifest.codecs:
        return checkpoint
    encoded = np.flatnonzero(np.asarray(table.codec) == manifest.codecs.index(PLANES_ZSTD))
    if not len(encoded):
        return checkpoint
    itemsize = np.repeat(
        [ELEMENT_SIZE[tensor.dtype] for tensor in manifest.tensors], [tensor.num_chunks for tensor in manifest.tensors]
    )
    raw_length = itemsize * np.array(
        [box.prod() for tensor in manifest.tensors for box in manifest.boxes(tensor)[1]], dtype=np.int64
    )
    payloads: dict[str, EncodedPayload] = {}
    files = list(manifest.files)
    columns: dict[str, Any] = {
        name: np.array(getattr(table, name))
        for name in ("file", "offset", "length", "payload_offset", "payload_length")
    }
    for row in encoded.tolist():
        file = f"{manifest.files[int(table.file[row])].path}{_MARK}{row}"
        start = int(table.offset[row] + table.payload_offset[row])
        payloads[checkpoint.path(file)] = EncodedPayload(
            path=checkpoint.path(manifest.files[int(table.file[row])].path), start=start,
            length=int(table.payload_length[row]), raw_length=int(raw_length[row]), itemsize=int(itemsize[row]),
        )  # fmt: skip
        columns["file"][row] = len(files)
        columns["offset"][row] = columns["payload_offset"][row] = 0
        columns["length"][row] = columns["payload_length"][row] = raw_length[row]
        files.append(FileEntry(path=file, size_bytes=int(raw_length[row]), digest=None))
    return replace(
        checkpoint,
        store=DecodedStore(checkpoint.store, payloads),
        manifest=replace(
            manifest,
            files=tuple(files),
            chunks=replace(table, codec=np.zeros(len(table), dtype=np.int64), **columns),
            codecs=(RAW,),
        ),
    )
