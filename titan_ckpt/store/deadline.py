"""Total time limits of HTTP calls: when one runs out, its connection is shut down, whatever the call waits for.

A socket's own timeout starts anew with every byte that arrives, so a server that sends one byte a second could hold a call for
ever. One daemon thread per process watches all calls, and says which of them is silent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

FIRST_TRY_S, FIRST_ANSWER_S, FIRST_ANSWER_SHARE = 3.0, 20.0, 1 / 6
SAID_AFTER_S = 3.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0  # of S3 clients


class TimedCall:
    """A call that must end at `give_up_at` (of `time.monotonic`). A context manager; calls of a thread may nest.

    The connections that this thread uses inside it call `use`, and `heard` whenever bytes went out or came in. Until a server has
    answered, the call also ends after `silence_s` seconds without any. After SAID_AFTER_S seconds of silence `say` is called,
    once. `is_over`: the time ran out; `is_answered`: a server answered, whatever it said.
    """

    def __init__(
        self, give_up_at: float, *, silence_s: float = float("inf"), say: Callable[[], None] | None = None
    ) -> None:
        self.give_up_at = give_up_at
        self.is_over = self.is_answered = False
        self._heard_at = time.monotonic()
        self._silence_s, self._say = silence_s, say
        self._socket: socket.socket | None = None
        self._outer: TimedCall | None = None
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
        return max(self._ends_at - time.monotonic(), 0.001)

    @property
    def _ends_at(self) -> float:
        silence_s = float("inf") if self.is_answered else self._silence_s
        return min(self.give_up_at, self._heard_at + silence_s)

    @property
    def wakes_at(self) -> float:
        """When the watch must look at this call again."""
        return min(self._ends_at, self._heard_at + SAID_AFTER_S if self._say is not None else float("inf"))

    def use(self, connection: socket.socket) -> None:
        """Shut `connection` down when the time runs out, or now if it has."""
        with self._lock:
            self._socket = connection
            if self.is_over:
                _shut_down(connection)

    def heard(self, *, is_answer: bool = False) -> None:
        """Bytes went out or came in; `is_answer`: the server has answered."""
        self._heard_at = time.monotonic()
        self.is_answered |= is_answer
        if self._outer is not None:
            self._outer.heard(is_answer=is_answer)

    def look(self) -> bool:
        """Say that it is silent, or end it if its time has run out; whether it goes on. Called by the watch."""
        now = time.monotonic()
        if now < self._ends_at:
            if self._say is not None and now >= self.wakes_at:
                say, self._say = self._say, None
                say()
            return True
        with self._lock:
            self.is_over = True
            if self._socket is not None:
                _shut_down(self._socket)
        return False


def current_call() -> TimedCall | None:
    """The call that this thread is in."""
    return getattr(_this_thread, "call", None)


def heard() -> None:
    """Bytes went out or came in on a connection of this thread."""
    call = current_call()
    if call is not None:
        call.heard()


def time_limit(deadline_s: float) -> float:
    """The time at which a call with retries that begins now must end."""
    outer, give_up_at = current_call(), time.monotonic() + deadline_s
    return give_up_at if outer is None else min(give_up_at, outer.give_up_at)


def first_answer_limit_s(deadline_s: float) -> float:
    """Seconds of silence until an endpoint that has never answered is given up: it may be wrong, and the user wants to know."""
    return min(deadline_s, max(FIRST_ANSWER_S, FIRST_ANSWER_SHARE * deadline_s))


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
            elif call.wakes_at < self._wakes_at:
                self._changed.notify()

    def remove(self, call: TimedCall) -> None:
        """Forget `call`, which has ended."""
        with self._changed:
            self._calls.discard(call)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [call for call in self._calls if call.wakes_at <= now]
                if not late:
                    self._wakes_at = min((call.wakes_at for call in self._calls), default=float("inf"))
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for call in late:
                if not call.look():
                    self.remove(call)


_this_thread = threading.local()
_watch = _Watch()


def _start_anew() -> None:
    """In a forked child, which has only the thread that forked."""
    global _watch
    _watch = _Watch()
    _this_thread.call = None


os.register_at_fork(after_in_child=_start_anew)
