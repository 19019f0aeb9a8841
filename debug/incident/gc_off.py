"""Pause the cycle collector while many records are made: none is garbage, and it would traverse all of them again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """No collection of cycles inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # all that lives moves on to the oldest generation, without being looked at
                gc.freeze()
                gc.unfreeze()
            gc.enable()
