"""A TCP proxy on loopback that forwards to a server at a limited rate in total, and counts the bytes that each of its ports sent.

with Throttle(("127.0.0.1", 9000), bytes_per_s=50e6, ports=4) as proxy:
    proxy.ports, proxy.sent
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

BLOCK_BYTES = 64 << 10


class Throttle:
    """Listens on several ports; what the server answers passes at `bytes_per_s` over all of them together."""

    def __init__(self, target: tuple[str, int], *, bytes_per_s: float, ports: int) -> None:
        self._target, self._bytes_per_s = target, bytes_per_s
        self._lock, self._free_at = threading.Lock(), 0.0
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(ports)]
        self.ports = [int(listener.getsockname()[1]) for listener in self._listeners]
        self.sent = [0] * ports
        for number, listener in enumerate(self._listeners):
            threading.Thread(target=self._accept, args=(number, listener), daemon=True).start()

    def __enter__(self) -> Throttle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept(self, number: int, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
            except OSError:  # closed
                return
            threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, number), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(BLOCK_BYTES):
                if number is not None:
                    self._wait_for(len(data))
                    self.sent[number] += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, num_bytes: int) -> None:
        """Sleep until the line has taken `num_bytes` more."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            ready_at = self._free_at
        time.sleep(max(ready_at - time.monotonic(), 0.0))
