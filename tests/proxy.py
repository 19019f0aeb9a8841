"""A TCP proxy on loopback that cuts, resets or stalls connections to the server behind it, as networks do.

with FlakyProxy("127.0.0.1", port) as proxy:
    proxy.cut_after(5000)     # every connection is reset when that many bytes of its requests have passed
    proxy.heal()
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

CHUNK_BYTES = 1 << 14


class FlakyProxy:
    """Forwards both ways until its rule says otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.num_cut = 0
        self._limit: int | None = None
        self._cuts_left = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut_after(self, num_bytes: int, *, times: int = 1 << 30) -> None:
        """Reset connections, `times` of them, once `num_bytes` of their requests have passed."""
        with self._lock:
            self._limit, self._cuts_left = num_bytes, times

    def heal(self) -> None:
        """Forward everything from now on."""
        with self._lock:
            self._limit = None

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._open):
            _reset(connection)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=60)
            except OSError:
                return
            self._open |= {client, server}
            for source, target, is_request in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, target, is_request), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                passed += len(data)
                if is_request and self._cuts(passed):
                    break
                target.sendall(data)
        for connection in (source, target):
            _reset(connection)
            self._open.discard(connection)

    def _cuts(self, passed: int) -> bool:
        with self._lock:
            if self._limit is None or passed < self._limit or self._cuts_left <= 0:
                return False
            self._cuts_left -= 1
            self.num_cut += 1
            return True


def _reset(connection: socket.socket) -> None:
    """Close with RST, so that the other side sees a connection reset and not an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
