"""`debug collect`: ask the live ranks on this host for fresh dumps, look at the dead ones, and gather all in one place."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_ckpt.arguments import check_number
from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.output import write_note, write_text
from titan_ckpt.debug.live.attach import Attached, attach, find_training, look_again
from titan_ckpt.debug.live.processes import STATES, Process, find_processes, process_state
from titan_ckpt.debug.live.publish import publish, publish_files
from titan_ckpt.debug.record.demand import Demand, demand
from titan_ckpt.debug.record.worker_endpoint import fetch_trace
from titan_ckpt.errors import NotFoundError, TitanError, UsageError
from titan_ckpt.location import redact
from titan_ckpt.private_files import PrivateFolder
from titan_ckpt.store.open import open_store

PYSPY_TIMEOUT_S = 15
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]")


def collect(folder: Path, *, wait_s: float = 5.0) -> list[Process]:
    """Have every live rank write a dump `demand`, add py-spy's stacks where it is installed, and note all states.

    Ranks are asked through their sockets; no process is ever signalled. A rank whose Python does not answer in time is asked
    through its worker server, which needs no GIL.
    """
    found = find_processes(folder)
    if not found:
        raise NotFoundError(f"{folder}: no sidecar (rank_*.sidecar.json) of a process on this host")
    files = PrivateFolder(folder)
    demands = {process.stem: demand(process.ask) for process in found if process.ask}
    processes = [_as_kernel_says(process, demands.get(process.stem)) for process in found]
    give_up = time.monotonic() + wait_s
    for process in processes:
        asked = demands.get(process.stem)
        has_dump = asked is not None and asked.is_answered(
            process.rank, give_up - time.monotonic() if process.is_running else 0.0
        )
        if process.is_running:
            if not has_dump:
                _ask_server(files, process)
            _spy(files, process)
    states = [{"rank": process.rank, "pid": process.pid, "state": process.state} for process in processes]
    content = json.dumps({"titan_ckpt": "exits", "processes": states})
    files.write(f"{STATES}.{_NOT_IN_NAMES.sub('_', socket.gethostname())}.json", content.encode())
    return processes


def _as_kernel_says(process: Process, asked: Demand | None) -> Process:
    """The process that listens on the rank's socket, where one does, instead of the one that its sidecar names."""
    if asked is None or not asked.peer.pid:
        return process
    return replace(process, pid=asked.peer.pid, state=process_state(asked.peer.pid))


def _ask_server(files: PrivateFolder, process: Process) -> None:
    trace = fetch_trace(process.endpoint) if process.endpoint else None
    if trace is not None:
        files.write(f"{process.stem}.worker.json", trace)


def _spy(files: PrivateFolder, process: Process) -> None:
    """Stacks by py-spy, which reads the process's memory without stopping it: killed while it holds a process by ptrace, it
    would leave it stopped."""
    program = shutil.which("py-spy")
    if program is None:
        return
    command = [program, "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=PYSPY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return
    if result.returncode == 0:
        files.write(f"{process.stem}.pyspy.stacks", result.stdout)


_EPILOG = """\
examples:
  titan-ckpt debug collect --out ./hang              every training process of yours on this host
  titan-ckpt debug collect --pid 4711 --out ./hang   a process that knows nothing of titan-ckpt
  titan-ckpt debug collect /tmp/recorder --out s3://bucket/hang --logs 'logs/*/*.log'
"""


def _configure(parser: Parser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="the recorder's folder on this host; without it, and "
                        "without --pid, the training processes of this user that are found by RANK and libtorch")  # fmt: skip
    parser.add_argument("--pid", metavar="PID", nargs="+", type=int, action="extend", default=[],
                        help="look at these processes, which need not know of us, by py-spy and /proc")  # fmt: skip
    parser.add_argument("--out", metavar="URL", help="also copy everything to this folder or object store; without FOLDER "
                        "needed")  # fmt: skip
    parser.add_argument("--logs", metavar="GLOB", help="log files whose ends are copied as well, to logs/ of --out")
    parser.add_argument("--wait", type=float, default=5.0, metavar="S", help="how long to wait for dumps, and "
                        "before the second look at processes without a recorder (default 5)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace files that are at --out already")
    for option in ("--logs", "--force"):
        parser.needs(option, "--out")


def _run(arguments: argparse.Namespace) -> int:
    check_number(arguments.wait, "--wait", at_least=0)
    if arguments.folder is None or arguments.pid:
        return _attach(arguments)
    folder = Path(arguments.folder)
    if not folder.is_dir():
        what = "it is a file" if folder.is_file() else "there is no such folder"
        raise NotFoundError(f"{folder}: {what}; give the folder that the recorder writes to")
    if arguments.logs and not arguments.out:
        raise UsageError("--logs copies log files to --out; give both")
    for process in collect(folder, wait_s=arguments.wait):
        write_note(f"rank {process.rank}: pid {process.pid}: {process.state}")
    target = str(folder)
    if arguments.out:
        target = arguments.out
        for note in publish(folder, arguments.logs, open_store(target), is_forced=arguments.force):
            write_note(f"left out: {note}")
    write_text(redact(target))
    return 0


def _attach(arguments: argparse.Namespace) -> int:
    """Look at processes without a recorder, and write what was seen to --out."""
    if arguments.folder is not None or arguments.logs:
        raise UsageError("--pid is for jobs without our recorder: give --out, but neither FOLDER nor --logs")
    if not arguments.out:
        raise UsageError(
            "give the recorder's FOLDER, or --out URL to write to what is seen of processes without a recorder"
        )
    pids = list(dict.fromkeys(arguments.pid)) or find_training()
    if not pids:
        raise NotFoundError(
            f"no process of this user on {socket.gethostname()} has RANK in its environment and libtorch in its memory; "
            "give --pid PID..."
        )
    store = open_store(arguments.out)
    found, lost = _attached(pids)
    files = {name: data for one in found for name, data in one.files.items()}
    if any(not one.note for one in found) and arguments.wait:
        write_note(f"looking again in {arguments.wait:.0f} s: one look does not show that a job stands still")
        time.sleep(arguments.wait)
        files |= {name: data for one in found for name, data in look_again(one).items()}
    publish_files(files, store, is_forced=arguments.force)
    for one in found:
        rank = "of unknown rank" if one.rank is None else f"rank {one.rank}"
        write_note(f"{rank}: pid {one.pid}: {one.state}{f'; {one.note}' if one.note else ''}")
    for error in lost:
        write_note(f"left out: {error}")
    write_text(redact(arguments.out))
    return 0


def _attached(pids: Sequence[int]) -> tuple[list[Attached], list[TitanError]]:
    """What was seen of each process, and why others could not be looked at; the first error if that is all of them."""
    found: list[Attached] = []
    lost: list[TitanError] = []
    for pid in pids:
        try:
            found.append(attach(pid))
        except (NotFoundError, UsageError) as error:
            lost.append(error)
    if lost and not found:
        raise lost[0]
    return found, lost


COLLECT = Command(configure=_configure, run=_run)
