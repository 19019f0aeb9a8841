"""An HTTP proxy on loopback that injects faults into requests to an S3 server: resets, timeouts, 503s.

with FaultyProxy("127.0.0.1", port) as proxy:
    proxy.rule = lambda request: RequestFault(kind=RequestFaultKind.BUSY) if request.method == "PUT" else None
    proxy.heal()

Requests are signed for the proxy's address and forwarded with their Host header, so their signatures stay valid.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeAlias

CHUNK_BYTES = 1 << 16
SERVER_TIMEOUT_S = 120.0
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class RequestFaultKind(StrEnum):
    """What goes wrong with a request."""

    BUSY = "busy"  # 503 SlowDown
    CUT = "cut"  # reset once `after_bytes` of the request have passed
    LOST = "lost"  # the server handles it, its answer is reset
    TRUNCATED = "truncated"  # the answer's body ends after `after_bytes`
    SLOW = "slow"  # the answer is `seconds` late
    HANG = "hang"  # no answer for `seconds`, then a reset


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request as rules see it."""

    method: str
    path: str
    body_bytes: int
    client: str  # IP address


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFault:
    """One request's fault; `RequestFaultKind` describes when `after_bytes` and `seconds` apply."""

    kind: RequestFaultKind
    after_bytes: int = 0
    seconds: float = 0.0


Rule: TypeAlias = Callable[[HttpRequest], RequestFault | None]


class FaultyProxy:
    """Forwards requests unless its `rule` returns a fault; counts faults by kind, and all requests."""

    def __init__(self, host: str, port: int, *, listen: str = "127.0.0.1") -> None:
        self.target = (host, port)
        self.rule: Rule = _fine
        self.faults: Counter[str] = Counter()
        self.num_requests = 0
        self.is_closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(self, listen)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The proxy's URL, for AWS_ENDPOINT_URL."""
        return f"http://{self._server.server_address[0]!s}:{self.port}"

    @property
    def num_cut(self) -> int:
        """Requests that were cut."""
        return self.faults[RequestFaultKind.CUT]

    def cut_after(self, num_bytes: int, *, times: int = 1 << 30) -> None:
        """Reset up to `times` requests once `num_bytes` of each have passed; smaller requests pass."""
        left = times

        def rule(request: HttpRequest) -> RequestFault | None:
            nonlocal left
            with self._lock:
                if left <= 0 or request.body_bytes < num_bytes - 1:
                    return None
                left -= 1
            return RequestFault(kind=RequestFaultKind.CUT, after_bytes=num_bytes)

        self.rule = rule

    def heal(self) -> None:
        """Stop injecting faults."""
        self.rule = _fine

    def choose(self, request: HttpRequest) -> RequestFault | None:
        """Apply the rule to a request and count the result."""
        fault = self.rule(request)
        with self._lock:
            self.num_requests += 1
            if fault is not None:
                self.faults[fault.kind] += 1
        return fault

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy, listen: str) -> None:
        self.proxy = proxy
        super().__init__((listen, 0), _Handler)

    def handle_error(self, *_: object) -> None:
        """Print no traceback: clients are expected to disconnect, for instance when killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: socket.socket

    def log_message(self, format: str, *_: Any) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        request = HttpRequest(method=self.command, path=self.path, body_bytes=size, client=str(self.client_address[0]))
        fault = self.server.proxy.choose(request)
        if fault is None:
            self._forward(size)
        elif fault.kind == RequestFaultKind.BUSY:
            self._send_busy(size)
        elif fault.kind == RequestFaultKind.HANG:
            self._wait(fault.seconds)
            self._reset()
        elif fault.kind == RequestFaultKind.SLOW:
            self._wait(fault.seconds)
            self._forward(size)
        else:
            self._forward(size, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def _send_busy(self, size: int) -> None:
        self._skip(size)
        self.send_response_only(503, "Slow Down")
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(BUSY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(BUSY)

    def _skip(self, size: int) -> None:
        while size and (data := self.rfile.read(min(size, CHUNK_BYTES))):
            size -= len(data)

    def _wait(self, seconds: float) -> None:
        """Wait until the client disconnects, the proxy closes or `seconds` have passed."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at and not self.server.proxy.is_closing.wait(0.05):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def _forward(self, size: int, fault: RequestFault | None = None) -> None:
        upstream = http.client.HTTPConnection(*self.server.proxy.target, timeout=SERVER_TIMEOUT_S)
        try:
            if self._send(upstream, size, fault):
                self._relay(upstream.getresponse(), fault)
        except (OSError, http.client.HTTPException):
            self._reset()  # server or client disconnected
        finally:
            upstream.close()

    def _send(self, upstream: http.client.HTTPConnection, size: int, fault: RequestFault | None) -> bool:
        """Forward the request; False if it was cut."""
        limit = fault.after_bytes if fault is not None and fault.kind == RequestFaultKind.CUT else None
        if limit is not None and limit <= 1:
            return self._reset()
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                upstream.putheader(name, value)
        upstream.endheaders()
        passed = 0
        while passed < size:
            data = self.rfile.read1(min(size - passed, CHUNK_BYTES))
            if not data:
                return self._reset()
            passed += len(data)
            if limit is not None and passed >= limit:
                return self._reset()
            upstream.send(data)
        return limit is None or self._reset()

    def _relay(self, answer: http.client.HTTPResponse, fault: RequestFault | None) -> None:
        body = answer.read()
        if fault is not None and (fault.kind == RequestFaultKind.LOST or len(body) <= 1):
            self._reset()
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None and answer.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault is not None:
            self.wfile.write(body[: min(fault.after_bytes, len(body) - 1)])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _reset(self) -> bool:
        """Close with RST, so that the client sees a reset instead of an end of file; always False."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        return False


def _fine(_: HttpRequest) -> None:
    return None
