"""A family's campaign: a child process fuzzes, the parent ends it when one input takes too long, and starts it again."""

from __future__ import annotations

import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.fuzz.family import longest_s
from tools.fuzz.hunt import HEAD, save

POLL_S = 0.5
MOST_KEPT, LARGEST_KEPT, KEPT_BYTES = 12, 3 << 10, 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a campaign did; `findings` are files that hold the inputs."""

    family: str
    minutes: float
    executions: int
    corpus: int
    blocks: int
    findings: tuple[str, ...]


def run_campaign(family: str, folder: Path, *, minutes: float, seed: int, plant: int | None = None) -> Result:
    """Fuzz `family` for `minutes` of processor time; with a planted fault only until something is found."""
    folder = folder / family
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    started = _childrens_cpu_s()
    until = started + 60 * minutes
    executions = blocks = 0
    while (left_s := until - _childrens_cpu_s()) > 0:
        (folder / "current").unlink(missing_ok=True)
        fault = "" if plant is None else str(plant)
        command = [sys.executable, "-m", "scripts.fuzz", "--child", family, str(folder), str(left_s), str(seed), fault]
        child = subprocess.Popen(command)
        _watch(child, folder, is_planted=plant is not None)
        done, reached = _progress(folder)
        executions, blocks, seed = executions + done, max(blocks, reached), seed + 1
        if plant is not None and any((folder / "findings").glob("*")):
            break
        if child.returncode and done == 0:
            raise RuntimeError(f"{family}: the process ended with {child.returncode} before its first input")
    findings = tuple(sorted(path.name for path in (folder / "findings").glob("*")))
    corpus = len(list((folder / "corpus").iterdir()))
    took = (_childrens_cpu_s() - started) / 60
    return Result(family=family, minutes=took, executions=executions, corpus=corpus, blocks=blocks, findings=findings)


def _watch(child: subprocess.Popen[bytes], folder: Path, *, is_planted: bool) -> None:
    """Wait for the child; kill it when one input has taken too much processor time, or the planted fault is found."""
    at, cpu_s = -1, 0.0
    while child.poll() is None:
        time.sleep(POLL_S)
        if is_planted and any((folder / "findings").glob("*")):
            child.kill()
        now, data, size, is_reading = _current(folder)
        spent = _cpu_s(child.pid)
        if now != at or not is_reading:
            at, cpu_s = now, spent
        elif spent - cpu_s > 2 + longest_s(size):
            child.kill()
            save(folder / "findings", data, "hang")
        child.poll()
    if child.returncode not in (0, -9):
        save(folder / "findings", _current(folder)[1], f"died {child.returncode}")


def _current(folder: Path) -> tuple[int, bytes, int, bool]:
    """The number of the input at hand, the input, the bytes its reader gets, and whether it is being read (rather than made)."""
    try:
        content = (folder / "current").read_bytes()
        number, length, size, _, is_reading = HEAD.unpack_from(content)
    except (OSError, struct.error):
        return -1, b"", 0, False
    return number, content[HEAD.size : HEAD.size + length], size, bool(is_reading)


def _progress(folder: Path) -> tuple[int, int]:
    try:
        number, _, _, blocks, _ = HEAD.unpack_from((folder / "current").read_bytes())
    except (OSError, struct.error):
        return 0, 0
    return number, blocks


def _childrens_cpu_s() -> float:
    """Processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def keep(family: str, folder: Path, target: Path) -> int:
    """Copy findings and a small part of the corpus to `target`, the smallest inputs first; returns how many."""
    found = [*(folder / family / "findings").glob("*"), *sorted((folder / family / "corpus").iterdir(), key=_size)]
    (target / family).mkdir(parents=True, exist_ok=True)
    total = copied = 0
    for path in found:
        if _size(path) <= LARGEST_KEPT and copied < MOST_KEPT and total + _size(path) <= KEPT_BYTES:
            shutil.copy(path, target / family / path.name[:60])
            total, copied = total + _size(path), copied + 1
    return copied


def _size(path: Path) -> int:
    return path.stat().st_size
