"""Total time limits of HTTP calls: when one runs out, its connection is shut down, whatever the call waits for.

A socket's own timeout starts anew with every byte that arrives, so a server that sends one byte a second could hold a call for
ever. One daemon thread per process watches all calls.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

FIRST_TRY_S, FIRST_ANSWER_S, FIRST_ANSWER_SHARE = 3.5, 24.0, 0.2


class TimedCall:
    """A call that must end at `give_up_at` (of `time.monotonic`). A context manager; calls of a thread may nest.

    The connections that this thread uses inside it call `use`. `is_over`: the time ran out; `is_answered`: a server answered,
    whatever it said.
    """

    def __init__(self, give_up_at: float) -> None:
        self.give_up_at = give_up_at
        self.is_over = self.is_answered = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._outer = current_call()
        _this_thread.call = self
        _watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _this_thread.call = self._outer
        _watch.remove(self)
        with self._lock:
            self._socket = None

    @property
    def left_s(self) -> float:
        """Seconds left, at least 1 ms, since a socket takes 0 for "do not wait"."""
        return max(self.give_up_at - time.monotonic(), 0.001)

    def use(self, connection: socket.socket) -> None:
        """Shut `connection` down when the time runs out, or now if it has."""
        with self._lock:
            self._socket = connection
            if self.is_over:
                _shut_down(connection)

    def cut(self) -> None:
        """The time has run out. Called by the watch."""
        with self._lock:
            self.is_over = True
            if self._socket is not None:
                _shut_down(self._socket)


def current_call() -> TimedCall | None:
    """The call that this thread is in."""
    return getattr(_this_thread, "call", None)


def time_limits(deadline_s: float, *, is_first: bool) -> tuple[float, float]:
    """(The time to give up, seconds of the first try) of a call with retries that begins now; each further try has twice as long.

    `is_first`: no answer has ever come, so the endpoint may be wrong, and the user wants to know soon.
    """
    now, outer = time.monotonic(), current_call()
    give_up_at = now + deadline_s
    if is_first:
        give_up_at = min(give_up_at, now + max(FIRST_ANSWER_S, FIRST_ANSWER_SHARE * deadline_s))
    if outer is not None:
        give_up_at = min(give_up_at, outer.give_up_at)
    return give_up_at, FIRST_TRY_S if is_first else deadline_s


def _shut_down(connection: socket.socket) -> None:
    """Wake whoever reads or writes. Not `SSLSocket.shutdown`, after which reads would return the encrypted bytes as they are."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Watch:
    """The thread that cuts calls; it sleeps until the earliest limit that it has seen."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[TimedCall] = set()
        self._wakes_at = 0.0
        self._thread: threading.Thread | None = None

    def add(self, call: TimedCall) -> None:
        """Watch `call`."""
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="titan-ckpt-deadlines", daemon=True)
                self._thread.start()
            elif call.give_up_at < self._wakes_at:
                self._changed.notify()

    def remove(self, call: TimedCall) -> None:
        """Forget `call`, which has ended."""
        with self._changed:
            self._calls.discard(call)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = {call for call in self._calls if call.give_up_at <= now}
                self._calls -= late
                if not late:
                    self._wakes_at = min((call.give_up_at for call in self._calls), default=float("inf"))
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for call in late:
                call.cut()


_this_thread = threading.local()
_watch = _Watch()


def _start_anew() -> None:
    """In a forked child, which has only the thread that forked."""
    global _watch
    _watch = _Watch()
    _this_thread.call = None


os.register_at_fork(after_in_child=_start_anew)
