"""Send botocore's requests and refuse answers that no S3 server gives: web pages, compressed, short or endless bodies.

botocore reads a body of any length, does not compare it with Content-Length, and parses any XML, so the page of a proxy becomes
an empty listing. What an answer must say for its operation is checked in `s3_answers`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
)
from urllib3.exceptions import ConnectTimeoutError

from titan_ckpt.errors import TransientStoreError
from titan_ckpt.location import redact
from titan_ckpt.store.deadline import current_call, heard
from titan_ckpt.store.s3_errors import WebPageError
from titan_ckpt.store.time_limit import on_a_thread

# Of any answer but an object's bytes. A page of 1000 keys of 1024 bytes, each byte written as `%XX`, takes about 4 MB.
ANSWER_BYTES = 16 << 20
SEND_SLICE_BYTES = 256 << 10
# The root element of the answer to each operation that `S3Store` uses; None: it has no body.
ROOTS = {
    "AbortMultipartUpload": None,
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "DeleteObject": None,
    "DeleteObjects": "DeleteResult",
    "GetObject": None,
    "HeadBucket": None,
    "HeadObject": None,
    "ListObjectsV2": "ListBucketResult",
    "PutObject": None,
    "UploadPart": None,
}
STATUS = {"AbortMultipartUpload": (204, 200), "DeleteObject": (204, 200), "GetObject": (206, 200)}
_ROOT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*\?>)?\s*(?:<!--.*?-->\s*)*<([A-Za-z]+)[\s>/]", re.DOTALL)


def guard(client: Any) -> None:
    """Make `client` send its requests through this module, within the `TimedCall` of the calling thread."""
    session = client._endpoint.http_session
    session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)
    client.meta.events.register("before-send.s3", partial(_send, session))
    client.meta.events.register("before-sign.s3.GetObject", _ask_for_checksum)
    client.meta.events.register_last("before-parameter-build.s3", _never_redirect)


class _Timed:
    """A connection whose socket ends with the thread's `TimedCall`."""

    host: str
    port: int
    timeout: Any
    sock: Any

    def _new_conn(self) -> Any:
        call = current_call()
        if call is not None:
            self.timeout = min(self.timeout or call.left_s, call.left_s)  # also limits a TLS handshake
            self._look_up_in_time()
        connection = super()._new_conn()  # type: ignore[misc]
        if call is not None:
            call.use(connection)
        return connection

    def _look_up_in_time(self) -> None:
        """Resolve the host's name on a thread, since a resolver without servers holds its caller for minutes."""
        look_up = lambda: socket.getaddrinfo(self.host, self.port, 0, socket.SOCK_STREAM)
        if on_a_thread(self.timeout, look_up) is None:
            raise ConnectTimeoutError(self, f"the name {self.host} was not resolved within {self.timeout:.3g} s")

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._watch()

    def request(self, *arguments: Any, **options: Any) -> Any:
        self._watch()
        return super().request(*arguments, **options)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        """Send in slices, so that a slow upload is seen to live."""
        if not isinstance(data, bytes | bytearray | memoryview):
            super().send(data)  # type: ignore[misc]
            return
        view = memoryview(data)
        for start in range(0, len(view), SEND_SLICE_BYTES):
            super().send(view[start : start + SEND_SLICE_BYTES])  # type: ignore[misc]
            heard()

    def _watch(self) -> None:
        call = current_call()
        if call is not None and self.sock is not None:
            call.use(self.sock)


class _Connection(_Timed, AWSHTTPConnection):  # type: ignore[misc]
    """HTTP."""


class _TlsConnection(_Timed, AWSHTTPSConnection):  # type: ignore[misc]
    """HTTPS."""


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


def _ask_for_checksum(request: Any, **_: Any) -> None:
    """Ask for the object's checksum. Not by botocore's parameter, which makes it compare a range with it."""
    request.headers["x-amz-checksum-mode"] = "ENABLED"


def _never_redirect(context: dict[str, Any], **_: Any) -> None:
    """Leave other regions to `s3_calls`: botocore goes in circles where an answer names none, and cannot rewind our bodies."""
    context["s3_redirect"] = {**context.get("s3_redirect", {}), "redirected": True}


class _Body:
    """A body that was read, as botocore reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._data


def _send(session: Any, request: Any, event_name: str, **_: Any) -> AWSResponse:
    """The answer to `request`; its body is read unless it is an object's. TransientStoreError for what S3 does not answer."""
    operation = event_name.rpartition(".")[2]
    request.stream_output = True  # else the session reads the body, however long
    answer = session.send(request)
    if (call := current_call()) is not None:
        call.heard(is_answer=True)
    try:
        encoding = str(answer.headers.get("Content-Encoding", "")).strip().lower()
        if encoding not in ("", "identity", "aws-chunked"):
            raise TransientStoreError(
                f"the answer is compressed ({encoding[:40]}), which was not asked for, or the object was stored with this "
                f"Content-Encoding (store it without); {_PROXY}"
            )
        if operation == "GetObject" and answer.status_code in STATUS[operation]:
            return answer
        data = b"" if request.method == "HEAD" else _whole_body(answer)
        read = AWSResponse(
            answer.url, answer.status_code, answer.headers, _Body(data.lstrip())
        )  # S3 sends spaces while it works
        if answer.status_code < 300:
            _check_result(read, data, operation)
        else:
            _check_error(read, data, request.method)
    except BaseException:
        answer.raw.close()
        raise
    return read


_PROXY = "is the endpoint an S3 server, and is there a proxy that changes its answers?"


def _whole_body(answer: AWSResponse) -> bytes:
    """The body of an answer, if it is as long as it says and no longer than ANSWER_BYTES."""
    told = answer.headers.get("Content-Length")
    if told is not None and not (told.isdecimal() and int(told) <= ANSWER_BYTES):
        raise TransientStoreError(f"the answer is {told[:40]!r} bytes long, expected {ANSWER_BYTES} at most; {_PROXY}")
    data = bytearray()
    while piece := answer.raw.read(1 << 16):
        data += piece
        heard()
        if len(data) > ANSWER_BYTES:
            raise TransientStoreError(f"the answer goes on after {ANSWER_BYTES} bytes; {_PROXY}")
    if told is not None and len(data) != int(told):
        raise TransientStoreError(f"the connection closed after {len(data)} of {told} bytes of the answer")
    return bytes(data)


def _check_result(answer: AWSResponse, data: bytes, operation: str) -> None:
    """Check the status and the kind of body; an answer 200 that holds an error becomes an error, as S3 documents it."""
    if answer.status_code not in STATUS.get(operation, (200,)):
        raise TransientStoreError(f"the answer to {operation} has the status {answer.status_code}; {_PROXY}")
    root = _root(data)
    if root == "Error":
        answer.status_code = 500
    elif operation in ROOTS and (root != ROOTS[operation] or (root is None and data.strip())):
        raise TransientStoreError(f"the answer to {operation} is {_kind(data)}, not S3's; {_PROXY}")


def _check_error(answer: AWSResponse, data: bytes, method: str) -> None:
    """Check that an error is S3's own, so that a proxy's "404, not found" does not pass for a missing object."""
    is_page = str(answer.headers.get("Content-Type", "")).lower().startswith("text/html")
    if (data.strip() and _root(data) != "Error") or (method == "HEAD" and is_page):
        target = answer.headers.get("Location")
        leads = f" that leads to {redact(str(target)[:200])}" if target else ""
        kind = _kind(data) if data.strip() else "a web page"
        text = f"the answer {answer.status_code} is {kind}{leads}, not S3's; {_PROXY}"
        raise WebPageError(text, answer.status_code) if method == "HEAD" else TransientStoreError(text)


def _root(data: bytes) -> str | None:
    """The name of the root element of an XML document."""
    found = _ROOT.match(data)
    return None if found is None else found[1].decode("ascii")


def _kind(data: bytes) -> str:
    if not data.strip():
        return "empty"
    start = data[:200].lstrip().lower()
    return "a web page" if start.startswith((b"<!doctype html", b"<html")) else f"{bytes(data[:40])!r}"
