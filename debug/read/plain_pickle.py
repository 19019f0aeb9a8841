"""Unpickle what torch's Flight Recorder writes, and nothing else: no class, no function, bounded size."""

from __future__ import annotations

import io
import mmap
import pickle  # only through the subclass below, which refuses every class
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from titan_ckpt.errors import UnsafeContentError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MAX_DUMP_BYTES = 1 << 30
HEADROOM_BYTES = 256 << 20
GROWTH = 64  # bytes that a byte of a pickle may become

_limit_lock = threading.Lock()


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, tuples and dicts only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafeContentError(f"pickle asks for {module}.{name}; a Flight Recorder dump holds no class")

    def persistent_load(self, _pid: Any) -> NoReturn:
        raise UnsafeContentError("pickle asks for a persistent object; a Flight Recorder dump holds none")


def plain_loads(data: bytes | memoryview) -> Any:
    """The plain value pickled in `data`. UnsafeContentError for a class; ValueError for a damaged pickle.

    >>> plain_loads(pickle.dumps({"a": [1, 2]}))
    {'a': [1, 2]}
    """
    if len(data) > MAX_DUMP_BYTES:
        raise ValueError(f"{len(data)} bytes; no dump is larger than {MAX_DUMP_BYTES}")
    try:
        # Buffered, because the unpickler reads ahead only where it can peek: three times as fast
        with _bounded_memory(HEADROOM_BYTES + GROWTH * len(data)):
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except UnsafeContentError:
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except MemoryError as error:
        raise ValueError("asks for more memory than there is") from error
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let this process grow by so much: five hostile bytes (`LONG_BINPUT`) make the unpickler touch 64 GB of memo.

    Where the system has no such limit (macOS, Windows) there is no bound.
    """
    used = _address_space() if resource is not None else 0
    if not used:
        yield
        return
    with _limit_lock:
        before, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + more_bytes
        for known in (before, hard):
            wanted = wanted if known == resource.RLIM_INFINITY else min(wanted, known)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _address_space() -> int:
    """Bytes of this process's address space; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[0]) * mmap.PAGESIZE
    except (OSError, ValueError):
        return 0


def looks_like_pickle(head: bytes) -> bool:
    """Whether a file that starts with `head` is a pickle of protocol 2 to 5."""
    return len(head) >= 2 and head[0:1] == pickle.PROTO and 2 <= head[1] <= 5
