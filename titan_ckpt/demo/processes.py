"""Find all processes of a job and signal them. Ranks may be in sessions of their own, so a process group is not enough."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def send_signal(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Signal each process; skip those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def process_tree(process: subprocess.Popen[Any]) -> list[int]:
    """The process and its descendants; empty if it has ended."""
    if process.poll() is not None:
        return []
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = [process.pid]
    for pid in found:
        found += children.get(pid, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of every process of this machine."""
    if not (PROC / "self" / "stat").exists():
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)
        return
    for folder in folders():
        with contextlib.suppress(OSError):  # the process ended meanwhile
            yield int(folder.name), stat_of(folder).parent


def folders() -> Iterator[Path]:
    """The folder in /proc of every process."""
    return (folder for folder in PROC.iterdir() if folder.name.isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """State letter, parent and session of a process."""

    state: str
    parent: int
    session: int


def stat_of(folder: Path) -> Stat:
    """Fields of proc_pid_stat(5) behind the command's name, which may hold spaces and parentheses."""
    state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
    return Stat(state=state, parent=int(parent), session=int(session))
