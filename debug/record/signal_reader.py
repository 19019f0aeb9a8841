"""Receive signals even while the main thread hangs, when no Python handler can run."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

JOIN_S = 2.0


class SignalReader:
    """C writes the number of a signal to the wakeup descriptor, a socket, and a thread of ours reads it and calls `hear`
    with them and the program's handlers.

    Create it in the main thread. The program's own handlers run as well. `stop` puts back what was not replaced since.
    """

    def __init__(self, numbers: Sequence[int], hear: Callable[[bytes, Mapping[int, Any]], None]) -> None:
        self._hear = hear
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._descriptor = self._writer.fileno()
        self._previous_descriptor = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._handler)
        self._thread = threading.Thread(target=self._read, name="titan-recorder-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more. Goes on in another thread than the main one: only there can handlers be put back, and until then
        a signal without a reader would be lost."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._put_back()
        self._writer.close()
        self._thread.join(JOIN_S)
        self._reader.close()

    def leave_in_child(self) -> None:
        """In a forked child: it shares the socket, and its signals must not be taken for its parent's."""
        self._put_back()
        self._writer.close()
        self._reader.close()

    def _put_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        back = self._previous_descriptor if current == self._descriptor else current
        with contextlib.suppress(ValueError, OSError):  # closed since
            signal.set_wakeup_fd(back, warn_on_full_buffer=False)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handler:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _read(self) -> None:
        while data := self._reader.recv(64):
            self._hear(data, self._previous)
