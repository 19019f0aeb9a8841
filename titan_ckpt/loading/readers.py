"""Threads that read from the store until the load's deadline; they hold up neither their caller nor the end of the process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from titan_ckpt.errors import CheckpointError
from titan_ckpt.loading.requests import Request, fetch, grouped
from titan_ckpt.store.base import Store
from titan_ckpt.store.deadline import TimedCall

SHOWN = 4
LAST_WAIT_S = 2.0
T = TypeVar("T")


class LoadTimeoutError(CheckpointError):
    """A load did not end in time."""


class Readers:
    """`threads` daemon threads that run calls of `store` in order, until `give_up_at` (of `time.monotonic`)."""

    def __init__(self, store: Store, threads: int, give_up_at: float, timeout_s: float) -> None:
        self._store, self._give_up_at, self._timeout_s = store, give_up_at, timeout_s
        self._queue = queue.SimpleQueue[Callable[[], None] | None]()
        self._running: dict[int, tuple[str, float]] = {}
        self._begun: dict[Future[Any], str] = {}
        names = [f"titan-ckpt-load-{n}" for n in range(threads)]
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def read(self, requests: Iterable[Request]) -> list[Future[None]]:
        """Begin to read all requests, neighbours together."""
        return [self._read(group) for group in grouped(requests, self._store)]

    def _read(self, group: list[Request]) -> Future[None]:
        first, names = group[0], dict.fromkeys(request.fqn for request in group)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        end = max(request.start + request.length for request in group)
        what = f"{first.fqn}{more} ({self._store.where(first.path)}, bytes {first.start} to {end})"
        return self.call(partial(fetch, self._store, group), what)

    def call(self, action: Callable[[], T], what: str) -> Future[T]:
        """Begin to run `action`; errors name it as `what`."""
        future = Future[T]()
        self._begun[future] = what
        self._queue.put(partial(self._run, future, action, what))
        return future

    def all(self, futures: Iterable[Future[T]]) -> list[T]:
        """The results; the first error ends all."""
        return [self.result(future) for future in futures]

    def result(self, future: Future[T]) -> T:
        """The result of one call. LoadTimeoutError, which names what is being read, after the deadline."""
        is_done = bool(wait([future], self._left_s()).done)
        is_late = time.monotonic() >= self._give_up_at
        if not is_done or (is_late and future.exception() is not None):
            raise LoadTimeoutError(self._late(future)) from (future.exception() if is_done else None)
        self._begun.pop(future, None)
        return future.result()

    def stop(self) -> bool:
        """Begin nothing more and wait a while for what has begun. Whether all of it has ended.

        Waits for the threads, not for their results: a thread that lets a tensor go while Python takes itself down aborts the
        process (torch releases the GIL there, https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread).
        """
        for future in self._begun:
            future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + max(self._left_s(), LAST_WAIT_S)
        for thread in self._threads:
            thread.join(end - time.monotonic())
        return not any(thread.is_alive() for thread in self._threads)

    def _left_s(self) -> float:
        return min(max(self._give_up_at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _late(self, future: Future[Any]) -> str:
        now = time.monotonic()
        running = {what: f"{what} for {now - began:.1f} s" for what, began in list(self._running.values())}
        first = self._begun[future]
        shown = [running.pop(first, first), *running.values()]
        more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
        return (
            f"the load did not end within {self._timeout_s:g} s (LoadPolicy(timeout_s=)); this rank was reading "
            f"{', '.join(shown[:SHOWN])}{more}"
        )

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _run(self, future: Future[T], action: Callable[[], T], what: str) -> None:
        if not future.set_running_or_notify_cancel():
            return
        thread = threading.get_ident()
        self._running[thread] = (what, time.monotonic())
        try:
            with TimedCall(self._give_up_at):
                future.set_result(action())
        except BaseException as error:  # noqa: BLE001  (`result` raises it)
            future.set_exception(error)
        finally:
            self._running.pop(thread, None)
