"""Search with a regular expression in a process of its own, which ends where `re` would go on for ever.

`re` cannot be stopped and holds the interpreter's lock: `(a|aa)+$` as a filter would freeze the screens for good. This module is
also the program of that process, so it imports the standard library alone. RE2 has no such patterns, but is a dependency more.
"""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import sys
from array import array
from types import TracebackType
from typing import IO

LIMIT_S = 5.0  # of processor time, for one block; 8 MiB take 0.01 to 0.3 s
_LENGTH = struct.Struct("<q")


class Matcher:
    """Matches of `pattern` in blocks of bytes, case ignored, `^` and `$` at each line. A context manager."""

    def __init__(self, pattern: str, limit_s: float) -> None:
        self._pattern, self._limit_s = pattern, limit_s

    def __enter__(self) -> Matcher:
        command = [sys.executable, "-I", "-S", __file__, self._pattern, str(self._limit_s)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL  # `re` warns of some patterns, in the middle of the screens
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def starts(self, data: bytes) -> array[int]:
        """Where matches begin. TimeoutError if that takes more than the limit."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            _send(stdin, data)
            return array("q", _receive(stdout))
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
        if code == -signal.SIGVTALRM:
            raise TimeoutError(
                f"searching {len(data):,} bytes for {self._pattern!r} took more than {self._limit_s:g} s; "
                "repeat fewer parts of the pattern"
            )
        raise ChildProcessError(f"the search for {self._pattern!r} ended with exit code {code}")


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    return stream.read(length)


def _serve(pattern: str, limit_s: float) -> None:
    """Answer blocks until no more come; a block that takes too long ends the process by SIGVTALRM."""
    compiled = re.compile(pattern.encode(), re.IGNORECASE | re.MULTILINE)
    while True:
        try:
            data = _receive(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
        found = array("q", (match.start() for match in compiled.finditer(data)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _send(sys.stdout.buffer, found.tobytes())


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))
