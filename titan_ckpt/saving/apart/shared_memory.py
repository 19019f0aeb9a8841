"""Anonymous memory that another process can map. Linux alone: memfd_create(2)."""

from __future__ import annotations

import mmap
import os
import weakref

from titan_ckpt.errors import TitanError


class SharedMemory:
    """`view` is this process's mapping; `fd` lets another process map the same pages. Both end with the object."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(size_bytes, mmap.PAGESIZE)
        try:
            self.fd = os.memfd_create("titan-ckpt-staging", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, self.size_bytes)
            self.view = memoryview(mmap.mmap(self.fd, self.size_bytes))
        except (OSError, OverflowError) as error:
            raise TitanError(f"no memory for staging {self.size_bytes} bytes by an upload process: {error}") from error


def is_supported() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")
