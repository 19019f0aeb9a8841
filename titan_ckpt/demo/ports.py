"""Free TCP ports on loopback."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports without a listener; all are held open until the last is found, so no two are equal."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def free_port() -> int:
    """One port without a listener."""
    return free_ports(1)[0]
