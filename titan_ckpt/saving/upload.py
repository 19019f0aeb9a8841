"""Upload one rank's file, computing digests on the way, and record what the coordinator needs for the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import xxhash

from titan_ckpt.errors import TitanError
from titan_ckpt.format.codec import CODECS, PLANES_ZSTD, encode, encode_head
from titan_ckpt.format.digest import digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, FileEntry
from titan_ckpt.format.names import data_file, step_folder
from titan_ckpt.format.torch_blob import align, envelope
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.base import Buffer, Steady, Store

WINDOW_BYTES = 16 << 20
SMALL_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """Location of a chunk: `file` is relative to the step's folder, the rest as in `titan_ckpt.format.manifest.Chunk`."""

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
    """Location of a non-tensor value in its rank's file."""

    fqn: str
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A rank's part of a checkpoint: what it wrote, and references to equal chunks of earlier checkpoints.

    `files` contain its chunks; its own file (if it wrote one) is first. `columns` has a row per chunk: index in `files`, offset,
    length, payload offset, payload length, index in CODECS. `copy_digests` are of this rank's copies of what other ranks hold,
    one for each of its buckets (`saving.replicas`). `written_bytes` is the size of its own file, `raw_bytes` that of its tensors.
    """

    files: tuple[FileEntry, ...]
    columns: Int64s
    digests: bytes
    objects: tuple[StoredObject, ...]
    all_object_digests: dict[str, bytes]
    copy_digests: list[bytes]
    written_bytes: int
    raw_bytes: int


class PayloadSource(Protocol):
    """Gives an upload the bytes of each item."""

    def payload(self, index: int) -> memoryview:
        """The raw bytes of the `index`-th item."""


@contextmanager
def naming(fqn: str) -> Iterator[None]:
    """Name the tensor in an error of torch while its values are read."""
    try:
        yield
    except TitanError:
        raise
    except Exception as error:
        raise TitanError(f"{fqn}: its values cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContents:
    """What a rank has to save: `items` with the `source` of their bytes, and non-tensor values by name.

    `objects` are all values of this rank; `own_objects` names those that it writes. `copies()` digests what other ranks hold too.
    """

    items: Sequence[LocalShard]
    source: PayloadSource
    objects: dict[str, bytes]
    own_objects: list[str]
    copies: Callable[[], list[bytes]] = list


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The data file that one rank writes in one attempt."""

    step: int
    attempt: str
    rank: int

    @property
    def path(self) -> str:
        """Relative to the step's folder."""
        return data_file(self.attempt, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOptions:
    """`codec` of the chunks, `known` ones that need not be written again, callbacks for the bytes of each buffer.

    `before` may wait before a buffer is sent, and end the upload by an error; `on_bytes` hears of it afterwards.
    """

    codec: str = RAW
    known: Known = field(default_factory=dict)
    before: Callable[[int], None] = lambda _: None
    on_bytes: Callable[[int], None] = lambda _: None


def chunk_key(item: LocalShard) -> ChunkKey:
    """Identifies the same box of the same tensor across checkpoints."""
    return (item.fqn, item.dtype, item.offsets, item.sizes)


def upload(store: Store, contents: RankContents, target: RankFile, options: UploadOptions | None = None) -> RankPart:
    """Write this rank's file, or none if it has nothing to write."""
    items, objects = contents.items, contents.objects
    writer = _FileWriter(contents, options or UploadOptions())
    buffers = writer.buffers()
    first = next(buffers, None)
    if first is not None:
        store.write(f"{step_folder(target.step)}/{target.path}", Steady(chain([first], buffers)))
    own = FileEntry(path=target.path, size_bytes=writer.end, digest=writer.file_hash.digest())
    chunks = [replace(chunk, file=own) if chunk.file is _OWN else chunk for chunk in writer.chunks]
    files = tuple(dict.fromkeys([*([own] if writer.end else []), *(chunk.file for chunk in chunks)]))
    return RankPart(
        files=files,
        columns=_columns(chunks, files),
        digests=b"".join(chunk.digest for chunk in chunks),
        objects=tuple(writer.objects),
        all_object_digests={fqn: digest(data) for fqn, data in objects.items()},
        copy_digests=contents.copies(),
        written_bytes=writer.end,
        raw_bytes=sum(item.size_bytes for item in items),
    )


def part_chunks(part: RankPart) -> list[StoredChunk]:
    """A part's chunks as records, one per item."""
    return [
        StoredChunk(
            file=part.files[row[0]], offset=row[1], length=row[2], payload_offset=row[3], payload_length=row[4],
            codec=CODECS[row[5]], digest=part.digests[16 * n : 16 * n + 16],
        )
        for n, row in enumerate(part.columns.tolist())
    ]  # fmt: skip


_OWN = FileEntry(path="", size_bytes=0, digest=None)


class _FileWriter:
    """Yields the bytes of a rank's file in order, hashes them, and records the location of each chunk."""

    def __init__(self, contents: RankContents, options: UploadOptions) -> None:
        self._contents, self._options = contents, options
        self.file_hash = xxhash.xxh3_128()
        self.chunks: list[StoredChunk] = []
        self.objects: list[StoredObject] = []
        self.end = 0

    def buffers(self) -> Iterator[Buffer]:
        """The file in order: small buffers gathered into one, large ones passed on without a copy."""
        gathered = bytearray()
        for buffer in self._file_bytes():
            self.file_hash.update(buffer)
            self.end += len(buffer)
            if len(buffer) <= SMALL_BYTES:
                gathered += buffer
                if len(gathered) < WINDOW_BYTES:
                    continue
                buffer = b""
            yield from self._send(gathered)
            yield from self._send(buffer)
            gathered = bytearray()
        yield from self._send(gathered)

    def _send(self, buffer: Buffer) -> Iterator[Buffer]:
        if len(buffer):
            self._options.before(len(buffer))
            yield buffer
            self._options.on_bytes(len(buffer))

    def _file_bytes(self) -> Iterator[Buffer]:
        for index, item in enumerate(self._contents.items):
            with naming(item.fqn):
                payload = self._contents.source.payload(index)
            known = self._options.known.get(chunk_key(item))
            if known is not None and known.digest == digest(payload):
                self.chunks.append(known)
            elif self._options.codec == PLANES_ZSTD and len(payload):
                yield from self._encoded(item, payload)
            else:
                yield from self._plain(item, payload)
        for fqn in self._contents.own_objects:
            data = self._contents.objects[fqn]
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
