"""Run store calls with a time limit.

The calls run on a daemon thread, so one that never returns blocks neither its caller nor the end of the process. After the
time limit, every further call of that work is refused: a save that hung on its manifest cannot commit an hour later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from titan_ckpt.errors import StoreError
from titan_ckpt.store.base import Buffer, ObjectInfo, Store
from titan_ckpt.store.deadline import SAID_AFTER_S

log = logging.getLogger(__name__)
T = TypeVar("T")


class HungStoreError(StoreError):
    """A store call did not return in time; whether it took effect is unknown."""


class _Guarded(Store):
    """`inner` until the work is abandoned; records the current call for the error message."""

    def __init__(self, inner: Store, work: _Work) -> None:
        super().__init__(inner.url)
        self._inner, self._work = inner, work
        self.is_scattering = inner.is_scattering

    def _call(self, verb: str, path: str) -> Store:
        if self._work.is_given_up:
            raise HungStoreError(f"{self.where(path)}: the time limit passed before this {verb}")
        self._work.last_call = f"{verb} {self.where(path)}"
        return self._inner

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._call("read", path).read_into(path, start, buffer)

    def read_scattered(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._call("read", path).read_scattered(path, start, buffers)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call("read", path).read(path, start, length)

    def read_whole(self, path: str, *, at_most: int) -> tuple[ObjectInfo, bytes | None]:
        return self._call("read", path).read_whole(path, at_most=at_most)

    @contextmanager
    def opened(self, path: str) -> Iterator[Callable[[int, int], bytes]]:
        with self._call("open", path).opened(path) as read:

            def guarded(start: int, length: int) -> bytes:
                self._call("read", path)
                return read(start, length)

            yield guarded

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        return self._call("write", path).write(path, parts)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        return self._call("write", path).write_if(path, data, version=version)

    def folders(self, prefix: str = "") -> list[str]:
        return self._call("list", prefix).folders(prefix)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for entry in self._call("list", prefix).list(prefix):
            yield entry
            self._call("list", prefix)

    def stat(self, path: str) -> ObjectInfo:
        return self._call("stat", path).stat(path)

    def exists(self, path: str) -> bool:
        return self._call("stat", path).exists(path)

    def delete(self, paths: Iterable[str]) -> None:
        self._call("delete", "").delete(paths)

    def honours_conditions(self) -> bool:
        return self._call("probe", "").honours_conditions()

    def is_link(self, path: str) -> bool:
        return self._call("stat", path).is_link(path)

    def is_taken(self, path: str) -> bool:
        return self._call("stat", path).is_taken(path)

    def leftovers(self, prefix: str = "") -> Iterator[tuple[ObjectInfo, str]]:
        return self._call("list", prefix).leftovers(prefix)

    def free_bytes(self) -> int | None:
        return self._call("free space", "").free_bytes()

    def doing(self, what: str) -> None:
        self._work.last_call = what
        self._inner.doing(what)

    def held_by_writes(self, num_files: int) -> int:
        return self._inner.held_by_writes(num_files)

    def where(self, path: str) -> str:
        return self._inner.where(path)


class _Work:
    """State of one run of store calls, shared by its stores."""

    def __init__(self) -> None:
        self.is_given_up = False
        self.last_call = "no call yet"


def on_a_thread(
    give_up_s: float, action: Callable[[], T], *, say: Callable[[], None] | None = None
) -> Future[T] | None:
    """Run `action` on a daemon thread; its finished future, or None if it takes longer than `give_up_s`.

    `say` is called if it takes longer than SAID_AFTER_S. A thread that has done its work has ended, and lets go of nothing later:
    of the last reference to a tensor, say, which aborts the process if Python takes itself down meanwhile.
    """
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001  (the waiting caller raises it)
            done.set_exception(error)

    thread = threading.Thread(target=run, name="titan-ckpt-store", daemon=True)
    thread.start()
    if say is not None and give_up_s > SAID_AFTER_S:
        give_up_s -= SAID_AFTER_S
        thread.join(SAID_AFTER_S)
        if thread.is_alive():
            say()
    thread.join(give_up_s)
    return None if thread.is_alive() else done


def run_until(give_up_s: float, action: Callable[..., T], *stores: Store, what: str) -> T:
    """Return `action(*stores)`; HungStoreError if it takes longer than `give_up_s`. Errors of `action` pass unchanged."""
    work = _Work()
    done = on_a_thread(give_up_s, lambda: action(*(_Guarded(store, work) for store in stores)))
    if done is None:
        work.is_given_up = True
        raise HungStoreError(
            f"{what}: given up after {give_up_s:.1f} s in: {work.last_call}. If the store is slow and not hung, raise timeout_s"
        )
    return done.result()


def call_within(give_up_s: float, action: Callable[[], T], *, what: str) -> T:
    """Return `action()`; HungStoreError after `give_up_s`. For clients without a time limit of their own.

    The thread cannot be stopped, so an abandoned call may still take effect later.
    """

    def say() -> None:
        log.warning("%s: no answer for %g s; given up in %.0f s", what, SAID_AFTER_S, give_up_s - SAID_AFTER_S)

    done = on_a_thread(give_up_s, action, say=say)
    if done is None:
        raise HungStoreError(
            f"{what}: no answer within {give_up_s:.1f} s; given up, though the call may still take effect. If the store is slow "
            f"and not hung, raise RetryPolicy.deadline_s"
        )
    return done.result()
