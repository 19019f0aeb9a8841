"""The executor's hard memory budget: how it is divided, and pools of reference-counted buffers; room on disks. No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from titan_ckpt.arguments import check_whole
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import UsageError
from titan_ckpt.store.base import Store

Bytes = npt.NDArray[np.uint8]

SMALLEST_MEMORY = 8 << 20
# Smaller requests are slow over a network, so no more files are opened at once than leave buffers of this size.
USEFUL_BUFFER = 4 << 20
# For a disk, buffers that fit the processor's cache; over a network few and large ones, so that a unit, which shares one buffer
# between all source files, still makes large requests.
LARGEST_BUFFER, LARGEST_BUFFER_OVER_A_NETWORK = 8 << 20, 30 << 20
BUFFERS_PER_POOL, BUFFERS_PER_POOL_OVER_A_NETWORK = 6, 3
MAX_OPEN_FILES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A memory budget divided into two pools of buffers, two more for a transform, and what open target files hold."""

    buffer_bytes: int
    buffers_per_pool: int
    max_open_files: int

    @staticmethod
    def of(memory_bytes: int, source: Store, target: Store, *, num_files: int = MAX_OPEN_FILES) -> Budget:
        """Divide `memory_bytes` between at most `num_files` open files of `target` and the buffers; fewer files, larger requests.

        UsageError if it is too little.
        """
        check_whole(memory_bytes, "memory_bytes", at_least=1)
        one_file = target.held_by_writes(1)
        least = SMALLEST_MEMORY + one_file
        if memory_bytes < least:
            raise UsageError(
                f"a memory budget of {format_size(memory_bytes)} is too little for {target}; the least is {format_size(least)}"
            )
        is_far = one_file > 0 or source.held_by_writes(1) > 0  # an open file on a disk holds no memory
        per_pool = BUFFERS_PER_POOL_OVER_A_NETWORK if is_far else BUFFERS_PER_POOL
        buffers = 2 * per_pool + 2
        room = max(one_file, memory_bytes - buffers * USEFUL_BUFFER)
        most = max(1, min(num_files, MAX_OPEN_FILES))
        max_open = max(n for n in range(1, most + 1) if target.held_by_writes(n) <= room)
        largest = LARGEST_BUFFER_OVER_A_NETWORK if is_far else LARGEST_BUFFER
        buffer_bytes = min(largest, (memory_bytes - target.held_by_writes(max_open)) // buffers)
        return Budget(buffer_bytes=buffer_bytes, buffers_per_pool=per_pool, max_open_files=max_open)

    def total_bytes(self, target: Store, num_files: int) -> int:
        """Peak memory of an execution that writes `num_files` at once."""
        buffers = (2 * self.buffers_per_pool + 2) * self.buffer_bytes
        return buffers + target.held_by_writes(min(num_files, self.max_open_files))


class Aborted(Exception):  # noqa: N818  (not an error of its own: the first error is reported elsewhere)
    """Another thread failed; unwind."""


class PooledBuffer:
    """A buffer with a reference count; the last `release` returns it to its pool."""

    def __init__(self, pool: BufferPool, data: Bytes) -> None:
        self.data = data
        self._pool = pool
        self._users = 1
        self._lock = threading.Lock()

    def retain(self) -> PooledBuffer:
        """Count one more user."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Count one user less."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._pool.give_back(self.data)


class BufferPool:
    """At most `count` buffers of `buffer_bytes`, allocated on first use and reused."""

    def __init__(self, count: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._free: list[Bytes] = []
        self._unmade = count
        self._changed = threading.Condition()
        self._is_aborted = False

    def acquire(self, size_bytes: int, *, wait: bool = True) -> PooledBuffer | None:
        """A buffer of at least `size_bytes`; None if `wait` is false and none is free. Raises Aborted after `abort`."""
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
        # Alignment can make a single row of very many small chunks a little larger than a buffer.
        return PooledBuffer(self, data if len(data) >= size_bytes else np.empty(size_bytes, dtype=np.uint8))

    def _make(self) -> Bytes:
        self._unmade -= 1
        return np.empty(self.buffer_bytes, dtype=np.uint8)

    def give_back(self, data: Bytes) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            self._free.append(data)
            self._changed.notify()

    def abort(self) -> None:
        """Wake all waiting threads with Aborted."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
