"""An HTTP server on loopback in front of `MemoryS3` that answers as a rule says: honestly, or in one of `s3_shapes`.

with HostileS3() as server:
    store = open_store("s3://bucket/run", **server.options)
    server.rule = always(SHAPES["a web page"])

How an answer is sent (`Answer.sent`): whole; cut after half of its body; closed instead of having a length; chunked without an
end; followed by other bytes; one byte at a time; without end; not at all; or as a reset.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeAlias

from tools.hostile.memory_s3 import Answer, MemoryS3, Request, error, parse_request
from tools.hostile.s3_shapes import Shape

BETWEEN_BYTES_S = 0.02
MOST_BYTES = 1 << 30
Rule: TypeAlias = Callable[[Request, int], Shape | None]


def honest(_: Request, _number: int) -> Shape | None:
    """Answer everything honestly."""
    return None


def always(shape: Shape, operation: str | None = None) -> Rule:
    """Answer every request, or every one of `operation`, in `shape`."""
    return lambda request, _: shape if operation in (None, request.operation) else None


def once(shape: Shape, number: int) -> Rule:
    """Answer request `number`, from 1, in `shape`."""
    return lambda _, seen: shape if seen == number else None


class HostileS3:
    """The server; `operations` counts requests since the last change of `rule`."""

    def __init__(self) -> None:
        self.memory = MemoryS3()
        self.operations: Counter[str] = Counter()
        self.num_shaped = 0
        self.bytes_sent = 0
        self._era = 0
        self.is_closing = threading.Event()
        self._rule: Rule = honest
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hostile = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def rule(self) -> Rule:
        """What decides the answer to a request, by its number since the rule was set."""
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        with self._lock:
            self._rule, self.num_shaped, self.bytes_sent = rule, 0, 0
            self.operations.clear()

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of `open_store` that lead here."""
        return {
            "endpoint_url": self.endpoint,
            "access_key": f"era{self._era}",
            "secret_key": "s",
            "region": "us-east-1",
        }

    def start_over(self, objects: dict[str, bytes]) -> None:
        """Forget everything but `objects`, and refuse the late requests of stores that were opened before, by their key."""
        with self._lock:
            self._era += 1
            self.memory.replace_all(objects)

    def answer(self, request: Request) -> Answer:
        """The answer by the rule."""
        with self._lock:
            if f"Credential=era{self._era}/" not in request.headers.get("authorization", ""):
                return error(403, "InvalidAccessKeyId")
            self.operations[request.operation] += 1
            shape = self._rule(request, self.operations.total())
            is_shaped = shape is not None and shape.fits(request)
            self.num_shaped += is_shaped
            if shape is None or not is_shaped:
                return self.memory.answer(request)
            honest_answer = self.memory.answer(request) if shape.has_effect else Answer()
        return shape.make(request, honest_answer)

    def count(self, num_bytes: int) -> None:
        """Count what was sent."""
        with self._lock:
            self.bytes_sent += num_bytes

    def __enter__(self) -> HostileS3:
        self._thread.start()
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
    hostile: HostileS3

    def handle_error(self, *_: object) -> None:
        """Print no traceback: clients disconnect when an answer is wrong."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: socket.socket

    def log_message(self, format: str, *_: Any) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.hostile.answer(parse_request(self.command, self.path, headers, body))
        with contextlib.suppress(OSError):
            _SENDERS[answer.sent](self, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def head(self, answer: Answer, **more: str) -> bytes:
        """Status line and headers. No length if `more` has none and the headers say Transfer-Encoding."""
        headers = {**answer.headers, **more}
        if not {"Content-Length", "Transfer-Encoding"} & set(headers) and answer.status != 204:
            headers["Content-Length"] = str(len(answer.body))
        lines = [f"HTTP/1.1 {answer.status} {responses.get(answer.status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if value]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    def put(self, data: bytes) -> None:
        """Send bytes."""
        self.server.hostile.count(len(data))
        self.wfile.write(data)

    def body_of(self, answer: Answer) -> bytes:
        """The body; a HEAD gets none."""
        return b"" if self.command == "HEAD" else answer.body

    def pause(self) -> bool:
        """Wait between two bytes; False once the client has left or the server closes."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            return False
        return not self.server.hostile.is_closing.wait(BETWEEN_BYTES_S)

    def drip(self, data: bytes) -> None:
        """Send `data` one byte at a time, then spaces, until the client leaves."""
        self.close_connection = True
        position = 0
        while self.pause():
            self.put(data[position : position + 1] or b" ")
            position += 1

    def flood(self, data: bytes) -> None:
        """Send `data` again and again."""
        self.close_connection = True
        block = data * (1 + (1 << 16) // max(len(data), 1))
        while self.server.hostile.bytes_sent < MOST_BYTES and not self.server.hostile.is_closing.is_set():
            self.put(block)


def _whole(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer) + handler.body_of(answer))


def _cut(handler: _Handler, answer: Answer) -> None:
    handler.close_connection = True
    handler.put(handler.head(answer) + handler.body_of(answer)[: len(answer.body) // 2])


def _closed(handler: _Handler, answer: Answer) -> None:
    handler.close_connection = True
    head = handler.head(answer, **{"Content-Length": "", "Transfer-Encoding": "", "Connection": "close"})
    handler.put(head + handler.body_of(answer))


def _chunked(handler: _Handler, answer: Answer) -> None:
    body = handler.body_of(answer)
    handler.put(handler.head(answer, **{"Transfer-Encoding": "chunked", "Content-Length": ""}))
    handler.put((f"{len(body):x}\r\n".encode() + body + b"\r\n" if body else b"") + b"0\r\n\r\n")


def _chunked_cut(handler: _Handler, answer: Answer) -> None:
    handler.close_connection = True
    body = handler.body_of(answer)
    handler.put(handler.head(answer, **{"Transfer-Encoding": "chunked", "Content-Length": ""}))
    handler.put(f"{len(body) + 10:x}\r\n".encode() + body)


def _chunked_more(handler: _Handler, answer: Answer) -> None:
    body = handler.body_of(answer) + b"and more"
    handler.put(handler.head(answer, **{"Transfer-Encoding": "chunked", "Content-Length": ""}))
    handler.put(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")


def _followed(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer) + handler.body_of(answer) + b"more bytes than announced" * 10)


def _twice(handler: _Handler, answer: Answer) -> None:
    handler.put((handler.head(answer) + handler.body_of(answer)) * 2)


def _slow_body(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer, **{"Content-Length": str(len(answer.body) + 100_000)}))
    handler.drip(handler.body_of(answer))


def _slow_body_of_right_length(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer))
    handler.drip(handler.body_of(answer))


def _slow_head(handler: _Handler, answer: Answer) -> None:
    handler.drip(handler.head(answer)[:-2] + b"X-Slow: ")


def _endless_body(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer, **{"Content-Length": str(10 << 30)}))
    handler.flood(answer.body or b" ")


def _endless_chunks(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer, **{"Transfer-Encoding": "chunked", "Content-Length": ""}))
    body = answer.body or b" "
    handler.flood(f"{len(body):x}\r\n".encode() + body + b"\r\n")


def _endless_head(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer)[:-2])
    handler.flood(b"X-More: and more\r\n")


def _endless_line(handler: _Handler, answer: Answer) -> None:
    handler.put(handler.head(answer)[:-2] + b"X-More: ")
    handler.flood(b"and more")


def _endless_continue(handler: _Handler, _answer: Answer) -> None:
    handler.flood(b"HTTP/1.1 100 Continue\r\n\r\n")


def _never(handler: _Handler, _answer: Answer) -> None:
    handler.close_connection = True
    while handler.pause():
        pass


def _reset(handler: _Handler, _answer: Answer) -> None:
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def _empty(handler: _Handler, _answer: Answer) -> None:
    handler.close_connection = True


def _raw(handler: _Handler, answer: Answer) -> None:
    handler.close_connection = True
    handler.put(answer.body)


_SENDERS: dict[str, Callable[[_Handler, Answer], None]] = {
    "whole": _whole, "cut": _cut, "closed": _closed, "chunked": _chunked,
    "chunked, cut": _chunked_cut, "chunked, longer": _chunked_more,
    "followed": _followed, "twice": _twice, "slow body": _slow_body, "slow body, right length": _slow_body_of_right_length,
    "slow head": _slow_head, "endless body": _endless_body, "endless chunks": _endless_chunks,
    "endless head": _endless_head, "endless line": _endless_line, "endless continue": _endless_continue,
    "never": _never, "reset": _reset, "empty": _empty, "raw": _raw,
}  # fmt: skip
