"""Upload: one rank's file to its store, digests on the way, and what the coordinator must know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from titan_ckpt.index import Int64s
from titan_ckpt.layout import data_file, step_folder
from titan_ckpt.manifest import digest
from titan_ckpt.stage import Slot, Source
from titan_ckpt.store import Buffer, Store

WINDOW_BYTES = 16 << 20
SMALL_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Where a non-tensor value stands in its rank's file."""

    fqn: str
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank wrote. `columns` are offset, length, payload offset and payload length, one row per blob."""

    path: str
    size_bytes: int
    file_digest: bytes
    columns: Int64s
    digests: bytes
    objects: tuple[StoredObject, ...]
    all_object_digests: dict[str, bytes]


def upload(
    store: Store,
    source: Source,
    *,
    step: int,
    attempt: str,
    rank: int,
    objects: dict[str, bytes],
    mine: list[str],
    sent: Callable[[int], None],
) -> Part:
    """Write this rank's file (none if it has nothing to write). `sent` is told the bytes of each piece handed over.

    `objects` are the values this rank holds, `mine` the names of those it writes.
    """
    path = data_file(attempt, rank)
    end = source.slots[-1].end if source.slots else 0
    stored = list(_place(mine, objects, end))
    size_bytes = end + sum(entry.length for entry in stored)
    writing = _Writing(source, [objects[name] for name in mine], sent)
    if size_bytes:
        store.write(f"{step_folder(step)}/{path}", writing.pieces())
    return Part(
        path=path,
        size_bytes=size_bytes,
        file_digest=writing.file_hash.digest(),
        columns=slot_columns(source.slots),
        digests=b"".join(writing.digests),
        objects=tuple(stored),
        all_object_digests={fqn: digest(data) for fqn, data in objects.items()},
    )


class _Writing:
    """The bytes of a file in order, hashed as they pass: the file as a whole and each payload."""

    def __init__(self, source: Source, tail: list[bytes], sent: Callable[[int], None]) -> None:
        self._source, self._tail, self._sent = source, tail, sent
        self.file_hash = xxhash.xxh3_128()
        self.digests: list[bytes] = []

    def pieces(self) -> Iterator[Buffer]:
        """Small pieces gathered, large ones as they are: no copy of what is large."""
        gathered = bytearray()
        for piece in self._raw_pieces():
            self.file_hash.update(piece)
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
        end = 0
        for index, slot in enumerate(self._source.slots):
            yield bytes(slot.offset - end) + slot.frame.prefix
            payload, payload_hash = self._source.payload(index), xxhash.xxh3_128()
            for start in range(0, len(payload), WINDOW_BYTES):
                window = payload[start : start + WINDOW_BYTES]
                payload_hash.update(window)
                yield window
            self.digests.append(payload_hash.digest())
            yield slot.frame.suffix
            end = slot.end
        yield from self._tail


def _place(mine: list[str], objects: dict[str, bytes], start: int) -> Iterator[StoredObject]:
    for fqn in mine:
        data = objects[fqn]
        yield StoredObject(fqn=fqn, offset=start, length=len(data), digest=digest(data))
        start += len(data)


def slot_columns(slots: list[Slot]) -> Int64s:
    """Offset, length, payload offset and payload length of each blob."""
    rows = [(slot.offset, slot.frame.length, len(slot.frame.prefix), slot.frame.payload_length) for slot in slots]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
