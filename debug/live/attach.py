"""Look at running processes that know nothing of us: who they are by their environment, their stacks, what the kernel says.

Nothing is signalled, stopped or written to: `/proc` (proc(5)) is read, and py-spy, where it is installed, reads the process's
memory without stopping it. Only processes of this user are looked at (root: of any), and of their environment only the variables
named in RANKS, SIZES and PLACES.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_ckpt.debug.live.processes import GONE, process_state
from titan_ckpt.errors import NotFoundError, UsageError
from titan_ckpt.location import redact_text

PYSPY_TIMEOUT_S = 15
MAX_BYTES = 1 << 22
MAX_THREADS = 256
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PLACES = ("LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_STACKS, _PROCESS = ".pyspy.stacks", ".process.json"
_TORCH = b"libtorch"
_MAY_READ = (
    ". Run this as root, and in a container with the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; Kubernetes: "
    "securityContext.capabilities.add)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A process that was looked at. `files`: what to keep, by name; `note`: why there are no Python stacks ("" if there are);
    `sleeps`: how often its main thread had gone to sleep until then; `document`: what its `.process.json` holds."""

    pid: int
    rank: int | None
    state: str
    files: Mapping[str, bytes]
    note: str = ""
    sleeps: int = 0
    document: Mapping[str, object] = field(default_factory=dict)


def find_training(proc: Path = Path("/proc")) -> list[int]:
    """Processes of this user that have a rank in their environment and torch in their memory; not their helpers, which share
    the environment: of a parent and its child only the parent."""
    found = [int(path.name) for path in proc.iterdir() if path.name.isdigit() and _is_training(path)]
    return sorted(pid for pid in found if _parent(proc, pid) not in found)


def attach(pid: int, proc: Path = Path("/proc")) -> Attached:
    """Look at one process. NotFoundError if there is none, UsageError if it is another user's."""
    folder = proc / str(pid)
    try:
        owner = folder.stat().st_uid
    except OSError as error:
        raise NotFoundError(f"no process {pid} on {socket.gethostname()}") from error
    if owner != os.geteuid() and os.geteuid() != 0:
        raise UsageError(f"process {pid} belongs to user {owner}; run this as that user (or as root)")
    values = _environment(folder)
    rank, size = _first_number(values, RANKS), _first_number(values, SIZES)
    state = process_state(pid) if proc == Path("/proc") else _field(_read(folder / "status"), "State")
    document = {
        "titan_ckpt": "process", "host": socket.gethostname(), "pid": pid, "state": state or GONE, "rank": rank,
        "world_size": size or 0, "environment": {name: values[name] for name in PLACES if name in values},
        "threads": list(_threads(folder)),
    }  # fmt: skip
    stem = f"rank_{rank:05d}.pid_{pid}" if rank is not None else f"pid_{pid}"
    stacks, note = _python_stacks(pid)
    files = {f"{stem}{_PROCESS}": json.dumps(document).encode()}
    if stacks:
        files[f"{stem}{_STACKS}"] = stacks
    return Attached(
        pid=pid, rank=rank, state=state or GONE, files=files, note=note, sleeps=_sleeps(folder), document=document
    )


def look_again(seen: Attached, proc: Path = Path("/proc")) -> dict[str, bytes]:
    """The Python stacks of a process that was looked at, once more, and how often its main thread has slept since
    (voluntary_ctxt_switches, proc_pid_status(5)): one that waits for what does not come sleeps once. {} without stacks, or if the
    process is gone."""
    stacks, sleeps = _python_stacks(seen.pid)[0] if not seen.note else b"", _sleeps(proc / str(seen.pid))
    if not stacks or not sleeps:
        return {}
    name = next(name for name in seen.files if name.endswith(_PROCESS))
    document = {**seen.document, "slept_since": sleeps - seen.sleeps}
    return {name: json.dumps(document).encode(), f"{name.removesuffix(_PROCESS)}.again{_STACKS}": stacks}


def _sleeps(folder: Path) -> int:
    """How often the main thread of a process gave the processor away; 0 if it is gone."""
    count = _field(_read(folder / "task" / folder.name / "status"), "voluntary_ctxt_switches")
    return int(count) if count.isdigit() else 0


def _is_training(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.geteuid():
            return False
    except OSError:
        return False
    return _first_number(_environment(folder), RANKS) is not None and _TORCH in _read(folder / "maps")


def _parent(proc: Path, pid: int) -> int:
    parent = _field(_read(proc / str(pid) / "status"), "PPid")
    return int(parent) if parent.isdigit() else 0


def _environment(folder: Path) -> dict[str, str]:
    """The variables that say who a process is, as it was started with them; no other variable is kept."""
    wanted = {*RANKS, *SIZES, *PLACES}
    pairs = (part.partition(b"=") for part in _read(folder / "environ").split(b"\0"))
    found = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace")[:200] for name, _, value in pairs}
    return {name: value for name, value in found.items() if name in wanted}


def _first_number(values: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(values[name]) for name in names if values.get(name, "").isdigit()), None)


def _threads(folder: Path) -> Iterator[dict[str, str | int]]:
    """Each thread's name, state and the kernel function that it waits in; its kernel stack where root may read it."""
    try:
        tasks = sorted((folder / "task").iterdir(), key=lambda path: int(path.name))[:MAX_THREADS]
    except (OSError, ValueError):
        return
    for task in tasks:
        status = _read(task / "status")
        waits = _read(task / "wchan").decode("utf-8", "replace")
        stack = _read(task / "stack").decode("utf-8", "replace")[:2000]
        yield {
            "tid": int(task.name), "name": _field(status, "Name"), "state": _field(status, "State"),
            "waits_in": "" if waits == "0" else waits[:200], "kernel_stack": stack,
        }  # fmt: skip


def _field(status: bytes, name: str) -> str:
    lines = status.decode("utf-8", "replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _read(path: Path) -> bytes:
    """A file of `/proc`; empty if the process is gone or the kernel refuses."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""


def _python_stacks(pid: int) -> tuple[bytes, str]:
    """py-spy's dump, or why there is none."""
    program = shutil.which("py-spy")
    if program is None:
        return b"", "py-spy is not installed (`pip install py-spy`): no Python stacks"
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=PYSPY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return b"", f"py-spy took more than {PYSPY_TIMEOUT_S} s: no Python stacks"
    if result.returncode != 0:
        text = result.stderr.decode("utf-8", "replace").strip()
        reason = text.splitlines()[-1][:200] if text else "failed"
        return b"", f"py-spy: {reason}: no Python stacks{_MAY_READ if 'ermission' in text or 'EPERM' in text else ''}"
    return redact_text(result.stdout.decode("utf-8", "replace")).encode(), ""
