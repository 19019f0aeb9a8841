"""Work in daemon threads, for which the end of the program does not wait."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

_PREFIX = "background: "


def start(name: str, work: Callable[[], object]) -> None:
    """Run `work` in a daemon thread."""
    threading.Thread(target=work, name=_PREFIX + name, daemon=True).start()


def end_beside_threads(code: int) -> None:
    """End the program now if such a thread still works; else return. Everything must have been flushed.

    While Python takes itself down it ends such a thread by unwinding its stack; below C++ code that lets nothing through, such as
    numpy's, that aborts the process (https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread; not since Python 3.14).
    """
    if any(thread.name.startswith(_PREFIX) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        os._exit(code)
