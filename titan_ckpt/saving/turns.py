"""Whose turn it is on a saver: one call at a time, never from inside a save, never in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from titan_ckpt.errors import UsageError


class Turns:
    """Lets threads take turns, and refuses calls that could only wait for themselves. `own_thread` is that of the uploads."""

    def __init__(self, *, own_thread: int) -> None:
        self._own_thread, self._pid = own_thread, os.getpid()
        self._lock, self._holder = threading.Lock(), 0
        self.is_closed = False

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the saver: it has neither its threads nor its connections."""
        return os.getpid() != self._pid

    def check(self, what: str) -> None:
        """UsageError after `is_closed` is set, and for a call that would wait for itself or for a thread that is not there."""
        if self.is_forked:
            raise UsageError(
                f"{what}: this process was forked after the saver was made, in process {self._pid}; make one here"
            )
        if threading.get_ident() == self._own_thread:
            raise UsageError(f"{what}: called from a hook or callback of a save, which would wait for itself")
        if self.is_closed:
            raise UsageError(f"{what}: the saver is closed; make another Saver")

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Run the block when no other thread is in one. UsageError if this one is, or after `is_closed` is set."""
        self.check(what)
        if self._holder == threading.get_ident():
            raise UsageError(f"{what}: called from inside a save of this saver, by a hook or by the state itself")
        with self._lock:
            self.check(what)
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0
