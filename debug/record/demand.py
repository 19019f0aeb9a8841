"""Dumps on demand: a rank listens on a Unix socket, and `debug collect` asks there. No signal is sent.

A signal ends a process that has no handler for it, and whether it has one cannot be known from outside. Whoever answers on the
rank's own socket is the rank: its number comes from the kernel, not from a file. The listening thread needs the GIL, like a
signal's reader; a rank that holds it is asked through torch's worker server.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.debug.record.private_socket import Peer, PrivateSocket, bind_privately, peer_of
from titan_ckpt.errors import CheckpointError
from titan_ckpt.parsing.json_values import parse_json

log = logging.getLogger(__name__)

DUMP = b"dump\n"
REQUEST_S = 1.0
MAX_ANSWER_BYTES = 4096


class DemandServer:
    """Listens on `endpoint` and calls `dump` for each request of this user or root."""

    def __init__(self, bound: PrivateSocket[socket.socket], rank: int, dump: Callable[[], None]) -> None:
        self._bound, self._rank, self._dump = bound, rank, dump
        self.endpoint = bound.path
        self._is_open = True
        threading.Thread(target=self._serve, name="titan-recorder-demand", daemon=True).start()

    @staticmethod
    def start(path: Path, rank: int, dump: Callable[[], None]) -> DemandServer | None:
        """Listen at `path`, or in a temporary folder; None, and a warning, where neither is possible."""
        try:
            return DemandServer(bind_privately(path, _listen), rank, dump)
        except OSError as error:
            log.warning("rank %d: no socket for `debug collect` at %s: %s", rank, path, error)
            return None

    def stop(self) -> None:
        """Stop listening. A dump that is being written goes on."""
        self._is_open = False
        self._bound.remove()
        try:
            self._bound.listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError:
            log.debug("rank %d: the socket was closed before", self._rank)
        self._bound.listener.close()

    def close_in_child(self) -> None:
        """Let go of the socket in a forked child, which has no thread that would answer."""
        self._bound.listener.close()

    def _serve(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._bound.listener.accept()
            except OSError as error:
                if self._is_open:
                    log.warning("rank %d: no dumps on demand any more: %s", self._rank, error)
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(REQUEST_S)
            if not peer_of(connection).is_ours or connection.recv(len(DUMP)) != DUMP:
                return
            self._dump()
            connection.sendall(json.dumps({"rank": self._rank}).encode())
        except OSError as error:
            log.debug("rank %d: who asked for a dump is gone: %s", self._rank, error)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


@dataclass(slots=True)
class Demand:
    """A request under way; `peer` is the rank's process."""

    peer: Peer
    connection: socket.socket

    def is_answered(self, rank: int, timeout_s: float) -> bool:
        """Wait for the answer, at most `timeout_s`; whether `rank` says that its dump is written. Closes the connection."""
        with self.connection as connection:
            try:
                connection.settimeout(max(timeout_s, 0.001))
                answer = parse_json(connection.recv(MAX_ANSWER_BYTES) or b"null", "the answer")
            except (OSError, CheckpointError):
                return False
        return isinstance(answer, dict) and answer.get("rank") == rank


def demand(endpoint: str) -> Demand | None:
    """Ask whoever listens at `endpoint` for a dump; None if nobody does, or another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(REQUEST_S)
        connection.connect(endpoint)
        peer = peer_of(connection)
        if peer.is_ours or os.geteuid() == 0:
            connection.sendall(DUMP)
            return Demand(peer, connection)
    except (OSError, ValueError):
        connection.close()
        return None
    connection.close()
    return None
