"""The loop of one process: take an input that reached something new, mutate it, read it, keep what reaches more.

Every input is written down before it is read, so that the parent knows what a killed process was at.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tools.fuzz.blocks import Blocks
from tools.fuzz.family import MOST_BYTES, Family, longest_s

LARGEST = 1 << 16
HEAD = struct.Struct("<QQQQ")  # executions, seeds, length of the input, blocks reached
_FORBIDDEN = frozenset(
    ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "socket.connect", "os.remove",
     "os.rename", "shutil.rmtree", "ctypes.dlopen")
)  # fmt: skip
_REMOVALS = ("os.remove", "shutil.rmtree")
_SCRATCH = tempfile.gettempdir()  # some readers keep temporary files
_is_reading = False


class CodeRunError(BaseException):
    """An input made the reader do what no reader does."""


def _watch(event: str, arguments: Any) -> None:
    if _is_reading and event in _FORBIDDEN and not _is_scratch(event, arguments):
        raise CodeRunError(f"{event}{arguments!r:.200}")


def _is_scratch(event: str, arguments: Any) -> bool:
    """Whether a removal is of a temporary file; those inside a folder that is removed are named relative to it."""
    return event in _REMOVALS and (str(arguments[0]).startswith(_SCRATCH) or arguments[1] not in (None, -1))


@cache
def install_watch() -> None:
    """Watch this process for what `reading` forbids; there is no way back."""
    sys.addaudithook(_watch)


@contextmanager
def reading() -> Iterator[None]:
    """CodeRunError for whatever inside runs a program, looks a global up for a pickle, removes a file or opens a connection."""
    global _is_reading
    _is_reading = True
    try:
        yield
    finally:
        _is_reading = False


def signature(error: BaseException) -> str:
    """The kind of an error and the place in our code where it comes from."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "titan_ckpt" in f.filename or "/tools/" not in f.filename
    ]
    place = frames[-1] if frames else None
    return f"{type(error).__name__} {os.path.basename(place.filename)}:{place.name}" if place else type(error).__name__


def problem_of(family: Family, data: bytes) -> str | None:
    """Read one input; what is wrong with how that went, None if nothing is."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        with reading():
            family.read(data)
    except family.errors as error:
        try:
            str(error).encode()
        except UnicodeEncodeError as broken:
            return f"message {signature(broken)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return signature(error)
    took_s = time.process_time() - started
    if took_s > longest_s(data):
        return f"slow {int(took_s / longest_s(data))}x"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return f"memory {grown >> 20} MB" if grown > MOST_BYTES + family.bound(len(data)) else None


class Hunt:
    """The state of one process that fuzzes `family`; keeps its corpus and findings in `folder`."""

    def __init__(self, family: Family, folder: Path, seed: int, blocks: Blocks) -> None:
        self._family, self._folder, self._blocks = family, folder, blocks
        self._rng = random.Random(seed)
        self._corpus: list[bytes] = []
        self._seen = 0
        self._executions = 0
        self._log = os.open(folder / "current", os.O_RDWR | os.O_CREAT)

    def run(self, until: float) -> None:
        """Fuzz until the clock (`time.monotonic`) says `until`."""
        install_watch()
        for data in [*self._family.seeds(), *(path.read_bytes() for path in sorted(self._folder.glob("corpus/*")))]:
            self._try(data)
        if not self._corpus:
            raise RuntimeError(f"{self._family.name}: no seed reaches a block of its modules")
        while time.monotonic() < until:
            newest = self._corpus[-16:] if self._rng.random() < 0.3 else self._corpus
            data = min(self._rng.choice(newest), self._rng.choice(newest), key=len)
            for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
                data = self._family.mutate(self._rng, data, self._corpus)
            self._try(data)

    def _try(self, data: bytes) -> None:
        os.pwrite(
            self._log, HEAD.pack(self._executions, len(self._corpus), len(data), self._seen.bit_count()) + data, 0
        )
        self._executions += 1
        self._blocks.clear()
        problem = problem_of(self._family, data)
        if problem is not None:
            save(self._folder / "findings", data, problem)
        reached = self._blocks.reached()
        if reached & ~self._seen and len(data) <= LARGEST:
            self._seen |= reached
            self._corpus.append(data)
            save(self._folder / "corpus", data, "")


def save(folder: Path, data: bytes, problem: str) -> None:
    """Keep an input; of findings with the same problem the smallest."""
    folder.mkdir(parents=True, exist_ok=True)
    if not problem:
        (folder / f"{hash(data) & 0xFFFFFFFFFFFF:012x}").write_bytes(data)
        return
    path = folder / "".join(letter if letter.isalnum() or letter in ".:_-" else "_" for letter in problem)[:120]
    if not path.exists() or path.stat().st_size > len(data):
        path.write_bytes(data)
