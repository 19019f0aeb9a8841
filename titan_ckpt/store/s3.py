"""S3 and compatible servers, through the synchronous botocore client.

A ranged GET reads from the socket into the caller's buffer, a multipart upload sends slices of the caller's buffers, and the
server checks a CRC32 of each request (measured against other clients in docs/performance.md). botocore's retries are off:
`store.base.retry` alone decides what is transient and enforces one deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, TypeVar

from titan_ckpt.errors import ConditionFailedError, NotFoundError, StoreError, TitanError, TransientStoreError
from titan_ckpt.location import check_relative, normalise
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, Store, probe_conditions, retry
from titan_ckpt.store.s3_client import S3Options, make_client
from titan_ckpt.store.s3_errors import translate
from titan_ckpt.store.s3_parts import (
    PART_BYTES,
    PartBuffers,
    UploadPart,
    crc32_text,
    etag,
    server_time_s,
    split_url,
    total_size,
    upload_parts,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

PARTS_IN_FLIGHT = 4
THREADS = 8
READ_SLICE_BYTES = 512 << 10
DELETE_BATCH = 1000


class S3Store(Store):
    """Objects under `s3://bucket/prefix`.

    Credentials, region and endpoint come from `options` (see `S3Options`), the environment or the AWS config files.
    """

    def __init__(self, url: str, policy: RetryPolicy, **options: Any) -> None:
        super().__init__(normalise(url))
        self._policy = policy
        self._bucket, self._prefix = split_url(self.url)
        self._client = make_client(S3Options.of(options), self.where(""))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")
        self._in_flight = threading.BoundedSemaphore(THREADS)
        self._buffers = PartBuffers()
        self._bucket_seen = False

    # Reading

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        if len(view) <= PART_BYTES:
            self._get_range(path, start, view)
            return
        jobs = [
            self._pool.submit(self._get_range, path, start + offset, view[offset : offset + PART_BYTES])
            for offset in range(0, len(view), PART_BYTES)
        ]
        if len(set(_all_results(jobs))) > 1:
            raise StoreError(f"{self.where(path)}: was replaced while it was being read; open the checkpoint again")

    def _get_range(self, path: str, start: int, view: memoryview) -> str:
        """Fill `view` from byte `start`; returns the object's ETag."""
        if len(view) == 0:
            return str(self._head(path)["ETag"])

        def get() -> str:
            response = self._client.get_object(
                Bucket=self._bucket, Key=self._key(path), Range=f"bytes={start}-{start + len(view) - 1}"
            )
            body, done = response["Body"], 0
            give_up_at = time.monotonic() + self._policy.deadline_s
            try:
                while done < len(view) and time.monotonic() < give_up_at:
                    count = body.readinto(view[done : done + READ_SLICE_BYTES])
                    if count == 0:
                        break
                    done += count
            except BaseException:
                body.close()
                raise
            if done < len(view):
                raise self._too_short(path, start, len(view), total_size(response))
            return str(response["ETag"])

        return self._call(path, "read", get)

    def _too_short(self, path: str, start: int, wanted: int, size: int | None) -> StoreError:
        if size is not None and start + wanted <= size:
            return TransientStoreError(f"{self.where(path)}: the connection closed before {wanted} bytes had arrived")
        end = "" if size is None else f"ends at byte {size}, but "
        return StoreError(f"{self.where(path)}: {end}{wanted} bytes from byte {start} were requested")

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
        view, earlier_try = memoryview(data).cast("B"), False

        def put() -> ObjectInfo:
            nonlocal earlier_try
            try:
                return self._put_once(path, view, **condition)
            except Exception as error:
                lost = isinstance(self._translate(path, "write", error), ConditionFailedError | NotFoundError)
                if lost and earlier_try and self._holds(path, view):
                    return self.stat(path)  # an earlier try succeeded, only its response was lost
                earlier_try = True
                raise

        try:
            return self._call(path, "write", put)
        except NotFoundError as error:
            if version is None:
                raise
            raise ConditionFailedError(f"{self.where(path)}: was deleted by another writer") from error

    def _holds(self, path: str, view: memoryview) -> bool:
        try:
            return self.read(path) == view
        except NotFoundError:
            return False

    def _put(self, path: str, view: memoryview) -> ObjectInfo:
        return self._call(path, "write", lambda: self._put_once(path, view))

    def _put_once(self, path: str, view: memoryview, **condition: str) -> ObjectInfo:
        response = self._client.put_object(
            Bucket=self._bucket, Key=self._key(path), Body=view, ChecksumCRC32=crc32_text(view), **condition
        )
        return self._written(path, len(view), response)

    def _written(self, path: str, size_bytes: int, response: Any) -> ObjectInfo:
        return ObjectInfo(path=path, size_bytes=size_bytes, modified_s=server_time_s(response), version=etag(response))

    def _write_multipart(self, path: str, parts: Iterator[UploadPart]) -> ObjectInfo:
        upload = {"Bucket": self._bucket, "Key": self._key(path)}
        begin = lambda: self._client.create_multipart_upload(**upload, ChecksumAlgorithm="CRC32")
        upload["UploadId"] = self._call(path, "start a multipart upload of", begin)["UploadId"]
        in_flight: set[Future[dict[str, Any]]] = set()
        sent: list[dict[str, Any]] = []
        size = 0
        try:
            for number, part in enumerate(parts, start=1):
                size += len(part.view)
                in_flight.add(self._begin_part(path, upload, number, part))
                del part
                if len(in_flight) >= PARTS_IN_FLIGHT:
                    done, in_flight = wait(in_flight, return_when=FIRST_COMPLETED)
                    sent += [job.result() for job in done]
            sent += [job.result() for job in in_flight]
            sent.sort(key=lambda response: int(response["PartNumber"]))
            return self._complete(path, upload, sent, size)
        except BaseException:
            _drop(in_flight)
            self._abort(path, upload)
            raise

    def _begin_part(self, path: str, upload: dict[str, Any], number: int, part: UploadPart) -> Future[dict[str, Any]]:
        """Submit a part for upload once fewer than THREADS are in flight; more would only wait in memory."""

        def end(_: Future[dict[str, Any]]) -> None:
            self._in_flight.release()
            self._buffers.give_back(part)

        self._in_flight.acquire()
        job = self._pool.submit(self._upload_part, path, upload, number, part.view)
        job.add_done_callback(end)
        return job

    def _upload_part(self, path: str, upload: dict[str, Any], number: int, view: memoryview) -> dict[str, Any]:
        crc = crc32_text(view)
        send = partial(self._client_upload_part, view, **upload, PartNumber=number, ChecksumCRC32=crc)
        response = self._call(path, f"upload part {number} of", send)
        return {"PartNumber": number, "ETag": response["ETag"], "ChecksumCRC32": crc}

    def _client_upload_part(self, view: memoryview, **arguments: Any) -> Any:
        return self._client.upload_part(**arguments, Body=view)

    def _complete(self, path: str, upload: dict[str, Any], parts: list[dict[str, Any]], size: int) -> ObjectInfo:
        earlier_try = False

        def complete() -> ObjectInfo:
            nonlocal earlier_try
            try:
                response = self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
            except Exception as error:
                is_gone = isinstance(self._translate(path, "complete", error), NotFoundError)
                if is_gone and earlier_try and self._is_ours(path, size, len(parts)):
                    return self.stat(path)  # an earlier try succeeded, only its response was lost
                earlier_try = True
                raise
            return self._written(path, size, response)

        return self._call(path, "complete the upload of", complete)

    def _is_ours(self, path: str, size: int, num_parts: int) -> bool:
        try:
            entry = self.stat(path)
        except NotFoundError:
            return False
        return entry.size_bytes == size and entry.version.endswith(f"-{num_parts}")

    def _abort(self, path: str, upload: dict[str, Any]) -> None:
        try:
            self._call(path, "abort the upload of", lambda: self._client.abort_multipart_upload(**upload))
        except TitanError as error:
            log.warning("an unfinished multipart upload is left behind and may be billed: %s", error)

    # Listing, deleting

    def folders(self, prefix: str = "") -> list[str]:
        start = self._folder_key(prefix)
        names = []
        for page in self._pages(prefix, Prefix=start, Delimiter="/"):
            names += [str(p["Prefix"])[len(start) :].rstrip("/") for p in page.get("CommonPrefixes", [])]
        return sorted(name for name in names if name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        strip = len(self._folder_key(""))
        for page in self._pages(prefix, Prefix=self._folder_key(prefix)):
            for item in page.get("Contents", []):
                if not item["Key"].endswith("/"):
                    yield ObjectInfo(
                        path=item["Key"][strip:],
                        size_bytes=int(item["Size"]),
                        modified_s=item["LastModified"].timestamp(),
                        version=etag(item),
                    )

    def _pages(self, prefix: str, **query: Any) -> Iterator[Any]:
        while True:
            page = self._call(prefix, "list", lambda: self._client.list_objects_v2(Bucket=self._bucket, **query))
            yield page
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, path: str) -> ObjectInfo:
        response = self._head(path)
        return ObjectInfo(
            path=path,
            size_bytes=int(response["ContentLength"]),
            modified_s=response["LastModified"].timestamp(),
            version=etag(response),
        )

    def _head(self, path: str) -> Any:
        key = self._key(path)
        try:
            return self._call(path, "stat", lambda: self._client.head_object(Bucket=self._bucket, Key=key))
        except NotFoundError:
            self._check_bucket()  # a response to HEAD does not show whether bucket or object is missing
            raise

    def _check_bucket(self) -> None:
        if not self._bucket_seen:
            self._call("", "find", lambda: self._client.head_bucket(Bucket=self._bucket))

    def delete(self, paths: Iterable[str]) -> None:
        remaining = iter(paths)
        while batch := [self._key(path) for path in islice(remaining, DELETE_BATCH)]:
            self._delete_batch(batch)

    def _delete_batch(self, keys: Sequence[str]) -> None:
        if len(keys) == 1:
            self._call("", "delete", lambda: self._client.delete_object(Bucket=self._bucket, Key=keys[0]))
            return
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}

        def delete() -> None:
            response = self._client.delete_objects(Bucket=self._bucket, Delete=objects)
            for failure in response.get("Errors", []):
                text = f"s3://{self._bucket}/{failure.get('Key')}: cannot delete: {failure.get('Code')}"
                is_transient = failure.get("Code") in ("InternalError", "SlowDown", "ServiceUnavailable")
                raise (TransientStoreError if is_transient else StoreError)(text)

        self._call("", "delete", delete)

    def honours_conditions(self) -> bool:
        return self._honours_conditions

    @cached_property
    def _honours_conditions(self) -> bool:
        host = str(self._client.meta.endpoint_url).split("/")[2].partition(":")[0]
        return host.endswith(".amazonaws.com") or probe_conditions(self)

    # Shared by all calls

    def _call(self, path: str, verb: str, action: Callable[[], T]) -> T:
        """Run `action` with retries, its errors translated to ours."""

        def attempt() -> T:
            try:
                response = action()
            except TitanError:
                raise
            except Exception as error:
                raise self._translate(path, verb, error) from error
            self._bucket_seen = True
            return response

        return retry(attempt, self._policy, what=f"{verb} {self.where(path)}")

    def _translate(self, path: str, verb: str, error: Exception) -> Exception:
        return translate(error, f"{self.where(path)}: cannot {verb}", self._bucket)

    def _key(self, path: str) -> str:
        return f"{self._folder_key('')}{check_relative(path)}"

    def _folder_key(self, prefix: str) -> str:
        whole = "/".join(part for part in (self._prefix, check_relative(prefix) if prefix else "") if part)
        return f"{whole}/" if whole else ""


def _all_results(jobs: list[Future[T]]) -> list[T]:
    """Results of all jobs. If one fails, cancel or await the rest, since they write into the caller's memory."""
    try:
        return [job.result() for job in jobs]
    except BaseException:
        _drop(jobs)
        raise


def _drop(jobs: Iterable[Future[T]]) -> None:
    """Cancel the jobs that have not started and await the others."""
    remaining = list(jobs)
    for job in remaining:
        job.cancel()
    wait(remaining)
