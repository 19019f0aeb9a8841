"""Threads that touched a caller's tensors have ended, and let go of them, when the call returns."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from titan_ckpt.loading.readers import Readers
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import on_a_thread

LET_GO_S = 0.2


class Slow:
    """Its deletion takes long, as a tensor's that waits for the GIL."""

    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    def __call__(self) -> int:
        return 1

    def __del__(self) -> None:
        time.sleep(LET_GO_S)
        self._gone.set()


def test_readers_have_let_go_of_what_they_read_into(tmp_path: Path) -> None:
    gone = threading.Event()
    readers = Readers(open_store(str(tmp_path)), 2, time.monotonic() + 60, 60)
    assert readers.result(readers.call(Slow(gone), "a tensor")) == 1
    assert readers.stop()
    assert gone.is_set()


def test_a_call_with_a_limit_lets_go_before_it_returns() -> None:
    gone, kept = threading.Event(), threading.local()
    done = on_a_thread(60, lambda: setattr(kept, "tensor", Slow(gone)))
    assert done is not None
    assert done.done()
    assert gone.is_set()
