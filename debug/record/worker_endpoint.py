"""Ask a rank's worker server, which is C++ and answers while the rank's Python is stuck with the GIL held."""

from __future__ import annotations

import http.client
import socket

TIMEOUT_S = 5.0
TRACE = "/handler/fr_trace_json"
PING = "/handler/ping"
MAX_ANSWER_BYTES = 1 << 28
MAX_SOCKET_PATH = 100  # the kernel's limit is 108


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def fetch_trace(endpoint: str) -> bytes | None:
    """The Flight Recorder's ring as JSON (without call stacks) from the rank that listens at `endpoint`; None if none does."""
    connection = _Connection(endpoint)
    try:
        connection.request("POST", TRACE)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return data if answer.status == 200 and data else None


def is_answering(endpoint: str) -> bool:
    """Whether a worker server listens at `endpoint`."""
    connection = _Connection(endpoint)
    try:
        connection.request("POST", PING, headers={"Connection": "close"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
