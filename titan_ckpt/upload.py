"""Upload: a staged file to its store, digests on the way, and what the coordinator must know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from titan_ckpt.index import Int64s
from titan_ckpt.layout import data_file, step_folder
from titan_ckpt.manifest import digest
from titan_ckpt.stage import Arena
from titan_ckpt.store import Store

WINDOW_BYTES = 16 << 20


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
    arena: Arena,
    *,
    step: int,
    attempt: str,
    rank: int,
    objects: dict[str, bytes],
    mine: list[str],
    sent: Callable[[int], None],
) -> Part:
    """Write this rank's file (nothing if it has nothing to write). `sent` is told the bytes of each window handed over."""
    arena.wait()
    path = data_file(attempt, rank)
    stored = list(_place(mine, objects, arena.length))
    tail = b"".join(objects[entry.fqn] for entry in stored)
    hasher = xxhash.xxh3_128()
    size_bytes = arena.length + len(tail)
    if size_bytes:
        store.write(f"{step_folder(step)}/{path}", _windows(arena, tail, hasher, sent))
    return Part(
        path=path,
        size_bytes=size_bytes,
        file_digest=hasher.digest(),
        columns=_columns(arena),
        digests=b"".join(digest(arena.payload(slot)) for slot in arena.slots),
        objects=tuple(stored),
        all_object_digests={fqn: digest(data) for fqn, data in objects.items()},
    )


def _place(mine: list[str], objects: dict[str, bytes], start: int) -> Iterator[StoredObject]:
    for fqn in mine:
        data = objects[fqn]
        yield StoredObject(fqn=fqn, offset=start, length=len(data), digest=digest(data))
        start += len(data)


def _windows(
    arena: Arena, tail: bytes, hasher: xxhash.xxh3_128, sent: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    for start in range(0, arena.length, WINDOW_BYTES):
        window = arena.view[start : start + WINDOW_BYTES]
        hasher.update(window)
        yield window
        sent(len(window))
    if tail:
        hasher.update(tail)
        yield tail
        sent(len(tail))


def _columns(arena: Arena) -> Int64s:
    rows = [(slot.offset, slot.frame.length, len(slot.frame.prefix), slot.frame.payload_length) for slot in arena.slots]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
