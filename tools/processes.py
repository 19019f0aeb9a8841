"""Processes of a job that has lost its launcher."""

from __future__ import annotations

import contextlib
from pathlib import Path

from titan_ckpt.demo.processes import folders, stat_of


def marked_processes(mark: str, session: int) -> dict[int, bool]:
    """Processes whose environment contains `mark` (NAME=VALUE), and whether each is a rank. Linux only.

    Survives the death of a launcher, which `process_tree` does not. Between fork and exec a process may show no environment:
    it is then found by its session.
    """
    found = {}
    for folder in folders():
        with contextlib.suppress(OSError):  # the process ended meanwhile
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark.encode() in variables or (variables == [b""] and _is_starting(folder, session)):
                found[int(folder.name)] = any(item.startswith(b"RANK=") for item in variables)
    return found


def _is_starting(folder: Path, session: int) -> bool:
    stat = stat_of(folder)
    return stat.state != "Z" and stat.session == session
