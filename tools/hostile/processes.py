"""`debug collect` against process tables: whatever lies in the folder, no process ends, stops or is signalled.

Real processes of every kind: without a recorder, with one that runs, was stopped, was started off the main thread or lost its
signal handler, a program that replaced the one that recorded, a number that was used again, a forked child, a process that
ignores or dies of every signal, one that is stopped, and sockets of other programs. Sidecars name them rightly and wrongly.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.debug.live.collect import collect
from titan_ckpt.errors import TitanError
from tools.hostile.outcome import Outcome

_TELL = "print('ready', flush=True)\nwhile True: time.sleep(60)\n"
_RECORD = (
    "import os, signal, sys, threading, time\nfrom titan_ckpt.debug.record.recorder import Recorder\n"
    "start = lambda: Recorder.start(sys.argv[1], rank=0, world_size=1, stall_s=0)\n"
)
_MAP = (
    "import mmap, os, sys, time\nfile = open(sys.argv[1] + '/rank_00000.box', 'w+b')\nfile.truncate(4096)\n"
    "held = mmap.mmap(file.fileno(), 4096)\n"
)
# Kind -> program; its argument is a folder, in which some write a sidecar of their own.
CHEAP = {
    "no recorder": f"import time\n{_TELL}",
    "has the box mapped": _MAP + _TELL,
    "exec after mapping": _MAP
    + f"os.execv(sys.executable, [sys.executable, '-c', {f'import time{chr(10)}{_TELL}'!r}])",
    "ignores signals": f"import signal, time\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n{_TELL}",
    "ends at a signal": f"import os, signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: os._exit(9))\n{_TELL}",
    "stopped": f"import time\n{_TELL}",
}
REAL = {
    "recorder": _RECORD + "held = start()\n" + _TELL,
    "recorder stopped": _RECORD + "start().stop()\n" + _TELL,
    "recorder off the main thread": _RECORD
    + "thread = threading.Thread(target=lambda: globals().update(held=start()))\nthread.start(); thread.join()\n"
    + _TELL,
    "handler replaced": _RECORD + "held = start()\nsignal.signal(signal.SIGUSR2, signal.SIG_DFL)\n" + _TELL,
    "forked child": _RECORD
    + "held = start()\nhere, there = os.pipe()\nif os.fork() == 0:\n    os.close(there); os.read(here, 1); os._exit(0)\n"
    + _TELL,
}
_NOT_OURS = (
    "a socket that never answers",
    "a socket that answers nonsense",
    "no socket",
    "no such socket",
    "not a path",
)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A process of some kind and the folder that it was given."""

    kind: str
    folder: Path
    process: subprocess.Popen[bytes]


def run_processes(seed: int, seconds: float) -> Outcome:
    """Collect from folders with all kinds of sidecars, round after round; every process must live on as it was."""
    outcome, rng = Outcome(part="processes"), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch, _jobs(Path(scratch)) as jobs:
        until = time.monotonic() + seconds
        while not outcome.cases or time.monotonic() < until:
            _round(rng.choice(jobs), jobs, Path(scratch), rng, outcome)
            for job in jobs:
                if not _is_as_it_was(job):
                    outcome.failures.append(f"{job.kind}: ended or changed with {job.process.poll()}")
            if outcome.failures:
                break
    return outcome


def _round(job: _Job, jobs: list[_Job], scratch: Path, rng: random.Random, outcome: Outcome) -> None:
    """One collection from the job's own folder, and one from a folder whose sidecars lie about it."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    other = rng.choice(jobs)
    with _socket(rng.choice(_NOT_OURS), folder) as ask:
        value = {"rank": 0, "world_size": 1, "host": socket.gethostname(), "pid": job.process.pid, "ask": ask}
        value["endpoint"] = ask if rng.random() < 0.05 else ""  # a socket that never answers takes five seconds
        (folder / "rank_00000.sidecar.json").write_text(json.dumps(value))
        box = other.folder / "rank_00000.box"
        choice = rng.choice(("none", "link", "copy", "hard link"))
        if choice == "link":
            (folder / "rank_00000.box").symlink_to(rng.choice((box, Path(sys.executable).resolve())))
        elif choice != "none" and box.exists():
            (shutil.copy if choice == "copy" else os.link)(box, folder / "rank_00000.box")
        for place in (folder, job.folder):
            if not list(place.glob("*.sidecar.json")):
                continue
            outcome.cases += 1
            try:
                states = collect(place, wait_s=0.05)
            except TitanError:
                outcome.counts["refused"] += 1
                continue
            outcome.counts[f"{job.kind}: {'gone' if states[0].state == 'gone' else 'seen'}"] += 1
    shutil.rmtree(folder)


@contextmanager
def _jobs(scratch: Path) -> Iterator[list[_Job]]:
    jobs: list[_Job] = []
    try:
        for number, (kind, program) in enumerate({**CHEAP, **REAL}.items()):
            folder = scratch / f"job{number}"
            folder.mkdir()
            command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
            jobs.append(_Job(kind=kind, folder=folder, process=subprocess.Popen(command, stdout=subprocess.PIPE)))
        for job in jobs:
            assert job.process.stdout is not None
            if job.process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{job.kind} did not start")
            if job.kind == "stopped":
                job.process.send_signal(signal.SIGSTOP)
        yield jobs
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
            assert job.process.stdout is not None
            job.process.stdout.close()


def _is_as_it_was(job: _Job) -> bool:
    if job.process.poll() is not None:
        return False
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    state = next(line.split()[1] for line in status.splitlines() if line.startswith("State:"))
    return (state == "T") == (job.kind == "stopped")


@contextmanager
def _socket(kind: str, folder: Path) -> Iterator[str]:
    path = str(folder / "s")
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_DGRAM if kind.endswith("nonsense") else socket.SOCK_STREAM
    ) as listener:
        if kind.startswith("a socket"):
            listener.bind(path)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        yield "" if kind == "no socket" else "a\0b" if kind == "not a path" else path
