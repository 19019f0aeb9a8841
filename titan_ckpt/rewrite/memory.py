"""Buffers in fixed number and size, counted by their users: the hard memory budget of the executor. No torch."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Aborted(Exception):  # noqa: N818  (not an error of its own: the first error is told elsewhere)
    """Somebody else failed; unwind."""


class Slab:
    """A buffer with a count of users; the last `release` gives it back to its pool."""

    def __init__(self, pool: SlabPool, data: Bytes) -> None:
        self.data = data
        self._pool = pool
        self._users = 1
        self._lock = threading.Lock()

    def retain(self) -> Slab:
        """Count one more user."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._pool.give_back(self.data)


class SlabPool:
    """At most `count` slabs of `slab_bytes`; memory is taken as it is first needed and used again."""

    def __init__(self, count: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._free: list[Bytes] = []
        self._unmade = count
        self._changed = threading.Condition()
        self._is_aborted = False

    def acquire(self, size_bytes: int, *, wait: bool = True) -> Slab | None:
        """A slab of at least `size_bytes`; None if `wait` is false and none is free. Raises Aborted after `abort`."""
        with self._changed:
            while True:
                if self._is_aborted:
                    raise Aborted
                if self._free or self._unmade:
                    break
                if not wait:
                    return None
                self._changed.wait()
            data = self._free.pop() if self._free else self._make()
        # A single row of very many small pieces can need a little more than a slab, for alignment.
        return Slab(self, data if len(data) >= size_bytes else np.empty(size_bytes, dtype=np.uint8))

    def _make(self) -> Bytes:
        self._unmade -= 1
        return np.empty(self.slab_bytes, dtype=np.uint8)

    def give_back(self, data: Bytes) -> None:
        """A slab is free again."""
        with self._changed:
            self._free.append(data)
            self._changed.notify()

    def abort(self) -> None:
        """Wake everybody who waits, with Aborted."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
