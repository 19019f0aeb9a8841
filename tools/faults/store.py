"""A store that fails on purpose: at the n-th call of a kind, before or after the real one, torn or hanging until released.

    store = FaultyStore(FileStore(url), [Fault(call="write", number=3, how="after")])

Calls are counted from 1 per kind (`read_into`, `write`, `write_if`, `list`, `folders`, `stat`, `delete`) over all threads;
`call="any"` counts every call. `store.calls` tells what was called, so that a test can first count and then fail each in turn.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from titan_ckpt.errors import StoreError, TransientStoreError
from titan_ckpt.store.base import Buffer, ObjectInfo, Store

T = TypeVar("T")
How = Literal["before", "after", "torn", "hang"]


def no_space() -> BaseException:
    """What a full disk raises."""
    return OSError(errno.ENOSPC, "No space left on device")


def unavailable() -> BaseException:
    """What is left of a 503 after all retries."""
    return TransientStoreError("given up after 6 tries: SlowDown: reduce your request rate")


def reset() -> BaseException:
    """A connection that the other side closed."""
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def refused() -> BaseException:
    """Bytes that the server found damaged on the way."""
    return StoreError("BadDigest: the checksum did not match")


ERRORS: tuple[Callable[[], BaseException], ...] = (no_space, unavailable, reset, refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`before`: the call does nothing. `after`: it works, but reports failure. `torn`: a write gets part of its bytes.
    `hang`: it waits for `FaultyStore.released`, and then does it after all."""

    number: int
    how: How = "before"
    call: str = "any"
    error: Callable[[], BaseException] = field(default=no_space)


class FaultyStore(Store):
    """`inner` with faults."""

    def __init__(self, inner: Store, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner.url)
        self.inner, self.faults = inner, list(faults)
        self.calls: list[tuple[str, str]] = []
        self.hit: list[Fault] = []
        self.released = threading.Event()
        self.is_hanging = threading.Event()
        self.is_over = threading.Event()
        self.is_preempted = False
        self._lock = threading.Lock()

    def arm(self, faults: Sequence[Fault]) -> None:
        """Forget the calls so far and count for these faults from now on."""
        with self._lock:
            self.faults, self.calls = list(faults), []

    def _run(self, call: str, path: str, action: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        fault = self._count(call, path)
        if fault is None:
            return action()
        if fault.how == "hang":
            self.is_hanging.set()
            assert self.released.wait(120), "the test never released the store"
            try:
                return action()
            finally:
                self.is_over.set()
        elif fault.how == "after":
            self._run_first(action)
        elif fault.how == "torn" and torn is not None:
            torn()
        raise fault.error()

    def _run_first(self, action: Callable[[], object]) -> None:
        """A call that fails by itself ("not there") is no place for a fault after it."""
        try:
            action()
        except BaseException:
            self.is_preempted = True
            raise

    def _count(self, call: str, path: str) -> Fault | None:
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
        """A torn write fails when half of the parts were taken: a store must then leave nothing of it."""

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

    def honours_conditions(self) -> bool:
        return self.inner.honours_conditions()
