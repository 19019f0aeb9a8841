"""An fsspec file system whose every call may fail, by chance: errors, timeouts, false 404s, short reads, lost answers.

    with random_faults(0.05, seed=3) as faults:
        store = FsspecStore(f"unsafe://{folder}/run", RetryPolicy(...))

The files lie on the local disk, so `FileStore(f"{folder}/run")` sees what is really there. Only the outermost call of the file
system is hit: `ls` calls `info` for each entry, and is one request all the same. A write is atomic, as on an object store.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

T = TypeVar("T")
_ERRORS: dict[str, Callable[[], Exception]] = {
    "error": lambda: OSError(errno.EIO, "Input/output error"),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "timeout": lambda: TimeoutError("the read timed out"),
    "false 404": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
}
_OF_READS = ("error", "reset", "timeout", "false 404")
_OF_WRITES = ("error", "reset", "timeout", "full")


class Faults:
    """How often calls fail, and how often they did, by kind of fault. Thread-safe; nothing fails while `rate` is 0.

    All calls for paths below `down` fail: a tier that does not answer.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.calls, self.injected, self.down = rate, 0, Counter[str](), ""
        self._rng, self._lock, self._local = random.Random(seed), threading.Lock(), threading.local()

    def run(self, path: object, action: Callable[[], T], kinds: tuple[str, ...], *, is_write: bool = False) -> T:
        """`action()`, or a fault before it, or after it: an answer that was lost."""
        if getattr(self._local, "is_inside", False):
            return action()
        if self.down and self.down in str(path):
            raise _ERRORS["timeout"]()
        kind, is_lost = self._draw(kinds), self._rng.random() < 0.5
        if kind is not None and not (is_write and is_lost):
            raise _ERRORS[kind]()
        self._local.is_inside = True
        try:
            result = action()
        finally:
            self._local.is_inside = False
        if kind is not None:
            raise _ERRORS[kind]()
        return result

    def is_short(self) -> bool:
        """Whether this read gets fewer bytes than it asked for."""
        return not getattr(self._local, "is_inside", False) and self._draw(("short read",)) is not None

    def _draw(self, kinds: tuple[str, ...]) -> str | None:
        with self._lock:
            self.calls += 1
            if self._rng.random() >= self.rate:
                return None
            kind = self._rng.choice(kinds)
            self.injected[kind] += 1
            return kind


class UnsafeFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local disk behind `Faults`."""

    protocol = "unsafe"
    faults = Faults(0.0, 0)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        """List a folder."""
        return self.faults.run(path, lambda: super(UnsafeFileSystem, self).ls(path, detail=detail, **kwargs), _OF_READS)

    def info(self, path: Any, **kwargs: Any) -> Any:
        """Describe an object."""
        return self.faults.run(path, lambda: super(UnsafeFileSystem, self).info(path, **kwargs), _OF_READS)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        """Read a range."""
        is_short = self.faults.is_short()
        data = self.faults.run(
            path, lambda: super(UnsafeFileSystem, self).cat_file(path, start=start, end=end, **kwargs), _OF_READS
        )
        return data[: len(data) // 2] if is_short else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        """Write an object whole."""
        return self.faults.run(
            path,
            lambda: super(UnsafeFileSystem, self).pipe_file(path, value, mode=mode, **kwargs),
            _OF_WRITES,
            is_write=True,
        )

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        self.faults.run(path, lambda: super(UnsafeFileSystem, self).rm_file(path), _OF_READS, is_write=True)


@contextmanager
def random_faults(rate: float, *, seed: int) -> Iterator[Faults]:
    """Let calls of `unsafe://` file systems fail with this probability."""
    fsspec.register_implementation("unsafe", UnsafeFileSystem, clobber=True)
    UnsafeFileSystem.faults = Faults(rate, seed)
    try:
        yield UnsafeFileSystem.faults
    finally:
        UnsafeFileSystem.faults = Faults(0.0, 0)
