"""The loop of one process: take an input that reached something new, mutate it, read it, keep what reaches more.

Every input is written down before it is read, so that the parent knows what a killed process was at.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.fuzz.blocks import Blocks
from tools.fuzz.family import MOST_BYTES, Family, longest_s
from tools.peak_memory import PeakMemory

LARGEST = 1 << 16
RETRIES = 2
SLOWER = 1.3
"""An input that takes so many times as long for its size as any before it is kept, so that slowness is followed uphill."""
HEAD = struct.Struct("<QQQQQ")
"""Executions, length of the input, bytes that its reader gets, blocks reached, 1 while it is read."""
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an input was read: what is wrong with that, the processor seconds, and whether the reader took it for whole."""

    problem: str | None
    took_s: float
    is_accepted: bool = False


def problem_of(family: Family, data: bytes, *, slack: float = 1.0) -> str | None:
    """Read one input; what is wrong with how that went, None if nothing is. `slack`: so many times the processor time is fine."""
    return measured(family, data, slack=slack).problem


def measured(family: Family, data: bytes, *, slack: float = 1.0) -> Outcome:
    """Read one input, and again if it seems slow: the least time counts."""
    found, most_s = _read(family, data), slack * longest_s(family.size(data))
    for _ in range(RETRIES):
        if found.problem is None and found.took_s > most_s:
            again = _read(family, data)
            found = again if again.problem or again.took_s < found.took_s else found
    if found.problem is None and found.took_s > most_s:
        return Outcome(f"slow {int(found.took_s / most_s)}x", found.took_s)
    return found


def _read(family: Family, data: bytes) -> Outcome:
    memory = PeakMemory()
    started = time.process_time()
    is_accepted = False
    try:
        with reading():
            family.read(data)
        is_accepted = True
    except family.errors as error:
        try:
            str(error).encode()
        except UnicodeEncodeError as broken:
            return Outcome(f"message {signature(broken)}", 0.0)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome(signature(error), 0.0)
    took_s, grown = time.process_time() - started, memory.grown()
    if grown > MOST_BYTES + family.bound(family.size(data)):
        return Outcome(f"memory {grown >> 20} MB", took_s)
    return Outcome(None, took_s, is_accepted)


class Hunt:
    """The state of one process that fuzzes `family`; keeps its corpus and findings in `folder`."""

    def __init__(self, family: Family, folder: Path, seed: int, blocks: Blocks) -> None:
        self._family, self._folder, self._blocks = family, folder, blocks
        self._rng = random.Random(seed)
        self._corpus: list[bytes] = []
        self._whole: list[bytes] = []
        self._slowest: dict[int, float] = {}
        self._executions = 0
        self._log = os.open(folder / "current", os.O_RDWR | os.O_CREAT)

    def run(self, cpu_s: float) -> None:
        """Fuzz until this process has used so many seconds of processor time."""
        install_watch()
        for data in [*self._family.seeds(), *(path.read_bytes() for path in sorted(self._folder.glob("corpus/*")))]:
            self._try(data)
        if not self._corpus:
            raise RuntimeError(f"{self._family.name}: no seed reaches a block of its modules")
        while time.process_time() < cpu_s:
            data = self._parent()
            for _ in range(self._rng.choice((1, 1, 1, 1, 2, 4))):
                data = self._family.mutate(self._rng, data, self._corpus)
            self._try(data)

    def _parent(self) -> bytes:
        """An input to change: mostly one that was read to its end, since one change of it may go deep."""
        kind = self._rng.random()
        group = self._whole if kind < 0.5 and self._whole else self._corpus[-16:] if kind < 0.7 else self._corpus
        return min(self._rng.choice(group), self._rng.choice(group), key=len)

    def _try(self, data: bytes) -> None:
        reached = self._blocks.reached()
        os.pwrite(self._log, HEAD.pack(self._executions, len(data), self._family.size(data), reached, 1) + data, 0)
        self._executions += 1
        self._blocks.clear()
        found = measured(self._family, data)
        os.pwrite(self._log, HEAD.pack(self._executions, len(data), 0, reached, 0), 0)
        if found.problem is not None:
            save(self._folder / "findings", data, found.problem)
        is_new, is_slow = self._blocks.is_new(), self._is_slowest(data, found.took_s)
        if len(data) > LARGEST:
            return
        if is_new or is_slow:
            self._corpus.append(data)
            if found.is_accepted:
                self._whole.append(data)
        if is_new:
            save(self._folder / "corpus", data, "")

    def _is_slowest(self, data: bytes, took_s: float) -> bool:
        """Whether an input of this length (to a power of two) took much longer than all before it."""
        size = len(data).bit_length()
        is_slowest = took_s > 1e-3 and took_s > SLOWER * self._slowest.get(size, 0.0)
        if is_slowest:
            self._slowest[size] = took_s
        return is_slowest


def save(folder: Path, data: bytes, problem: str) -> None:
    """Keep an input; of findings with the same problem the smallest."""
    folder.mkdir(parents=True, exist_ok=True)
    if not problem:
        (folder / f"{hash(data) & 0xFFFFFFFFFFFF:012x}").write_bytes(data)
        return
    path = folder / "".join(letter if letter.isalnum() or letter in ".:_-" else "_" for letter in problem)[:120]
    if not path.exists() or path.stat().st_size > len(data):
        path.write_bytes(data)
