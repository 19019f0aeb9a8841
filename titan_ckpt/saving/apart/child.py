"""The upload process: writes one file after another from shared memory, and ends with the process that it works for."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from titan_ckpt.errors import TitanError
from titan_ckpt.saving.apart.task import Command, Done, Failed, Logged, Sent, Task
from titan_ckpt.saving.pace import Pace
from titan_ckpt.saving.upload import RankContents, RankPart, UploadOptions, upload
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import settings_of_command
from titan_ckpt.store.open import open_store

# All that end a process and can be ignored, but those of its own mistakes: the rank answers them, and may save once more.
SIGNALS = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGXCPU",
    )
    if hasattr(signal, name)
)  # fmt: skip
PR_SET_PDEATHSIG = 1  # prctl(2)
LOOK_EVERY_S = 1.0


class _Mapped:
    """The bytes of each item in shared memory."""

    def __init__(self, view: memoryview, items: Sequence[LocalShard], starts: Sequence[int]) -> None:
        self._view, self._items, self._starts = view, items, starts

    def payload(self, index: int) -> memoryview:
        """The raw bytes of the `index`-th item."""
        start = self._starts[index]
        return self._view[start : start + self._items[index].size_bytes]


class _Uploads:
    """Runs tasks, one at a time, on a thread, so that commands are heard meanwhile."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stores: dict[str, Store] = {}
        self._view = memoryview(b"")
        self._pace = Pace()

    def begin(self, task: Task) -> None:
        """Start a task; the last one has ended."""
        if task.memory_bytes:
            fd = recv_handle(self._connection)
            self._view = memoryview(mmap.mmap(fd, task.memory_bytes))
            os.close(fd)
        self._pace = Pace(task.bytes_per_s)
        os.umask(task.umask)
        threading.Thread(target=self._run, args=(task, self._pace), daemon=True).start()

    def hear(self, command: Command) -> None:
        """Change the upload that runs."""
        if command is Command.LIFT:
            self._pace.lift()
        else:
            self._pace.stop()

    def _run(self, task: Task, pace: Pace) -> None:
        try:
            answer: Done | Failed = Done(part=self._upload(task, pace))
        except BaseException as error:  # noqa: BLE001  (the rank raises it)
            answer = Failed(error=_sendable(error), text=traceback.format_exc())
        with suppress(OSError):  # the rank has ended
            self._connection.send(answer)

    def _upload(self, task: Task, pace: Pace) -> RankPart:
        if task.url not in self._stores:
            with settings_of_command(task.settings):
                self._stores[task.url] = open_store(task.url)
        contents = RankContents(
            items=task.items, source=_Mapped(self._view, task.items, task.starts), objects=task.objects,
            own_objects=task.own_objects,
        )  # fmt: skip
        options = UploadOptions(codec=task.codec, known=task.known, before=pace.before, on_bytes=self._count)
        return upload(self._stores[task.url], contents, task.target, options)

    def _count(self, size_bytes: int) -> None:
        self._connection.send(Sent(size_bytes=size_bytes))


class _Locked(Connection):
    """A connection on which several threads may send."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message whole."""
        with self._sending:
            super().send(message)


class _ToRank(logging.Handler):
    """Gives records to the rank's loggers."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record's text."""
        with suppress(OSError):
            self._connection.send(Logged(name=record.name, level=record.levelno, text=record.getMessage()))


def _sendable(error: BaseException) -> Exception:
    """The error, or one with its text where it cannot be sent as it is."""
    try:
        found = pickle.loads(pickle.dumps(error))  # noqa: S301  (written in the same line)
    except Exception:  # noqa: BLE001  (a class's own __reduce__ can raise anything)
        found = None
    return found if isinstance(found, Exception) else TitanError(f"{type(error).__name__}: {error}")


def serve(connection: Connection, rank_pid: int) -> None:
    """Run what the rank asks for until it closes the socket or is no longer there."""
    uploads = _Uploads(connection)
    while True:
        while not connection.poll(LOOK_EVERY_S):
            if os.getppid() != rank_pid:  # a child of the rank's may keep the socket open
                return
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, Task):
            uploads.begin(message)
        else:
            uploads.hear(message)


def main(fd: int, rank_pid: int) -> None:
    """Serve the socket `fd` of the rank; nothing of an upload that runs outlives it."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where it is stopped, and hears of no end
    connection = _Locked(fd)
    logging.basicConfig(level=logging.INFO, handlers=[_ToRank(connection)])
    serve(connection, rank_pid)
    os._exit(0)
