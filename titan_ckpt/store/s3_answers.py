"""What S3's answers must say: status, range, length, ETag, checksums, pages of a listing. Pure checks of botocore's records.

A wrong answer raises TransientStoreError: a proxy or a server may give the right one to the next try.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import unquote_plus

from titan_ckpt.errors import StoreError, TransientStoreError
from titan_ckpt.location import redact
from titan_ckpt.store.base import ObjectInfo
from titan_ckpt.store.deadline import heard
from titan_ckpt.store.s3_errors import error_of
from titan_ckpt.store.s3_parts import crc32_text

T = TypeVar("T")
READ_TRIES = 3
MAX_LISTED = 2_000_000
READ_SLICE_BYTES = 512 << 10
LARGEST_BYTES = 1 << 60  # S3 stores 50 TB at most
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class ReplacedError(StoreError):
    """The object is not the one that was read before; what was read of it so far is of no use."""


def etag(answer: Any) -> str:
    """An object's ETag without its quotes."""
    found = answer.get("ETag")
    if not isinstance(found, str) or not found.strip('" '):
        raise TransientStoreError("the answer has no ETag")
    return found.strip('"')


def check_range(answer: Any, start: int, length: int, where: str) -> tuple[str, int | None]:
    """(ETag, size if it is said) of an object whose bytes from `start` the answer promises. StoreError if it is too short."""
    status, told = int(answer["ResponseMetadata"]["HTTPStatusCode"]), answer.get("ContentLength")
    first, last, total = _promised(answer, status)
    if total is not None and start + length > total:
        raise StoreError(f"{where}: ends at byte {total}, but {length} bytes from byte {start} were requested")
    if (first, last) != (start, start + length - 1):
        raise TransientStoreError(
            f"bytes {start} to {start + length} were requested, but the answer {status} holds {first} to {last + 1}"
        )
    if told is not None and int(told) != length:
        raise TransientStoreError(f"{length} bytes were requested, but the answer has {told}")
    return etag(answer), total


def check_same(where: str, entry: ObjectInfo, version: str, size: int | None) -> None:
    """ReplacedError unless an answer has the ETag, and the size if it is said, of the object that `entry` describes."""
    if version != entry.version or size not in (None, entry.size_bytes):
        expected = f"{entry.size_bytes} bytes (ETag {entry.version})"
        raise ReplacedError(
            f"{where}: was replaced while it was being read: first {expected}, then {size} (ETag {version})"
        )


def read_again(where: str, read: Callable[[], T]) -> T:
    """`read()`, again if the object was replaced meanwhile."""
    for _ in range(READ_TRIES):
        try:
            return read()
        except ReplacedError as error:
            last = error
    raise ReplacedError(f"{where}: {READ_TRIES} reads failed: {last}")


def _promised(answer: Any, status: int) -> tuple[int, int, int | None]:
    """(first byte, last byte, size of the object): an answer 200 holds the whole object, however it was asked."""
    if status == 200:
        size = answer.get("ContentLength")
        if size is None:
            raise TransientStoreError("the answer 200 has no length; a range was requested, which has the status 206")
        return 0, int(size) - 1, int(size)
    found = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange")))
    if found is None:
        raise TransientStoreError(
            f"the answer {status} does not say which bytes it holds ({answer.get('ContentRange')!r})"
        )
    return int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3])


def fill(views: Sequence[memoryview], body: Any) -> None:
    """Read a body of exactly the length of `views`, which are filled one after another."""
    length, before = sum(map(len, views)), 0
    for view in views:
        done = 0
        while done < len(view):
            count = body.readinto(view[done : done + READ_SLICE_BYTES])
            if count == 0:
                raise TransientStoreError(f"the connection closed after {before + done} of {length} bytes")
            done += count
            heard()
        before += done
    if body.read(1):
        raise TransientStoreError(f"the answer goes on after the {length} bytes that were requested")


def check_checksum(answer: Any, start: int, data: Sequence[memoryview]) -> None:
    """Compare the CRC-32 of `data` with the object's, if the answer has it and `data` is the whole object."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    expected, length = headers.get("x-amz-checksum-crc32", ""), sum(map(len, data))
    is_whole = start == 0 and str(answer.get("ContentRange", f"/{length}")).endswith(f"/{length}")
    # "-N" or COMPOSITE: of the parts' checksums
    if not expected or "-" in expected or headers.get("x-amz-checksum-type") == "COMPOSITE" or not is_whole:
        return
    if crc32_text(*data) != expected:
        raise TransientStoreError("the bytes that arrived do not match the object's CRC-32")


def check_written(answer: Any, crc32: str = "") -> str:
    """The ETag of what was written. If the server answers a CRC-32, it must be ours."""
    echoed = answer.get("ChecksumCRC32")
    if crc32 and echoed and "-" not in echoed and echoed != crc32:
        raise TransientStoreError(f"the server received other bytes: its CRC-32 is {echoed}, ours {crc32}")
    return etag(answer)


def check_head(path: str, answer: Any) -> ObjectInfo:
    """An object's size, time and version."""
    size, modified = answer.get("ContentLength"), answer.get("LastModified")
    if not isinstance(size, int) or not 0 <= size <= LARGEST_BYTES or not isinstance(modified, datetime):
        raise TransientStoreError(
            f"the answer has no size or no time (Content-Length {size!r}, Last-Modified {modified!r})"
        )
    return ObjectInfo(path=path, size_bytes=size, modified_s=modified.timestamp(), version=etag(answer))


def check_upload_id(answer: Any) -> str:
    """The id of a multipart upload."""
    found = answer.get("UploadId")
    if not isinstance(found, str) or not found:
        raise TransientStoreError("the answer names no UploadId")
    return found


def check_deleted(answer: Any, keys: Sequence[str], bucket: str) -> None:
    """Every one of `keys` must be reported as deleted."""
    for failure in answer.get("Errors", []):
        code, message = str(failure.get("Code")), redact(str(failure.get("Message", "")))
        text = f"s3://{bucket}/{failure.get('Key')}: cannot delete: {code}: {message}".rstrip(": .")
        raise error_of(code, 200, text, "DeleteObjects")
    silent = set(keys) - {item.get("Key") for item in answer.get("Deleted", [])}
    if silent:
        raise TransientStoreError(f"s3://{bucket}: {len(silent)} of {len(keys)} keys were neither deleted nor refused")


@dataclass(slots=True)
class Listing:
    """The pages of one listing of `prefix`, which must come to an end: other keys and another token on each page."""

    prefix: str
    where: str
    query: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    _seen: set[str] = field(default_factory=set)
    _tokens: set[str] = field(default_factory=set)

    def add(self, page: Any) -> tuple[list[Any], list[str]]:
        """(Objects, folder prefixes) of the next page; afterwards `query` asks for the one after it, unless `is_done`."""
        items, folders = page.get("Contents", []), [item.get("Prefix") for item in page.get("CommonPrefixes", [])]
        names = [*(item.get("Key") for item in items), *folders]
        self._check_page(page, names, len(items))
        if len(self._seen) + len(names) > MAX_LISTED or len(self._tokens) > MAX_LISTED:
            raise StoreError(f"{self.where}: more than {MAX_LISTED} objects, or a listing without end")
        repeated = next((name for name in names if name in self._seen), None)
        if repeated is not None or len(set(names)) < len(names):
            raise StoreError(
                f"{self.where}: the listing repeats itself ({repeated or names[0]!r}), so it is not complete"
            )
        self._seen.update(names)
        self._go_on(page)
        return items, folders

    def _check_page(self, page: Any, names: Sequence[Any], num_items: int) -> None:
        # SeaweedFS does not encode the prefix of an answer whose names it encodes, and botocore decodes both.
        if page.get("Prefix", "") not in (self.prefix, unquote_plus(self.prefix)):
            raise TransientStoreError(f"the listing is of {page.get('Prefix')!r}, not of {self.prefix!r}")
        if not isinstance(page.get("IsTruncated"), bool):
            raise TransientStoreError("the listing does not say whether it is complete (IsTruncated)")
        if any(not isinstance(name, str) or not name.startswith(self.prefix) for name in names):
            raise TransientStoreError(f"the listing has names outside {self.prefix!r}")
        if page.get("KeyCount", len(names)) not in (len(names), num_items):  # s3rver counts no folders
            raise TransientStoreError(f"the listing has {len(names)} names, but says {page['KeyCount']}")

    def _go_on(self, page: Any) -> None:
        token = page.get("NextContinuationToken")
        self.is_done = not page["IsTruncated"]
        if self.is_done:
            return
        if not isinstance(token, str) or not token or token in self._tokens:
            raise StoreError(f"{self.where}: the listing does not end: its continuation token is {token!r} again")
        self._tokens.add(token)
        self.query = {"ContinuationToken": token}


def listed(items: Sequence[Any], strip: int) -> Iterator[ObjectInfo]:
    """The objects of a page, with the first `strip` characters of their keys removed. Folder markers are no objects."""
    for item in items:
        if not item["Key"].endswith("/"):
            yield check_head(item["Key"][strip:], {**item, "ContentLength": item.get("Size")})
