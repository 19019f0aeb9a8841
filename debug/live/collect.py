"""`debug collect`: ask the live ranks on this host for fresh dumps, look at the dead ones, and gather all in one place."""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.console.command import Command
from titan_ckpt.debug.record.worker_endpoint import fetch_trace
from titan_ckpt.errors import NotFoundError
from titan_ckpt.location import redact
from titan_ckpt.store.open import open_store

TAIL_BYTES = 1 << 20
PYSPY_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One rank's process, as its sidecar names it; `state` is the kernel's word, `gone` when it is no more."""

    rank: int
    pid: int
    stem: str
    state: str
    endpoint: str = ""


def find_processes(folder: Path) -> list[Process]:
    """The ranks of this host that left a sidecar in `folder`."""
    found = []
    for path in sorted(folder.glob("rank_*.sidecar.json")):
        try:
            value = json.loads(path.read_text())
            rank, pid, host = int(value["rank"]), int(value["pid"]), str(value["host"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if host == socket.gethostname():
            stem = path.name.removesuffix(".sidecar.json")
            state = _state(pid, folder / f"{stem}.box")
            found.append(Process(rank=rank, pid=pid, stem=stem, state=state, endpoint=str(value.get("endpoint", ""))))
    return found


def _state(pid: int, box: Path) -> str:
    """A process counts as the rank only while it has the rank's black box mapped: numbers of processes are used again."""
    try:
        if str(box.resolve()) not in Path(f"/proc/{pid}/maps").read_text():
            return "gone"
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "?")


def collect(folder: Path, *, wait_s: float = 5.0) -> list[Process]:
    """Have every live rank write a dump `demand`, add py-spy's stacks where it is installed, and note all states.

    Whose Python does not answer in time is asked by its worker server, which needs no GIL.
    """
    processes = find_processes(folder)
    if not processes:
        raise NotFoundError(f"{folder}: no sidecar (rank_*.sidecar.json) of a process on this host")
    asked_at = time.time()
    running = [process for process in processes if process.state != "gone" and not process.state.startswith(("T", "Z"))]
    for process in running:
        _ask(process.pid)
    give_up = time.monotonic() + wait_s
    while time.monotonic() < give_up and not all(_answered(folder, process, asked_at) for process in running):
        time.sleep(0.05)
    for process in running:
        if not _answered(folder, process, asked_at):
            _ask_server(folder, process)
        _spy(folder, process)
    states = [{"rank": process.rank, "state": process.state} for process in processes]
    (folder / "processes.json").write_text(json.dumps({"titan_ckpt": "exits", "processes": states}))
    return processes


def _ask(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return


def _answered(folder: Path, process: Process, asked_at: float) -> bool:
    answer = folder / f"{process.stem}.demand.pickle"
    return answer.exists() and answer.stat().st_mtime >= asked_at - 0.01


def _ask_server(folder: Path, process: Process) -> None:
    trace = fetch_trace(process.endpoint) if process.endpoint else None
    if trace is not None:
        (folder / f"{process.stem}.worker.json").write_bytes(trace)


def _spy(folder: Path, process: Process) -> None:
    program = shutil.which("py-spy")
    if program is None:
        return
    try:
        result = subprocess.run(
            [program, "dump", "--pid", str(process.pid)], capture_output=True, timeout=PYSPY_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return
    if result.returncode == 0:
        (folder / f"{process.stem}.pyspy.stacks").write_bytes(result.stdout)


def _files(folder: Path, logs: str | None) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".tmp-"):
            yield path.name, path.read_bytes()
    for name in sorted(glob.glob(logs or "", recursive=True)):
        with open(name, "rb") as log:
            log.seek(max(0, os.path.getsize(name) - TAIL_BYTES))
            yield os.path.basename(name), log.read()


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the recorder's folder on this host")
    parser.add_argument("--out", metavar="URL", help="also copy everything to this folder or object store")
    parser.add_argument("--logs", metavar="GLOB", help="log files whose ends are copied as well")
    parser.add_argument("--wait", type=float, default=5.0, metavar="S", help="how long to wait for dumps (default 5)")


def _run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise NotFoundError(f"{folder}: no such folder; give the one that the recorder writes to")
    processes = collect(folder, wait_s=arguments.wait)
    for process in processes:
        sys.stderr.write(f"rank {process.rank}: pid {process.pid}: {process.state}\n")
    target = str(folder)
    if arguments.out:
        store, target = open_store(arguments.out), arguments.out
        for name, content in _files(folder, arguments.logs):
            store.write(name, [content])
    sys.stdout.write(f"{redact(target)}\n")
    return 0


COLLECT = Command(configure=_configure, run=_run)
