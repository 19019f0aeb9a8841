"""Buffers in fixed number and size, counted by their users: the hard memory budget of the executor. No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from titan_ckpt.console.units import format_size
from titan_ckpt.errors import UsageError
from titan_ckpt.store.base import Store

Bytes = npt.NDArray[np.uint8]

SMALLEST_MEMORY = 8 << 20
# Requests for less than this are slow over a network; files are opened until it would come to that.
USEFUL_SLAB = 4 << 20
# A disk is read in slabs that stay in the processor's cache; over a network a few large ones make for few requests: a slab
# holds what a unit reads of every source file.
LARGEST_SLAB, LARGEST_SLAB_OVER_A_NETWORK = 8 << 20, 30 << 20
SLABS_PER_POOL, SLABS_PER_POOL_OVER_A_NETWORK = 6, 3
MAX_OPEN_FILES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How a memory budget is spent: two pools of slabs, two more for a transform, and what open target files hold on to."""

    slab_bytes: int
    slabs_per_pool: int
    max_open_files: int

    @staticmethod
    def of(memory_bytes: int, source: Store, target: Store, *, num_files: int = MAX_OPEN_FILES) -> Budget:
        """The split of `memory_bytes` for at most `num_files` of `target` at once: the fewer, the larger the requests.

        UsageError where it is too little to work with.
        """
        one_file = target.held_by_writes(1)
        least = SMALLEST_MEMORY + one_file
        if memory_bytes < least:
            raise UsageError(
                f"a memory budget of {format_size(memory_bytes)} is too little for {target}; the least is {format_size(least)}"
            )
        is_far = one_file > 0 or source.held_by_writes(1) > 0  # a file on a disk holds nothing
        per_pool = SLABS_PER_POOL_OVER_A_NETWORK if is_far else SLABS_PER_POOL
        slabs = 2 * per_pool + 2
        room = max(one_file, memory_bytes - slabs * USEFUL_SLAB)
        most = max(1, min(num_files, MAX_OPEN_FILES))
        max_open = max(n for n in range(1, most + 1) if target.held_by_writes(n) <= room)
        largest = LARGEST_SLAB_OVER_A_NETWORK if is_far else LARGEST_SLAB
        slab_bytes = min(largest, (memory_bytes - target.held_by_writes(max_open)) // slabs)
        return Budget(slab_bytes=slab_bytes, slabs_per_pool=per_pool, max_open_files=max_open)

    def total_bytes(self, target: Store, num_files: int) -> int:
        """The most that an execution with `num_files` per wave can hold at once."""
        slabs = (2 * self.slabs_per_pool + 2) * self.slab_bytes
        return slabs + target.held_by_writes(min(num_files, self.max_open_files))


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
