"""An S3 server's objects in memory, and its honest answers: as much of S3 as `S3Store` uses. No sockets, no signatures."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from xml.sax.saxutils import escape

PAGE_KEYS = 1000
DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request; `operation` is its name in S3's reference."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    operation: str

    @property
    def key(self) -> str:
        """The object's key; "" for the bucket."""
        return urllib.parse.unquote(self.path).lstrip("/").partition("/")[2]


@dataclass(slots=True)
class Answer:
    """An answer before it is sent. `sent` is how: see `tools.hostile.s3_server`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent: str = "whole"


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified_s: float


def parse_request(method: str, target: str, headers: dict[str, str], body: bytes) -> Request:
    """A request as S3 understands it."""
    path, _, query = target.partition("?")
    fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    is_bucket = "/" not in path.strip("/")
    operation = {
        ("GET", True): "ListObjectsV2", ("HEAD", True): "HeadBucket", ("POST", True): "DeleteObjects",
        ("GET", False): "GetObject", ("HEAD", False): "HeadObject",
        ("PUT", False): "UploadPart" if "partNumber" in fields else "PutObject",
        ("POST", False): "CreateMultipartUpload" if "uploads" in fields else "CompleteMultipartUpload",
        ("DELETE", False): "AbortMultipartUpload" if "uploadId" in fields else "DeleteObject",
    }.get((method, is_bucket), "")  # fmt: skip
    return Request(method=method, path=path, query=fields, headers=headers, body=body, operation=operation)


class MemoryS3:
    """One bucket. `answer` is thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._lock = threading.RLock()
        self._number = 0

    @property
    def objects(self) -> dict[str, bytes]:
        """A copy of all objects by key."""
        with self._lock:
            return {key: found.data for key, found in self._objects.items()}

    def put(self, key: str, data: bytes) -> str:
        """Store an object; returns its ETag, which no other object ever had."""
        with self._lock:
            self._number += 1
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()[:24]}{self._number:08x}"'
            self._objects[key] = _Object(data, etag, time.time())
            return etag

    def replace_all(self, objects: dict[str, bytes]) -> None:
        """Forget everything, then store `objects`."""
        with self._lock:
            self._objects.clear()
            self._uploads.clear()
            for key, data in objects.items():
                self.put(key, data)

    def answer(self, request: Request) -> Answer:
        """The honest answer."""
        with self._lock:
            return _ANSWERS[request.operation](self, request) if request.operation else error(400, "InvalidRequest")

    def _get_object(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return error(404, "NoSuchKey")
        size, asked = len(found.data), re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if asked is None:
            return Answer(headers=_of(found), body=found.data)
        first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
        if first >= size:
            return error(416, "InvalidRange")
        headers = {**_of(found), "Content-Range": f"bytes {first}-{last}/{size}"}
        if (first, last) != (0, size - 1):
            headers.pop("x-amz-checksum-crc32")
        return Answer(206, headers, found.data[first : last + 1])

    def _head_object(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return Answer(404, {"Content-Type": "application/xml"})
        return Answer(headers={**_of(found), "Content-Length": str(len(found.data))})

    def _head_bucket(self, _: Request) -> Answer:
        return Answer()

    def _put_object(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if request.headers.get("if-none-match") == "*" and found is not None:
            return error(412, "PreconditionFailed")
        if (wanted := request.headers.get("if-match")) is not None and (found is None or found.etag != wanted):
            return error(412, "PreconditionFailed") if found else error(404, "NoSuchKey")
        crc = crc32(request.body)
        if request.headers.get("x-amz-checksum-crc32", crc) != crc:
            return error(400, "BadDigest")
        return Answer(headers={"ETag": self.put(request.key, request.body), "x-amz-checksum-crc32": crc})

    def _create_multipart_upload(self, request: Request) -> Answer:
        self._number += 1
        name = f"upload-{self._number}"
        self._uploads[name] = {}
        return xml("InitiateMultipartUploadResult", f"<Key>{escape(request.key)}</Key><UploadId>{name}</UploadId>")

    def _upload_part(self, request: Request) -> Answer:
        upload = self._uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        upload[int(request.query["partNumber"])] = request.body
        etag = f'"{hashlib.md5(request.body, usedforsecurity=False).hexdigest()}"'
        return Answer(headers={"ETag": etag, "x-amz-checksum-crc32": crc32(request.body)})

    def _complete_multipart_upload(self, request: Request) -> Answer:
        upload = self._uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        numbers = [
            int(found.text or 0)
            for found in ElementTree.fromstring(request.body).iter()
            if found.tag.endswith("PartNumber")
        ]
        if numbers != sorted(upload) or not numbers:
            return error(400, "InvalidPart")
        del self._uploads[request.query["uploadId"]]
        etag = self.put(request.key, b"".join(upload[number] for number in numbers))
        whole = f'{etag[:-1]}-{len(numbers)}"'
        self._objects[request.key] = _Object(self._objects[request.key].data, whole, time.time())
        return xml("CompleteMultipartUploadResult", f"<Key>{escape(request.key)}</Key><ETag>{escape(whole)}</ETag>")

    def _abort_multipart_upload(self, request: Request) -> Answer:
        self._uploads.pop(request.query["uploadId"], None)
        return Answer(204)

    def _delete_object(self, request: Request) -> Answer:
        self._objects.pop(request.key, None)
        return Answer(204)

    def _delete_objects(self, request: Request) -> Answer:
        keys = _texts(request.body, "Key")
        for key in keys:
            self._objects.pop(key, None)
        return xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def _list_objects_v2(self, request: Request) -> Answer:
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        after = request.query.get("continuation-token", "")
        names: dict[str, _Object | None] = {}
        for key in sorted(self._objects):
            if key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                names[prefix + head + found if found else key] = None if found else self._objects[key]
        left = [name for name in names if name > after]
        shown, is_cut = left[:PAGE_KEYS], len(left) > PAGE_KEYS
        quoted = urllib.parse.quote
        rows = [f"<Name>bucket</Name><Prefix>{quoted(prefix)}</Prefix><EncodingType>url</EncodingType>"]
        rows.append(f"<KeyCount>{len(shown)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>")
        if is_cut:
            rows.append(f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>")
        for name in shown:
            found_object = names[name]
            if found_object is None:
                rows.append(f"<CommonPrefixes><Prefix>{quoted(name)}</Prefix></CommonPrefixes>")
            else:
                rows.append(_row(quoted(name), found_object))
        return xml("ListBucketResult", "".join(rows))


_ANSWERS: dict[str, Callable[[MemoryS3, Request], Answer]] = {
    "AbortMultipartUpload": MemoryS3._abort_multipart_upload,
    "CompleteMultipartUpload": MemoryS3._complete_multipart_upload,
    "CreateMultipartUpload": MemoryS3._create_multipart_upload,
    "DeleteObject": MemoryS3._delete_object,
    "DeleteObjects": MemoryS3._delete_objects,
    "GetObject": MemoryS3._get_object,
    "HeadBucket": MemoryS3._head_bucket,
    "HeadObject": MemoryS3._head_object,
    "ListObjectsV2": MemoryS3._list_objects_v2,
    "PutObject": MemoryS3._put_object,
    "UploadPart": MemoryS3._upload_part,
}


def _texts(document: bytes, tag: str) -> list[str]:
    """The texts of all elements of that name in any namespace."""
    return [found.text or "" for found in ElementTree.fromstring(document).iter() if found.tag.endswith(tag)]


def _of(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.modified_s, usegmt=True),
        "Content-Type": "binary/octet-stream",
        "x-amz-checksum-crc32": crc32(found.data),
    }


def _row(name: str, found: _Object) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified_s))
    return (
        f"<Contents><Key>{name}</Key><LastModified>{when}</LastModified><ETag>{escape(found.etag)}</ETag>"
        f"<Size>{len(found.data)}</Size></Contents>"
    )


def xml(root: str, content: str) -> Answer:
    """An answer 200 with a document."""
    body = f'{DECLARATION}<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{root}>'
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())


def error(status: int, code: str) -> Answer:
    """An error as S3 answers it."""
    body = f"{DECLARATION}<Error><Code>{code}</Code><Message>said by the test</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def crc32(data: bytes) -> str:
    """The CRC-32 of `data` in the form of `x-amz-checksum-crc32`."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
