"""The most memory that a stretch of code holds: the kernel's high-water mark of this process, set back when it begins."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PEAK = re.compile(rb"VmHWM:\s*(\d+) kB")
_RESET_PEAK = b"5"  # proc(5), clear_refs


class PeakMemory:
    """Resident bytes from now on. What is asked for and never touched does not count; the address space is limited."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)
        pages = Path("/proc/self/statm").read_bytes().split()[1]
        self._before = int(pages) * os.sysconf("SC_PAGE_SIZE")

    def grown(self) -> int:
        """Bytes of the peak since this object was made, beyond what was held then."""
        found = _PEAK.search(Path("/proc/self/status").read_bytes())
        assert found is not None, "a kernel without VmHWM"
        return (int(found[1]) << 10) - self._before
