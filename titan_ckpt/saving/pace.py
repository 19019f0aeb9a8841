"""The pace of an upload: its bytes spread evenly over time, which leaves memory bandwidth and network to the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from titan_ckpt.errors import SaveError

log = logging.getLogger(__name__)
PACED_WITHIN = 0.5  # of the time that an upload has; the rest is for a store that is slow


class Pace:
    """Spreads the bytes of one upload; at full speed without a rate, and once the pace is lifted."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._due_s = 0.0
        self._wake = threading.Event()
        self._is_stopped = False
        self._listener: Callable[[bool], None] | None = None

    def before(self, size_bytes: int) -> None:
        """Wait until the next `size_bytes` are due. SaveError once the upload is stopped.

        Time that the store lost is not made up for: no stretch of an upload is faster than the rate.
        """
        if self.bytes_per_s is not None:
            self._wake.wait(max(0.0, self._due_s - time.monotonic()))
            self._due_s = max(self._due_s, time.monotonic()) + size_bytes / self.bytes_per_s
        if self._is_stopped:
            raise SaveError("the upload was interrupted, or given up")

    def lift(self) -> None:
        """Full speed from now on: somebody waits for the save."""
        self._wake.set()
        self._say()

    def stop(self) -> None:
        """End the upload at its next buffer."""
        self._is_stopped = True
        self._wake.set()
        self._say()

    @contextmanager
    def heard(self, listener: Callable[[bool], None]) -> Iterator[None]:
        """Within the block, `listener` is called when the pace is lifted (False) or stopped (True): at once if it is already."""
        self._listener = listener
        try:
            if self._wake.is_set():
                self._say()
            yield
        finally:
            self._listener = None

    def _say(self) -> None:
        listener = self._listener
        if listener is not None:
            listener(self._is_stopped)


class Sized(Protocol):
    """Something that is stored."""

    @property
    def size_bytes(self) -> int:
        """Its bytes."""


def fitting_pace(bytes_per_s: float | None, items: Iterable[Sized], *, give_up_s: float, said: set[str]) -> Pace:
    """The pace for an upload of `items`: faster, and logged once, if the rate would miss the time limit."""
    if bytes_per_s is None:
        return Pace()
    size_bytes = sum(item.size_bytes for item in items)
    needed = size_bytes / (PACED_WITHIN * give_up_s)
    if needed > bytes_per_s and "upload_bytes_per_s" not in said:
        said.add("upload_bytes_per_s")
        log.warning(
            "upload_bytes_per_s=%g: %d bytes would take %.0f s, and an upload is given up after %.0f s; it goes at %.0f bytes/s. "
            "Raise timeout_s to keep the rate", bytes_per_s, size_bytes, size_bytes / bytes_per_s, give_up_s, needed,
        )  # fmt: skip
    return Pace(max(bytes_per_s, needed))
