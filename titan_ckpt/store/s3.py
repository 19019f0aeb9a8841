"""S3 and compatible servers, through the synchronous botocore client.

A ranged GET reads from the socket into the caller's buffer, a multipart upload sends slices of the caller's buffers, and the
server checks a CRC32 of each request (measured against other clients in docs/performance.md). botocore's retries are off:
`store.base.retry` alone decides what is transient and enforces one deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

from titan_ckpt.errors import NotFoundError, PermissionDeniedError, StoreError
from titan_ckpt.location import check_relative, normalise
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, Store, conditionally, probe_conditions
from titan_ckpt.store.s3_answers import (
    Listing,
    ReplacedError,
    check_checksum,
    check_deleted,
    check_head,
    check_range,
    check_same,
    check_written,
    fill,
    listed,
    read_again,
)
from titan_ckpt.store.s3_calls import S3Calls
from titan_ckpt.store.s3_client import S3Options
from titan_ckpt.store.s3_errors import mute_refusal, refusal
from titan_ckpt.store.s3_multipart import MultipartUpload, SentPart
from titan_ckpt.store.s3_parts import (
    PART_BYTES,
    PartBuffers,
    UploadPart,
    all_results,
    crc32_text,
    drop,
    server_time_s,
    split_url,
    upload_parts,
)

T = TypeVar("T")

PARTS_IN_FLIGHT = 4
THREADS = 8
DELETE_BATCH = 1000
# A listing of many pages takes longer than one call.
LISTING_DEADLINES = 10


class S3Store(Store):
    """Objects under `s3://bucket/prefix`.

    Credentials, region and endpoint come from `options` (see `S3Options`), the environment or the AWS config files.
    """

    is_scattering = True

    def __init__(self, url: str, policy: RetryPolicy, options: S3Options | None = None) -> None:
        super().__init__(normalise(url))
        self._bucket, self._prefix = split_url(self.url)
        self._calls = S3Calls(options or S3Options(), self._bucket, policy, self.where(""))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")
        self._in_flight = threading.BoundedSemaphore(THREADS)
        self._buffers = PartBuffers()
        self._first_read: dict[str, str] = {}

    # Reading

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """As `Store.read_into`. ReplacedError if the object is another one than at the first read since it was listed."""
        version, _ = self._read(path, start, buffer.cast("B"))
        self._check_version(path, version)

    def read_scattered(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """As `Store.read_scattered`, with the errors of `read_into`."""
        version, _ = self._get_range(path, start, *(buffer.cast("B") for buffer in buffers))
        self._check_version(path, version)

    def _check_version(self, path: str, version: str) -> None:
        if self._first_read.setdefault(path, version) != version:
            raise ReplacedError(f"{self.where(path)}: was replaced since it was first read; open the checkpoint again")

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """As `Store.read`. An object that is replaced meanwhile is read again."""
        if length is not None:
            return read_again(self.where(path), lambda: self._read_range(path, start, length))
        return read_again(self.where(path), lambda: self._read_rest(self.stat(path), start))

    def read_whole(self, path: str, *, at_most: int) -> tuple[ObjectInfo, bytes | None]:
        """As `Store.read_whole`, with one HEAD and one GET."""

        def read() -> tuple[ObjectInfo, bytes | None]:
            entry = self.stat(path)
            if entry.size_bytes > at_most:
                check_same(self.where(path), entry, *self._get_range(path, at_most, memoryview(bytearray(1))))
                return entry, None
            return entry, self._read_rest(entry, 0)

        return read_again(self.where(path), read)

    def _read_range(self, path: str, start: int, length: int) -> bytes:
        buffer = bytearray(max(length, 0))
        self._read(path, start, memoryview(buffer))
        return bytes(buffer)

    def _read_rest(self, entry: ObjectInfo, start: int) -> bytes:
        """The bytes from `start` to the end. The first answer must confirm the size before memory is taken for the rest."""
        path, size = entry.path, entry.size_bytes - start
        try:
            first = bytearray(max(min(size, PART_BYTES), 0))
            found = self._read(path, start, memoryview(first)) if first else self._read_empty(path, entry)
            check_same(self.where(path), entry, *found)
            if size <= PART_BYTES:
                return bytes(first)
            buffer = bytearray(size)
            buffer[:PART_BYTES] = first
            found = self._read(path, start + PART_BYTES, memoryview(buffer)[PART_BYTES:])
        except ReplacedError:
            raise
        except StoreError as error:
            if self.stat(path).version != entry.version:
                raise ReplacedError(f"{self.where(path)}: was replaced while it was being read") from error
            raise
        check_same(self.where(path), entry, *found)
        return bytes(buffer)

    def _read_empty(self, path: str, entry: ObjectInfo) -> tuple[str, int | None]:
        """Ask for an object that is said to be empty, which S3 has no range for."""
        if entry.size_bytes:
            return entry.version, entry.size_bytes

        def get() -> tuple[str, int | None]:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path))
            try:
                return check_range(answer, 0, 0, self.where(path))
            finally:
                answer["Body"].close()

        return self._call(path, "read", get)

    def _read(self, path: str, start: int, view: memoryview) -> tuple[str, int | None]:
        """Fill `view` in parts; returns the object's ETag and size, which are the same for all parts."""
        if len(view) <= PART_BYTES:
            return self._get_range(path, start, view)
        jobs = [
            self._pool.submit(self._get_range, path, start + offset, view[offset : offset + PART_BYTES])
            for offset in range(0, len(view), PART_BYTES)
        ]
        found = set(all_results(jobs))
        if len(found) > 1:
            raise ReplacedError(f"{self.where(path)}: was replaced while it was being read; open the checkpoint again")
        return found.pop()

    def _get_range(self, path: str, start: int, *views: memoryview) -> tuple[str, int | None]:
        """Fill `views`, one after another, from byte `start`; returns the object's ETag and size."""
        length = sum(map(len, views))
        if length == 0:
            entry = self.stat(path)
            return entry.version, entry.size_bytes

        def get() -> tuple[str, int | None]:
            wanted = f"bytes={start}-{start + length - 1}"
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path), Range=wanted)
            try:
                found = check_range(answer, start, length, self.where(path))
                fill(views, answer["Body"])
                check_checksum(answer, start, views)
            except BaseException:
                answer["Body"].close()
                raise
            return found

        return self._call(path, "read", get)

    # Writing

    def held_by_writes(self, num_files: int) -> int:
        return PART_BYTES * min(num_files * (PARTS_IN_FLIGHT + 2), num_files * 2 + THREADS)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        self._key(path)
        with self._buffers:
            whole = upload_parts(parts, self._buffers)
            first = next(whole, UploadPart(memoryview(b"")))
            second = next(whole, None)
            if second is None:
                return self._put(path, first.view)
            return self._write_multipart(path, chain([first, second], whole))

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}
        view = memoryview(data).cast("B")
        return conditionally(
            lambda: self._put_once(path, view, **condition),
            run=lambda attempt: self._call(path, "write", attempt),
            as_ours=lambda error: self._calls.translate(path, "write", error),
            holds=lambda: self._holds(path, view),
            stat=lambda: self.stat(path),
            where=self.where(path),
            version=version,
        )

    def _holds(self, path: str, view: memoryview) -> bool:
        try:
            return self.read(path) == view
        except NotFoundError:
            return False

    def _put(self, path: str, view: memoryview) -> ObjectInfo:
        return self._call(path, "write", lambda: self._put_once(path, view))

    def _put_once(self, path: str, view: memoryview, **condition: str) -> ObjectInfo:
        crc = crc32_text(view)
        answer = self._client.put_object(
            Bucket=self._bucket, Key=self._key(path), Body=view, ChecksumCRC32=crc, **condition
        )
        return self._written(path, len(view), check_written(answer, crc), answer)

    def _written(self, path: str, size_bytes: int, version: str, answer: Any) -> ObjectInfo:
        self._first_read.pop(path, None)
        return ObjectInfo(path=path, size_bytes=size_bytes, modified_s=server_time_s(answer), version=version)

    def _write_multipart(self, path: str, parts: Iterator[UploadPart]) -> ObjectInfo:
        upload = MultipartUpload(self._calls, self._bucket, self._key(path), self.where(path))
        in_flight: set[Future[SentPart]] = set()
        sent: list[SentPart] = []
        try:
            for number, part in enumerate(parts, start=1):
                in_flight.add(self._begin_part(upload, number, part))
                del part
                if len(in_flight) >= PARTS_IN_FLIGHT:
                    done, in_flight = wait(in_flight, return_when=FIRST_COMPLETED)
                    sent += [job.result() for job in done]
            sent += [job.result() for job in in_flight]
            return self._complete(path, upload, sorted(sent, key=lambda part: part.number))
        except BaseException:
            drop(in_flight)
            upload.abort()
            raise

    def _begin_part(self, upload: MultipartUpload, number: int, part: UploadPart) -> Future[SentPart]:
        """Submit a part for upload once fewer than THREADS are in flight; more would only wait in memory."""

        def end(_: Future[SentPart]) -> None:
            self._in_flight.release()
            self._buffers.give_back(part)

        self._in_flight.acquire()
        job = self._pool.submit(upload.send, number, part.view)
        job.add_done_callback(end)
        return job

    def _complete(self, path: str, upload: MultipartUpload, parts: Sequence[SentPart]) -> ObjectInfo:
        size, earlier_try = sum(part.size_bytes for part in parts), False

        def complete() -> ObjectInfo:
            nonlocal earlier_try
            try:
                return self._written(path, size, *upload.complete_once(parts))
            except Exception as error:
                is_gone = isinstance(self._calls.translate(path, "complete", error), NotFoundError)
                if is_gone and earlier_try and self._is_ours(path, size, len(parts)):
                    return self.stat(path)  # an earlier try succeeded, only its response was lost
                earlier_try = True
                raise

        return self._call(path, "complete the upload of", complete)

    def _is_ours(self, path: str, size: int, num_parts: int) -> bool:
        try:
            entry = self.stat(path)
        except NotFoundError:
            return False
        return entry.size_bytes == size and entry.version.endswith(f"-{num_parts}")

    # Listing, deleting

    def folders(self, prefix: str = "") -> list[str]:
        start = self._folder_key(prefix)
        names = []
        for _, found in self._pages(prefix, Prefix=start, Delimiter="/"):
            names += [name[len(start) :].rstrip("/") for name in found]
        return sorted(name for name in names if name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for items, _ in self._pages(prefix, Prefix=self._folder_key(prefix)):
            for entry in items:
                self._seen(entry)
                yield entry

    def _pages(self, prefix: str, **query: Any) -> Iterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        """(Objects, folder prefixes) of each page of a listing."""
        listing = Listing(query["Prefix"], self.where(prefix))
        strip = len(self._folder_key(""))
        give_up_at = time.monotonic() + LISTING_DEADLINES * self._calls.policy.deadline_s

        def get() -> tuple[Sequence[ObjectInfo], Sequence[str]]:
            items, folders = listing.add(self._client.list_objects_v2(Bucket=self._bucket, **query, **listing.query))
            return list(listed(items, strip)), folders

        while not listing.is_done:
            if time.monotonic() > give_up_at:
                raise StoreError(
                    f"{self.where(prefix)}: the listing has not come to its end in "
                    f"{LISTING_DEADLINES * self._calls.policy.deadline_s:g} s"
                )
            yield self._call(prefix, "list", get)

    def _seen(self, entry: ObjectInfo) -> None:
        """The object that later reads must find is the one of this listing."""
        if entry.path in self._first_read:
            self._first_read[entry.path] = entry.version

    def stat(self, path: str) -> ObjectInfo:
        try:
            entry = self._call(path, "stat", lambda: check_head(path, self._head(self._key(path))))
        except NotFoundError:
            self._check_bucket()  # a response to HEAD does not show whether bucket or object is missing
            raise
        self._seen(entry)
        return entry

    def _head(self, key: str) -> Any:
        """The answer to HEAD. A refusal, which has no body there, is asked for its reason by a GET of one byte."""
        try:
            return self._client.head_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if (status := mute_refusal(error)) is None:
                raise
            try:
                self._client.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")["Body"].close()
            except Exception as told:
                if refusal(told) == status:
                    raise told from error
            raise

    def _check_bucket(self) -> None:
        if self._calls.is_bucket_seen:
            return
        with suppress(PermissionDeniedError):  # there, though it may not be looked at
            self._call("", "find", lambda: self._client.head_bucket(Bucket=self._bucket))

    def delete(self, paths: Iterable[str]) -> None:
        remaining = iter(paths)
        while batch := [self._key(path) for path in islice(remaining, DELETE_BATCH)]:
            self._delete_batch(batch)

    def _delete_batch(self, keys: Sequence[str]) -> None:
        if len(keys) == 1:
            self._call("", "delete", lambda: self._client.delete_object(Bucket=self._bucket, Key=keys[0]))
            return
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": False}

        def delete() -> None:
            check_deleted(self._client.delete_objects(Bucket=self._bucket, Delete=objects), keys, self._bucket)

        self._call("", "delete", delete)

    def honours_conditions(self) -> bool:
        return self._honours_conditions

    @cached_property
    def _honours_conditions(self) -> bool:
        host = str(self._client.meta.endpoint_url).split("/")[2].partition(":")[0]
        return host.endswith(".amazonaws.com") or probe_conditions(self)

    # Shared by all calls

    @property
    def _client(self) -> Any:
        return self._calls.client

    def _call(self, path: str, verb: str, action: Callable[[], T]) -> T:
        return self._calls.run(self.where(path), verb, action)

    def _key(self, path: str) -> str:
        return f"{self._folder_key('')}{check_relative(path)}"

    def _folder_key(self, prefix: str) -> str:
        whole = "/".join(part for part in (self._prefix, check_relative(prefix) if prefix else "") if part)
        return f"{whole}/" if whole else ""
