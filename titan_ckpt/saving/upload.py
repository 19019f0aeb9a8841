"""Upload: one rank's file to its store, digests on the way, and what the coordinator must know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import xxhash

from titan_ckpt.format.codec import CODECS, PLANES_ZSTD, encode, encode_head
from titan_ckpt.format.digest import digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, FileEntry
from titan_ckpt.format.names import data_file, step_folder
from titan_ckpt.format.torch_blob import align, envelope
from titan_ckpt.saving.staging import Source
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.state.state_dict import LocalShard
from titan_ckpt.store.base import Buffer, Steady, Store

WINDOW_BYTES = 16 << 20
SMALL_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """Where a chunk stands: `file` is a path relative to the step's folder, the rest as in `titan_ckpt.format.manifest.Chunk`."""

    file: FileEntry
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    codec: str
    digest: bytes


ChunkKey = tuple[str, str, Shape, Shape]
Known = Mapping[ChunkKey, StoredChunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Where a non-tensor value stands in its rank's file."""

    fqn: str
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank wrote, or referred to where an earlier checkpoint holds the same bytes.

    `files` are those its chunks are in, its own (if it wrote one) first. `columns` have a row per chunk: number in `files`,
    offset, length, payload offset, payload length, number in CODECS. Bytes are of its own file, and raw.
    """

    files: tuple[FileEntry, ...]
    columns: Int64s
    digests: bytes
    objects: tuple[StoredObject, ...]
    all_object_digests: dict[str, bytes]
    written_bytes: int
    raw_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOptions:
    """How chunks are stored: their codec, and `known` ones that need not be written again."""

    codec: str = RAW
    known: Known = field(default_factory=dict)


def chunk_key(item: LocalShard) -> ChunkKey:
    """What makes a chunk the same place of the same tensor in another checkpoint."""
    return (item.fqn, item.dtype, item.offsets, item.sizes)


def upload(
    store: Store,
    items: Sequence[LocalShard],
    source: Source,
    *,
    step: int,
    attempt: str,
    rank: int,
    objects: dict[str, bytes],
    mine: list[str],
    sent: Callable[[int], None],
    options: UploadOptions | None = None,
) -> Part:
    """Write this rank's file (none if it has nothing to write). `sent` is told the bytes of each piece handed over.

    `objects` are the values this rank holds, `mine` the names of those it writes.
    """
    path = data_file(attempt, rank)
    writing = _Writing(items, source, {name: objects[name] for name in mine}, sent, options or UploadOptions())
    pieces = writing.pieces()
    first = next(pieces, None)
    if first is not None:
        store.write(f"{step_folder(step)}/{path}", Steady(chain([first], pieces)))
    own = FileEntry(path=path, size_bytes=writing.end, digest=writing.file_hash.digest())
    chunks = [replace(chunk, file=own) if chunk.file is _OWN else chunk for chunk in writing.chunks]
    files = tuple(dict.fromkeys([*([own] if writing.end else []), *(chunk.file for chunk in chunks)]))
    return Part(
        files=files,
        columns=_columns(chunks, files),
        digests=b"".join(chunk.digest for chunk in chunks),
        objects=tuple(writing.objects),
        all_object_digests={fqn: digest(data) for fqn, data in objects.items()},
        written_bytes=writing.end,
        raw_bytes=sum(item.size_bytes for item in items),
    )


def part_chunks(part: Part) -> list[StoredChunk]:
    """A part's chunks, one per item, as records."""
    return [
        StoredChunk(
            file=part.files[row[0]], offset=row[1], length=row[2], payload_offset=row[3], payload_length=row[4],
            codec=CODECS[row[5]], digest=part.digests[16 * n : 16 * n + 16],
        )
        for n, row in enumerate(part.columns.tolist())
    ]  # fmt: skip


_OWN = FileEntry(path="", size_bytes=0, digest=None)


class _Writing:
    """The bytes of a file in order, hashed as they pass, and where each chunk came to stand."""

    def __init__(
        self,
        items: Sequence[LocalShard],
        source: Source,
        values: Mapping[str, bytes],
        sent: Callable[[int], None],
        options: UploadOptions,
    ) -> None:
        self._items, self._source, self._values, self._sent, self._options = items, source, values, sent, options
        self.file_hash = xxhash.xxh3_128()
        self.chunks: list[StoredChunk] = []
        self.objects: list[StoredObject] = []
        self.end = 0

    def pieces(self) -> Iterator[Buffer]:
        """Small pieces gathered, large ones as they are: no copy of what is large."""
        gathered = bytearray()
        for piece in self._raw_pieces():
            self.file_hash.update(piece)
            self.end += len(piece)
            if len(piece) <= SMALL_BYTES:
                gathered += piece
                if len(gathered) < WINDOW_BYTES:
                    continue
                piece = b""
            yield from self._send(gathered)
            yield from self._send(piece)
            gathered = bytearray()
        yield from self._send(gathered)

    def _send(self, piece: Buffer) -> Iterator[Buffer]:
        if len(piece):
            yield piece
            self._sent(len(piece))

    def _raw_pieces(self) -> Iterator[Buffer]:
        for index, item in enumerate(self._items):
            payload = self._source.payload(index)
            known = self._options.known.get(chunk_key(item))
            if known is not None and known.digest == digest(payload):
                self.chunks.append(known)
            elif self._options.codec == PLANES_ZSTD and len(payload):
                yield from self._encoded(item, payload)
            else:
                yield from self._plain(item, payload)
        for fqn, data in self._values.items():
            self.objects.append(StoredObject(fqn=fqn, offset=self.end, length=len(data), digest=digest(data)))
            yield data

    def _plain(self, item: LocalShard, payload: memoryview) -> Iterator[Buffer]:
        around, payload_hash = envelope(item.dtype, item.sizes), xxhash.xxh3_128()
        start = align(self.end)
        yield bytes(start - self.end) + around.prefix
        for begin in range(0, len(payload), WINDOW_BYTES):
            window = payload[begin : begin + WINDOW_BYTES]
            payload_hash.update(window)
            yield window
        yield around.suffix
        self._place(start, len(around.prefix), len(payload), around.length, RAW, payload_hash.digest())

    def _encoded(self, item: LocalShard, payload: memoryview) -> Iterator[Buffer]:
        around, itemsize = envelope(item.dtype, item.sizes), ELEMENT_SIZE[item.dtype]
        head, start, length = encode_head(around, itemsize), align(self.end), 0
        yield bytes(start - self.end) + head
        for piece in encode(payload, itemsize):
            length += len(piece)
            yield piece
        self._place(start, len(head), length, len(head) + length, PLANES_ZSTD, digest(payload))

    def _place(self, start: int, head: int, payload: int, length: int, codec: str, payload_digest: bytes) -> None:
        self.chunks.append(
            StoredChunk(
                file=_OWN, offset=start, length=length, payload_offset=head, payload_length=payload, codec=codec,
                digest=payload_digest,
            )
        )  # fmt: skip


def _columns(chunks: list[StoredChunk], files: tuple[FileEntry, ...]) -> Int64s:
    number = {file: n for n, file in enumerate(files)}
    rows = [
        (number[c.file], c.offset, c.length, c.payload_offset, c.payload_length, CODECS.index(c.codec)) for c in chunks
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)
