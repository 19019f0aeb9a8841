"""Unix sockets that only this user can reach, and who is at the other end of one."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from titan_ckpt.debug.record.worker_endpoint import MAX_SOCKET_PATH

log = logging.getLogger(__name__)

T = TypeVar("T")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7), SO_PEERCRED)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a socket, as the kernel numbers it here; pid 0 if it is not visible from here."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether it runs as this user or as root."""
        return self.uid in (0, os.geteuid())


def peer_of(connection: socket.socket) -> Peer:
    """Who connected, or who listens."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid=pid, uid=uid)


@dataclass(slots=True)
class PrivateSocket(Generic[T]):
    """A bound socket's path, what listens there, and the temporary folder it is in where the wanted path cannot have one."""

    path: str
    listener: T
    folder: Path | None = None

    def remove(self) -> None:
        """Remove the socket's name."""
        Path(self.path).unlink(missing_ok=True)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def bind_privately(path: Path, listen: Callable[[str], T]) -> PrivateSocket[T]:
    """Have `listen` bind a socket and move it to `path`; in a temporary folder if the path is too long for a socket, or
    its file system has none. OSError or RuntimeError if `listen` cannot.

    It is bound in a folder of mode 0700 and gets mode 0600 there, so that nobody else can ever connect.
    """
    path = path.absolute()
    if len(os.fsencode(path.parent)) + len("/.tmp-12345678/s") <= MAX_SOCKET_PATH >= len(os.fsencode(path)):
        try:
            return _bind_and_move(path, listen)
        except (OSError, RuntimeError):
            pass  # no sockets here (some network file systems), or the name is taken by something else
    folder = Path(tempfile.mkdtemp(prefix="titan-"))
    try:
        return PrivateSocket(path=str(folder / "s"), listener=_bind(folder / "s", listen), folder=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _bind_and_move(path: Path, listen: Callable[[str], T]) -> PrivateSocket[T]:
    if path.is_symlink() or (path.exists() and not stat.S_ISSOCK(path.stat().st_mode)):
        raise FileExistsError(f"{path} is not a socket")
    folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=path.parent))
    try:
        listener = _bind(folder / "s", listen)
        (folder / "s").replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return PrivateSocket(path=str(path), listener=listener)


def _bind(path: Path, listen: Callable[[str], T]) -> T:
    listener = listen(str(path))
    try:
        path.chmod(0o600)
    except OSError as error:  # it listens already, and goes on: its folder is private, its peers are checked
        log.warning("the socket %s keeps its mode: %s", path, error)
    return listener
