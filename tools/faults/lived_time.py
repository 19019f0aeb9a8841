"""Seconds that this process has lived: as the clock's, but those for which a busy machine gave it no processor do not count.

So a bound on waiting holds on any machine, and still fails a process that waits: one that sleeps or blocks goes on living.
"""

from __future__ import annotations

import os
import threading
import time

NAP_S = 0.05
_naps: dict[int, int] = {}
_lock = threading.Lock()


def lived_s() -> float:
    """Seconds since the first call in this process, in steps of NAP_S; each nap counts as NAP_S, however late it ends."""
    with _lock:
        if os.getpid() not in _naps:
            _naps[os.getpid()] = 0
            threading.Thread(target=_count, args=(os.getpid(),), name="lived time", daemon=True).start()
    return _naps[os.getpid()] * NAP_S


def _count(process: int) -> None:
    while True:
        time.sleep(NAP_S)
        _naps[process] += 1
