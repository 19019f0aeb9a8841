"""gloo over slow links: every connection between two ranks passes through a relay with a latency and a rate in each direction.

    with SlowLinks(latency_s=1e-3, bytes_per_s=100e6) as links:    # in a process beside the ranks, in which:
        with slow_groups(links.address):
            dist.init_process_group("gloo")

A rank publishes the address that it listens on in a store; `_Relayed` puts the relay's port there instead. gloo decides by
comparing addresses who connects to whom, so each rank has an IP address of its own in 127.0.0.0/8 and only ports change.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

BLOCK_BYTES = 128 << 10
SLEEP_LATE_S = 1e-3


class SlowLinks:
    """A relay that opens a port in front of any address that a rank asks for; a context manager."""

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.address: tuple[str, int] = self._listeners[0].getsockname()
        threading.Thread(target=self._answer, daemon=True).start()

    def __enter__(self) -> SlowLinks:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()

    def _answer(self) -> None:
        """Answer each "HOST PORT" with the relay's port on that host."""
        with contextlib.suppress(OSError):  # closed
            while True:
                asking, _ = self._listeners[0].accept()
                with asking:
                    host, port = asking.recv(100).decode().split()
                    listener = socket.create_server((host, 0))
                    self._listeners.append(listener)
                    threading.Thread(target=self._accept, args=(listener, (host, int(port))), daemon=True).start()
                    asking.sendall(str(listener.getsockname()[1]).encode())

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(target)
                for source, sink in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Take bytes from `source` at the line's rate; they arrive a latency later."""
        line: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=_deliver, args=(line, sink), daemon=True).start()
        free_at = 0.0
        with contextlib.suppress(OSError):  # the other side is gone
            while data := source.recv(BLOCK_BYTES):
                # a line that was busy a moment ago has not been idle: `sleep` is late
                free_at = max(free_at, time.monotonic() - SLEEP_LATE_S) + len(data) / self._bytes_per_s
                line.put((free_at + self._latency_s, data))
                time.sleep(max(free_at - time.monotonic(), 0.0))
        line.put((0.0, b""))


def _deliver(line: queue.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        while True:
            ready_at, data = line.get()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            time.sleep(max(ready_at - time.monotonic(), 0.0))
            sink.sendall(data)


class _Relayed(dist.Store):
    """A store in which the addresses that a rank on `host` publishes have the relay's port."""

    def __init__(self, inner: dist.Store, host: str, relay: tuple[str, int]) -> None:
        super().__init__()
        self._inner, self._host, self._relay = inner, host, relay

    def set(self, key: str, value: Any) -> None:
        """Publish; in an address, after AF_INET, come port and host, both in network order."""
        data = bytes(value)
        host = socket.inet_aton(self._host)
        at = data.find(host)
        if at >= 4 and data[at - 4 : at - 2] == socket.AF_INET.to_bytes(2, "little"):
            with socket.create_connection(self._relay) as asking:
                asking.sendall(f"{self._host} {int.from_bytes(data[at - 2 : at], 'big')}".encode())
                port = int(asking.recv(100).decode())
            data = data[: at - 2] + port.to_bytes(2, "big") + data[at:]
        self._inner.set(key, data)  # type: ignore[arg-type]  # bytes do as well

    def get(self, key: str) -> bytes:
        """As the store's own."""
        return self._inner.get(key)

    def wait(self, *arguments: Any) -> None:
        """As the store's own."""
        self._inner.wait(*arguments)


@contextlib.contextmanager
def slow_groups(relay: tuple[str, int]) -> Iterator[None]:
    """Every gloo group made inside has its connections through the relay at this address."""
    module: Any = distributed_c10d
    gloo = module.ProcessGroupGloo

    def start(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        host = f"127.0.0.{dist.get_rank() + 1 if dist.is_initialized() else rank + 1}"
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, [gloo.create_device(hostname=host)]
        gloo.__init__(group, _Relayed(store, host, relay), rank, size, options)

    module.ProcessGroupGloo = type("SlowGloo", (gloo,), {"__init__": start})
    try:
        yield
    finally:
        module.ProcessGroupGloo = gloo
