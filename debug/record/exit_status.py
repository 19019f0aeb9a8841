"""The status that this process ends with, written into its black box by the C library: no code of Python runs then.

`sys.exit(3)` and `raise SystemExit(3)` reach no hook of Python. glibc's `exit(3)` calls what was registered by `on_exit(3)` with
the status, and `putw(3)` has the signature of such a function: it writes the status into a stream, here one of memory, the box's
header page, which is mapped for this alone and never unmapped. `os._exit` and signals pass `exit(3)` by, and leave no status.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED, the same on all Linux platforms
_UNBUFFERED, _FAILED = 2, ctypes.c_void_p(-1).value
_page: int = 0  # the address; one for all boxes of this process, since nothing can be unregistered


def write_status_at_exit(box: Path, offset: int) -> bool:
    """Have the exit status of this process written as an int at `offset` of the file; False where that cannot be done."""
    global _page
    libc = _libc()
    if libc is None:
        return False
    descriptor = os.open(box, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fixed = _FIXED if _page else 0
        address = libc.mmap(_page or None, mmap.PAGESIZE, _PROTECTION, mmap.MAP_SHARED | fixed, descriptor, 0)
    finally:
        os.close(descriptor)
    if address in (None, _FAILED):
        return False
    if _page:
        return True
    stream = libc.fmemopen(address + offset, ctypes.sizeof(ctypes.c_int), b"r+")
    if not stream or libc.setvbuf(stream, None, _UNBUFFERED, 0):
        return False
    if libc.on_exit(ctypes.cast(libc.putw, ctypes.c_void_p), stream):
        return False
    _page = address
    return True


def forget_in_child() -> None:
    """In a forked child, which inherits what was registered: its status is not its parent's."""
    libc = _libc()
    if _page and libc is not None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        libc.mmap(_page, mmap.PAGESIZE, _PROTECTION, flags, -1, 0)


def _libc() -> Any:
    """glibc with the signatures of what is called here; None on other systems."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    try:
        libc.mmap.restype = libc.fmemopen.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.fmemopen.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
        libc.setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t)
        libc.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        assert libc.putw
    except AttributeError:
        return None
    return libc
