"""Which process is a rank, for certain: by its socket or by the black box that it has mapped. Nothing is signalled."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ckpt.debug.incident.records import MAX_RANK
from titan_ckpt.errors import CheckpointError, StoreError
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.private_files import open_regular

GONE = "gone"
STATES = "processes"  # begins the name of the file in which a collection notes them
MAX_SIDECAR_BYTES = 64 << 20
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +(/.*)$", re.MULTILINE)  # proc_pid_maps(5): the inode and the path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One rank's process, as its sidecar names it; `state` is the kernel's word, `gone` when it is no more."""

    rank: int
    pid: int
    stem: str
    state: str
    endpoint: str = ""
    ask: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it can answer: neither gone, nor stopped (T), traced (t) or dead (Z, X)."""
        return self.state != GONE and not self.state.startswith(("T", "t", "Z", "X"))


def find_processes(folder: Path) -> list[Process]:
    """The ranks of this host that left a sidecar in `folder`."""
    found = []
    for path in sorted(folder.glob("rank_*.sidecar.json")):
        try:
            process = _process(path, _read_sidecar(path))
        except (OSError, KeyError, CheckpointError, StoreError):
            continue  # damaged, or not a sidecar
        if process is not None:
            found.append(process)
    return found


def process_state(pid: int) -> str:
    """The kernel's state of a process, such as `S (sleeping)`; `gone` if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return GONE
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "?")


def _read_sidecar(path: Path) -> dict[str, Any]:
    with open(open_regular(path), "rb") as file:
        document = JsonValue(parse_json(file.read(MAX_SIDECAR_BYTES), str(path)), str(path))
    document["rank"].whole(0, MAX_RANK)
    document["pid"].whole(1)
    return document.table()


def _process(path: Path, sidecar: dict[str, Any]) -> Process | None:
    if sidecar["host"] != socket.gethostname():
        return None
    stem, pid = path.name.removesuffix(".sidecar.json"), int(sidecar["pid"])
    state = process_state(pid) if _has_mapped(pid, path.with_name(f"{stem}.box")) else GONE
    return Process(
        rank=int(sidecar["rank"]), pid=pid, stem=stem, state=state, endpoint=_socket(sidecar, "endpoint"),
        ask=_socket(sidecar, "ask"),
    )  # fmt: skip


def _socket(sidecar: dict[str, Any], key: str) -> str:
    """A socket of this user that the sidecar names; empty if there is none."""
    path = sidecar.get(key)
    if not isinstance(path, str) or not path:
        return ""
    try:
        owner = os.lstat(path).st_uid
    except (OSError, ValueError):
        return ""
    return path if Path(path).is_socket() and (owner == os.geteuid() or os.geteuid() == 0) else ""


def _has_mapped(pid: int, box: Path) -> bool:
    """Whether a process has the rank's black box mapped: numbers of processes are used again, and differ between containers.

    By path, or by inode and name where the folder is mounted elsewhere there. Devices are not compared: for overlayfs and
    btrfs the table names another than stat does.
    """
    try:
        with open(open_regular(box), "rb") as file:
            wanted = os.fstat(file.fileno()).st_ino
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (OSError, StoreError):
        return False
    path = str(box.resolve())
    return any(
        mapped == path or (int(inode) == wanted and mapped.endswith(f"/{box.name}"))
        for inode, mapped in _MAPPED.findall(maps)
    )
