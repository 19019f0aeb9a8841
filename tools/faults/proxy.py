"""An HTTP proxy on loopback that breaks requests to the S3 server behind it, as networks and busy services do.

with FaultyProxy("127.0.0.1", port) as proxy:
    proxy.rule = lambda request: Fault(kind="busy") if request.method == "PUT" else None
    proxy.heal()

Requests are signed for the address that the client sees, so the server behind takes them as they are.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, TypeAlias

CHUNK_BYTES = 1 << 16
SERVER_TIMEOUT_S = 120.0
Kind: TypeAlias = Literal["busy", "cut", "lost", "truncated", "slow", "hang"]
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a rule sees of a request."""

    method: str
    path: str
    body_bytes: int
    client: str  # its address


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one request.

    busy: 503 SlowDown. cut: reset once `after_bytes` of it have passed. lost: the server does it, the answer is reset.
    truncated: the answer's body ends after `after_bytes`. slow: it is answered `seconds` late. hang: nothing for `seconds`.
    """

    kind: Kind
    after_bytes: int = 0
    seconds: float = 0.0


Rule: TypeAlias = Callable[[Request], Fault | None]


class FaultyProxy:
    """Forwards what its `rule` lets pass; `faults` counts by kind what it did, `num_requests` all that came."""

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
        """What AWS_ENDPOINT_URL must be to come through here."""
        return f"http://{self._server.server_address[0]!s}:{self.port}"

    @property
    def num_cut(self) -> int:
        """Requests that were reset on their way."""
        return self.faults["cut"]

    def cut_after(self, num_bytes: int, *, times: int = 1 << 30) -> None:
        """Reset requests, `times` of them, once `num_bytes` of each have passed; smaller ones pass."""
        left = times

        def rule(request: Request) -> Fault | None:
            nonlocal left
            with self._lock:
                if left <= 0 or request.body_bytes < num_bytes - 1:
                    return None
                left -= 1
            return Fault(kind="cut", after_bytes=num_bytes)

        self.rule = rule

    def heal(self) -> None:
        """Forward everything from now on."""
        self.rule = _fine

    def choose(self, request: Request) -> Fault | None:
        """The rule's word on a request, counted."""
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
        """A client that went away, killed perhaps, is what this proxy is for: no traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: socket.socket

    def log_message(self, format: str, *_: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        request = Request(method=self.command, path=self.path, body_bytes=size, client=str(self.client_address[0]))
        fault = self.server.proxy.choose(request)
        if fault is None:
            self._forward(size)
        elif fault.kind == "busy":
            self._send_busy(size)
        elif fault.kind == "hang":
            self._wait(fault.seconds)
            self._reset()
        elif fault.kind == "slow":
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
        """Until the client gives up, the proxy ends or the time is over."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at and not self.server.proxy.is_closing.wait(0.05):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def _forward(self, size: int, fault: Fault | None = None) -> None:
        upstream = http.client.HTTPConnection(*self.server.proxy.target, timeout=SERVER_TIMEOUT_S)
        try:
            if self._send(upstream, size, fault):
                self._relay(upstream.getresponse(), fault)
        except (OSError, http.client.HTTPException):
            self._reset()  # the server is gone, or the client is
        finally:
            upstream.close()

    def _send(self, upstream: http.client.HTTPConnection, size: int, fault: Fault | None) -> bool:
        """Pass the request on; False if it was cut."""
        limit = fault.after_bytes if fault is not None and fault.kind == "cut" else None
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

    def _relay(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        body = answer.read()
        if fault is not None and (fault.kind == "lost" or len(body) <= 1):
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
        """Close with RST, so that the client sees a connection reset and not an end; always False."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        return False


def _fine(_: Request) -> None:
    return None
