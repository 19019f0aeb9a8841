"""A store that fails at the n-th call of a kind: before or after it takes effect, halfway, or by hanging until released.

    store = FaultyStore(FileStore(url), [StoreFault(call="write", number=3, how=FaultMode.AFTER)])

Calls are counted from 1 per kind (`read_into`, `write`, `write_if`, `list`, `folders`, `stat`, `delete`) over all threads;
`call="any"` counts every call. `store.calls` records them, so that a test can count first and then fail each in turn.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from titan_ckpt.errors import StoreError, TransientStoreError
from titan_ckpt.store.base import Buffer, ObjectInfo, Store

T = TypeVar("T")


class FaultMode(StrEnum):
    """When and how a call fails."""

    BEFORE = "before"  # the call does nothing
    AFTER = "after"  # it succeeds, but raises
    TORN = "torn"  # a write gets half of its parts
    HANG = "hang"  # it blocks until `FaultyStore.released` is set, then succeeds


def no_space() -> BaseException:
    """Full disk."""
    return OSError(errno.ENOSPC, "No space left on device")


def unavailable() -> BaseException:
    """A 503 after all retries."""
    return TransientStoreError("given up after 6 tries: SlowDown: reduce your request rate")


def reset() -> BaseException:
    """Connection reset by the server."""
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def refused() -> BaseException:
    """Checksum mismatch reported by the server."""
    return StoreError("BadDigest: the checksum did not match")


ERRORS: tuple[Callable[[], BaseException], ...] = (no_space, unavailable, reset, refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """A fault at call `number` (from 1) of the kind `call`."""

    number: int
    how: FaultMode = FaultMode.BEFORE
    call: str = "any"
    error: Callable[[], BaseException] = field(default=no_space)


class FaultyStore(Store):
    """A wrapper of `inner` that injects faults."""

    def __init__(self, inner: Store, faults: Sequence[StoreFault] = ()) -> None:
        super().__init__(inner.url)
        self.inner, self.faults = inner, list(faults)
        self.calls: list[tuple[str, str]] = []
        self.hit: list[StoreFault] = []
        self.released = threading.Event()
        self.is_hanging = threading.Event()
        self.is_over = threading.Event()
        self.is_preempted = False
        self._lock = threading.Lock()

    def arm(self, faults: Sequence[StoreFault]) -> None:
        """Reset the count of calls and arm these faults."""
        with self._lock:
            self.faults, self.calls = list(faults), []

    def _run(self, call: str, path: str, action: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        fault = self._count(call, path)
        if fault is None:
            return action()
        if fault.how == FaultMode.HANG:
            self.is_hanging.set()
            assert self.released.wait(600), "the test never released the store"
            try:
                return action()
            finally:
                self.is_over.set()
        elif fault.how == FaultMode.AFTER:
            self._run_first(action)
        elif fault.how == FaultMode.TORN and torn is not None:
            torn()
        raise fault.error()

    def _run_first(self, action: Callable[[], object]) -> None:
        """Run the real call; note if it fails by itself (file not found), so that no fault can follow it."""
        try:
            action()
        except BaseException:
            self.is_preempted = True
            raise

    def _count(self, call: str, path: str) -> StoreFault | None:
        with self._lock:
            self.calls.append((call, path))
            same = sum(1 for name, _ in self.calls if name == call)
            for fault in self.faults:
                if (fault.call == call and fault.number == same) or (
                    fault.call == "any" and fault.number == len(self.calls)
                ):
                    self.hit.append(fault)
                    return fault
        return None

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._run("read_into", path, lambda: self.inner.read_into(path, start, buffer))

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        """A torn write fails halfway through its parts; the store must then leave nothing of it."""

        def torn() -> None:
            held = list(parts)

            def half() -> Iterator[Buffer]:
                yield from held[: len(held) // 2]
                raise no_space()

            self.inner.write(path, half())

        return self._run("write", path, lambda: self.inner.write(path, parts), torn)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        return self._run("write_if", path, lambda: self.inner.write_if(path, data, version=version))

    def folders(self, prefix: str = "") -> list[str]:
        return self._run("folders", prefix, lambda: self.inner.folders(prefix))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._run("list", prefix, lambda: iter(tuple(self.inner.list(prefix))))

    def stat(self, path: str) -> ObjectInfo:
        return self._run("stat", path, lambda: self.inner.stat(path))

    def delete(self, paths: Iterable[str]) -> None:
        held = tuple(paths)
        self._run("delete", ",".join(held), lambda: self.inner.delete(held))

    def is_link(self, path: str) -> bool:
        return self.inner.is_link(path)

    def is_taken(self, path: str) -> bool:
        return self.inner.is_taken(path)

    def leftovers(self, prefix: str = "") -> Iterator[tuple[ObjectInfo, str]]:
        return self.inner.leftovers(prefix)

    def honours_conditions(self) -> bool:
        return self.inner.honours_conditions()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def held_by_writes(self, num_files: int) -> int:
        return self.inner.held_by_writes(num_files)
