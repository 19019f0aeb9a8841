"""Who writes a rank's file: a thread of the rank, or a process of its own."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

from titan_ckpt.errors import SaveError, UsageError
from titan_ckpt.location import StrPath, normalise, redact, scheme, url_text
from titan_ckpt.saving.apart.child import SIGNALS
from titan_ckpt.saving.apart.shared_memory import SharedMemory, is_supported
from titan_ckpt.saving.apart.task import Command, Done, Failed, Logged, Sent, Task
from titan_ckpt.saving.pace import Pace
from titan_ckpt.saving.staging import Arena
from titan_ckpt.saving.upload import RankContents, RankFile, RankPart, UploadOptions, upload
from titan_ckpt.state.exchange import RankGroup, raise_on_all
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import StoreSettings

_PROGRAM = """
import json, sys
fd, rank_pid, ours = sys.argv[1:]
sys.path += [path for path in json.load(sys.stdin) if path not in sys.path]
sys.path[:0] = [] if ours in sys.path else [ours]
from titan_ckpt.saving.apart.child import main
main(int(fd), int(rank_pid))
"""
ENDS_WITHIN_S = 5.0  # once its socket is closed
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what tools take a rank by; the process is none


class ThreadUploader:
    """Uploads on the calling thread."""

    def upload(
        self, store: Store, contents: RankContents, target: RankFile, options: UploadOptions, pace: Pace
    ) -> RankPart:
        """See `titan_ckpt.saving.upload.upload`."""
        return upload(store, contents, target, replace(options, before=pace.before))

    def start(self) -> None:
        """Nothing to start."""

    def end(self) -> None:
        """Nothing to end."""


class ProcessUploader(ThreadUploader):
    """Uploads what was staged in shared memory by a process of its own.

    The process is this rank's child, ignores all signals that can be ignored, and ends with the thread that called `start`.
    """

    def __init__(self, url: str, settings: StoreSettings) -> None:
        self._url, self._settings = url, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._mapped: SharedMemory | None = None
        self._sending = threading.Lock()

    def upload(
        self, store: Store, contents: RankContents, target: RankFile, options: UploadOptions, pace: Pace
    ) -> RankPart:
        """Like a thread's; SaveError if the process ends. Values that were not staged are uploaded here."""
        arena = contents.source
        if not isinstance(arena, Arena) or arena.shared is None:
            return super().upload(store, contents, target, options, pace)
        arena.wait()
        connection = self._connection
        assert connection is not None
        assert self._process is not None
        store.doing(f"the upload process {self._process.pid}, writing {target.path}")
        new = 0 if self._mapped is arena.shared else arena.shared.size_bytes
        with self._lost(target.step):
            task = Task(
                url=self._url, settings=self._settings, items=contents.items, starts=arena.starts, memory_bytes=new,
                objects=contents.objects, own_objects=contents.own_objects, target=target, codec=options.codec,
                known=dict(options.known), bytes_per_s=pace.bytes_per_s, umask=_umask(),
            )  # fmt: skip
            with self._sending:
                connection.send(task)
                if new:
                    send_handle(connection, arena.shared.fd, None)
            self._mapped = arena.shared
            with pace.heard(lambda is_stop: self._command(connection, Command.STOP if is_stop else Command.LIFT)):
                part = _answer(connection, options.on_bytes)
        return replace(part, copy_digests=contents.copies())

    def start(self) -> None:
        """Start the process, with the environment of now, unless it runs; SaveError if that fails. Its end is that of the calling
        thread."""
        if self._process is None or self._connection is None or self._process.poll() is not None:
            self.end()
            try:
                self._process, self._connection = _started()
            except (OSError, ValueError) as error:
                raise SaveError(f"the upload process did not start: {error}; {_remedy(error)}") from error

    def end(self) -> None:
        """End the process, whatever it does."""
        process, self._process, self._connection, self._mapped = self._process, None, None, None
        if process is not None:
            process.kill()
            process.wait()

    def _command(self, connection: Connection, command: Command) -> None:
        with self._sending, suppress(OSError):  # the process has ended, which the upload notices
            connection.send(command)

    @contextmanager
    def _lost(self, step: int) -> Iterator[None]:
        process = self._process
        assert process is not None
        try:
            yield
        except (EOFError, OSError) as error:
            try:
                code = process.wait(0 if _is_own(error) else ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:  # it lives
                raise SaveError(
                    f"nothing was committed: step {step} could not be given to the upload process {process.pid}: {error}; "
                    f"{_remedy(error)}"
                ) from error
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = "standard error says why, unless the package was changed meanwhile"
            if code == -signal.SIGKILL:
                why = "look for the kernel's out-of-memory killer in `dmesg`"
            raise SaveError(
                f"the upload process {process.pid} ended ({how}) while it uploaded step {step}; nothing of it was committed. The "
                f"next save starts another; {why}"
            ) from error


def _started() -> tuple[subprocess.Popen[bytes], Connection]:
    """The process and this end of its socket."""
    ours, theirs = socket.socketpair()
    with ExitStack() as unless_started, theirs, _blocked():
        unless_started.callback(ours.close)
        process = _start(theirs.fileno())
        unless_started.pop_all()
    return process, Connection(ours.detach())


def _start(fd: int) -> subprocess.Popen[bytes]:
    """The process. It finds modules as this one does, but none of a script's folder in place of another (`types.py`)."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    ours = str(Path(__file__).resolve().parents[3])  # where the package lies
    command = [sys.executable, "-I", "-c", _PROGRAM, str(fd), str(os.getpid()), ours]
    process = subprocess.Popen(command, env=environment, pass_fds=(fd,), stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin, suppress(BrokenPipeError):  # it has ended, which the first upload notices
        paths = [path for path in sys.path if os.path.isabs(path) and "\0" not in path]
        process.stdin.write(json.dumps(paths).encode())
    return process


_REMEDIES = {
    errno.E2BIG: "the environment is too large for another process: look for a variable of more than 128 KB",
    errno.EMFILE: "close files, or raise `ulimit -n`",
    errno.ENFILE: "close files, or raise fs.file-max",
    errno.EAGAIN: "raise `ulimit -u`, or the job's limit of processes",
    errno.ENOMEM: "the host lacks memory",
}


def _is_own(error: Exception) -> bool:
    """Whether this process lacks something, which says nothing of the other one."""
    return isinstance(error, OSError) and error.errno in _REMEDIES


def _remedy(error: Exception) -> str:
    """What to do about an error of the system's."""
    known = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{known}, or leave upload_process out" if known else "leave upload_process out if it cannot be mended"


def _umask() -> int:
    """This process's umask, which no call reads without changing it (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("Umask:")), "022"), 8)


@contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals that the process will ignore until it does: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_OWN_MEMORY = (
    "The upload process has the program's environment and files, and not what the program set up in memory (registered file "
    "systems, fsspec.config.conf): leave upload_process out if it needs that"
)


def _answer(connection: Connection, on_bytes: Callable[[int], None]) -> RankPart:
    """The part that the process wrote; raises its error."""
    while True:
        message: Sent | Logged | Done | Failed = connection.recv()
        if isinstance(message, Sent):
            on_bytes(message.size_bytes)
        elif isinstance(message, Logged):
            logging.getLogger(message.name).log(message.level, "%s", message.text)
        elif isinstance(message, Done):
            return message.part
        else:
            error = message.error
            if isinstance(error, UsageError):
                error = UsageError(f"{error}. {_OWN_MEMORY}")
            error.add_note(f"in the upload process:\n{message.text}")
            raise error


def uploader_for(url: StrPath | Store, settings: StoreSettings, *, is_process: bool) -> ThreadUploader:
    """UsageError if another process cannot open the store of `url`, or this system has no memory to share with it."""
    if not is_process:
        return ThreadUploader()
    if isinstance(url, Store) or any(scheme(part) == "memory" for part in url_text(url).split("::")):
        shown = redact(url.url if isinstance(url, Store) else url_text(url))
        raise UsageError(
            f"upload_process: another process opens the store by its URL, which {shown} does not allow (a Store that is open, or "
            f"memory://); give a URL, or leave upload_process out"
        )
    if not sys.executable:
        raise UsageError(
            "upload_process starts another Python, but sys.executable is empty (an embedded one); leave it out"
        )
    if not is_supported():
        raise UsageError(f"upload_process needs memfd_create, which {sys.platform} does not have; leave it out")
    try:
        pickle.dumps(settings)
    except Exception as error:  # a value's own __reduce__ can raise anything
        raise UsageError(
            f"upload_process: storage_options hold what no other process can get: {type(error).__name__}: {error}"
        ) from error
    return ProcessUploader(normalise(url), settings)


def start_on_all(ranks: RankGroup, uploader: ThreadUploader, thread: Executor) -> None:
    """Start the uploaders of all ranks, or none: an error on one rank is raised on all. A collective call.

    A process that is started lives as long as the one thread of `thread`.
    """
    error = thread.submit(uploader.start).exception()
    try:
        raise_on_all(ranks, error, "starting the upload process")
    except BaseException:
        uploader.end()
        raise
