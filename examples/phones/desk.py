"""What a peer answers to others: how it is, calls to a new crew, the result, and its files. Trusts everyone on its network."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from titan_ckpt import Store, TitanError
from titan_ckpt.errors import NotFoundError, StoreError, UsageError

SLOWEST_BYTES_PER_S = 250e3
WAITING, WORKING, FINISHED = "waiting", "working", "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call to a new crew: who belongs to it, in order of rank, where rank 0 opens its key-value store, and what for."""

    generation: int
    members: tuple[str, ...]
    rendezvous_port: int
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Status:
    """How a peer is; `leader` is rank 0 of the crew that it works in, `task` what it works on (`task_of`)."""

    state: str = WAITING
    generation: int = 0
    leader: str = ""
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Desk:
    """Answers on `address` (host:port) in threads of its own, from the files in `store`; a context manager.

    `fault` says why the store cannot keep what others send: this peer is of no use to a crew.
    """

    address: str
    store: Store
    status: Status = field(default_factory=Status)
    calls: queue.Queue[Call] = field(default_factory=queue.Queue)
    labels: list[int] | None = None
    fault: str | None = None
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Desk:
        host, port = _parts(self.address)
        try:
            self._server = ThreadingHTTPServer((host, port), lambda *arguments: _Answers(self, *arguments))
        except OSError as error:
            raise UsageError(f"--address {self.address}: cannot be listened on: {error}") from error
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def take(self, call: Call) -> bool:
        """Accept a call to this peer's task if it waits for one."""
        if call.task != self.status.task or self.status.state != WAITING or call.generation <= self.status.generation:
            return False
        self.calls.put(call)
        return True


class _Answers(BaseHTTPRequestHandler):
    """One request: GET /hello, /list/PREFIX, /files/PATH?start=&length=; PUT and DELETE /files/PATH; POST /call, /labels."""

    def __init__(self, desk: Desk, *arguments: Any) -> None:
        self.desk = desk
        super().__init__(*arguments)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing: a peer asks often."""

    def do_GET(self) -> None:
        kind, path, query = self._parts()
        if kind == "hello":
            self._answer(asdict(self.desk.status))
        elif kind == "list":
            entries = self.desk.store.list(path)
            self._answer([[each.path, each.size_bytes, each.modified_s] for each in entries])
        else:
            start = int(query.get("start", ["0"])[0])
            length = int(query["length"][0]) if "length" in query else None
            self._stored(lambda: self.desk.store.read(path, start, length))

    def do_PUT(self) -> None:
        _, path, _ = self._parts()
        data = self._body()
        if len(data) < int(self.headers["Content-Length"]):
            return  # the sender has gone; half a file is none
        self._stored(lambda: self._change(lambda: self.desk.store.write(path, [data])))

    def do_DELETE(self) -> None:
        _, path, _ = self._parts()
        self._stored(lambda: self._change(lambda: self.desk.store.delete([path])))

    def do_POST(self) -> None:
        kind, _, _ = self._parts()
        value = json.loads(self._body())
        if kind == "labels":
            is_ours = value["task"] == self.desk.status.task
            if is_ours:
                self.desk.labels = value["labels"]
            self._answer(is_ours)
        else:
            self._answer(self.desk.take(Call(**{**value, "members": tuple(value["members"])})))

    def _parts(self) -> tuple[str, str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        kind, _, path = unquote(url.path).lstrip("/").partition("/")
        return kind, path, parse_qs(url.query)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _change(self, action: Callable[[], object]) -> bytes:
        """Change the store. What it refuses is this peer's fault."""
        try:
            action()
        except StoreError as error:
            if not isinstance(error, NotFoundError):
                self.desk.fault = str(error)
            raise
        return b""

    def _stored(self, action: Callable[[], bytes]) -> None:
        """The bytes that `action` returns; 404 if the store refuses, for whatever reason: others have copies."""
        try:
            self._send(200, action())
        except TitanError as error:
            self._send(404, str(error).encode())

    def _answer(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def ask(address: str, method: str, path: str, body: Any = None, *, timeout_s: float = 5.0) -> bytes | None:
    """A peer's answer; None if it has no such file. OSError if it cannot be reached, breaks off, or is no peer.

    `timeout_s` is for an answer that is short; a body may take longer, on the slowest link that is of use.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(
        *_parts(address), timeout=timeout_s + len(data or b"") / SLOWEST_BYTES_PER_S
    )
    try:
        connection.request(method, quote(path, safe="/?=&"), data)
        answer = connection.getresponse()
        content = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{address}: {error}") from error
    finally:
        connection.close()
    return content if answer.status == 200 else None


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
