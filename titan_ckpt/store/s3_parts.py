"""What goes over the wire to S3: parts of equal size, their checksums, and what the answers say."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from titan_ckpt.errors import UsageError
from titan_ckpt.store.base import Buffer

try:  # six times as fast as zlib's, on a processor that training wants too; every CRC is of the same kind
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

ByteArray: TypeAlias = npt.NDArray[np.uint8]

PART_BYTES = 16 << 20
PARTS_BEFORE_DOUBLING = 1250


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A part's bytes: a slice of the caller's memory, or a buffer of ours that they were gathered in."""

    view: memoryview
    buffer: ByteArray | None = None


class PartBuffers:
    """Buffers for parts, shared by all files that a store writes at a time and used again: to make the pages of a new one
    takes the processor longer than to fill it. None is kept once nothing is written."""

    def __init__(self) -> None:
        self._free: list[ByteArray] = []
        self._writers = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self._writers += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._writers -= 1
            if self._writers == 0:
                self._free.clear()

    def take(self, size_bytes: int) -> ByteArray:
        """The one that was given back last, which the processor may still know, or a new one."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        return buffer if buffer is not None and len(buffer) == size_bytes else np.empty(size_bytes, dtype=np.uint8)

    def give_back(self, part: UploadPart) -> None:
        """A part was sent: its buffer, if it has one, may be taken again; from any thread."""
        with self._lock:
            if part.buffer is not None and self._writers:
                self._free.append(part.buffer)


def upload_parts(pieces: Iterable[Buffer], buffers: PartBuffers) -> Iterator[UploadPart]:
    """The same bytes as parts of equal size (the last may be shorter), as S3 wants them.

    The size doubles every `PARTS_BEFORE_DOUBLING` parts, so that 10,000 parts hold 5 TiB. Buffers that fill a part are sliced,
    only the pieces between them are copied (by numpy, which lets other threads run meanwhile).
    """
    number, size, used = 1, PART_BYTES, 0
    buffer: ByteArray | None = None
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while len(rest):
            if buffer is None and len(rest) >= size:
                part, rest = UploadPart(rest[:size]), rest[size:]
            else:
                buffer = buffers.take(size) if buffer is None else buffer
                taken = min(size - used, len(rest))
                buffer[used : used + taken] = np.frombuffer(rest[:taken], dtype=np.uint8)
                used, rest = used + taken, rest[taken:]
                if used < size:
                    continue
                part, buffer, used = UploadPart(buffer.data, buffer), None, 0
            yield part
            del part
            number += 1
            size = PART_BYTES << (number - 1) // PARTS_BEFORE_DOUBLING
    if buffer is not None:
        yield UploadPart(buffer.data[:used], buffer)


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://bucket/prefix`."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if "@" in bucket or "?" in url:
        raise UsageError(
            "credentials and options do not belong in a URL; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ..."
        )
    if not bucket:
        raise UsageError(f"{url}: names no bucket; write s3://bucket/folder")
    return bucket, prefix


def crc32_text(view: memoryview) -> str:
    """The CRC32 of a body as `x-amz-checksum-crc32` wants it."""
    return base64.b64encode(crc32(view).to_bytes(4, "big")).decode("ascii")


def etag(answer: Any) -> str:
    """An object's ETag without its quotes."""
    return str(answer["ETag"]).strip('"')


def answered_at(answer: Any) -> float:
    """The server's own clock, for an object that it just took; ours when it does not say."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


def total_size(answer: Any) -> int | None:
    """The size of the whole object that a ranged GET's answer is a part of, if it says."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdigit() else None
