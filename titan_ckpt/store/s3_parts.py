"""Requests and responses of S3: parts of equal size, their checksums, and fields of a response."""

from __future__ import annotations

import base64
import functools
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from titan_ckpt.errors import UsageError
from titan_ckpt.store.base import Buffer

try:  # the same CRC-32, six times as fast as zlib's: training needs the processor
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32

T = TypeVar("T")
ByteArray: TypeAlias = npt.NDArray[np.uint8]

PART_BYTES = 16 << 20
PARTS_BEFORE_DOUBLING = 1250
_BUCKET = re.compile(r"[\w.-]{1,255}|arn:.+", re.ASCII)


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Bytes of one part: a slice of the caller's memory, or (part of) a `buffer` of ours."""

    view: memoryview
    buffer: ByteArray | None = None


class PartBuffers:
    """Reusable part buffers, shared by all concurrent writes of a store and freed after the last one.

    To allocate the pages of a new buffer takes longer than to fill it.
    """

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
        """The most recently returned buffer, which may still be in cache, or a new one."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        return buffer if buffer is not None and len(buffer) == size_bytes else np.empty(size_bytes, dtype=np.uint8)

    def give_back(self, part: UploadPart) -> None:
        """Return the buffer, if any, of a part that was sent. Thread-safe."""
        with self._lock:
            if part.buffer is not None and self._writers:
                self._free.append(part.buffer)


def upload_parts(pieces: Iterable[Buffer], buffers: PartBuffers) -> Iterator[UploadPart]:
    """The same bytes as parts of equal size, the last one shorter, as S3 requires.

    The size doubles every PARTS_BEFORE_DOUBLING parts, so that 10,000 parts hold 5 TiB. Whatever fills a part is sliced, the
    rest is copied (by numpy, which releases the GIL).
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
    """(bucket, prefix) of `s3://bucket/prefix`."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if "@" in bucket or "?" in url:
        raise UsageError(
            "credentials and options do not belong in a URL; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ..."
        )
    if not bucket:
        raise UsageError(f"{url}: names no bucket; use s3://bucket/folder")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{url}: {bucket!r} is no name of a bucket; give letters, digits, - and . alone")
    return bucket, prefix


def crc32_text(*views: memoryview) -> str:
    """The CRC-32 of a body, in one or more pieces, in the form of `x-amz-checksum-crc32`."""
    found = functools.reduce(lambda value, view: crc32(view, value), views, 0)
    return base64.b64encode(found.to_bytes(4, "big")).decode("ascii")


def server_time_s(answer: Any) -> float:
    """The server's time in an answer, or ours if it has none."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"].get("date")).timestamp()
    except (TypeError, ValueError):
        return time.time()


def all_results(jobs: list[Future[T]]) -> list[T]:
    """Results of all jobs. If one fails, cancel or await the rest, since they write into the caller's memory."""
    try:
        return [job.result() for job in jobs]
    except BaseException:
        drop(jobs)
        raise


def drop(jobs: Iterable[Future[T]]) -> None:
    """Cancel the jobs that have not started and await the others."""
    remaining = list(jobs)
    for job in remaining:
        job.cancel()
    wait(remaining)
