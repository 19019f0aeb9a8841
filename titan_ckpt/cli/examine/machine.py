"""This machine: Python, packages, memory, disk, limits, names and permissions that training and debugging depend on."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from titan_ckpt.cli.examine.finding import Finding
from titan_ckpt.console.units import format_size
from titan_ckpt.version import __version__

PACKAGES = (
    "numpy",
    "fsspec",
    "botocore",
    "s3fs",
    "obstore",
    "torch",
    "torchao",
    "tokenizers",
    "transformers",
    "textual",
)
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY, LITTLE_SHM, LITTLE_DISK = 2 << 30, 1 << 30, 5 << 30
FEW_FILES = 4096
SHM = "/dev/shm"
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def examine() -> Iterator[Finding]:
    """Findings about this machine; reads only."""
    yield _python()
    yield _packages()
    yield _memory()
    yield _space(
        "disk", os.getcwd(), LITTLE_DISK, "checkpoints, token caches and logs go here unless a URL says otherwise"
    )
    if os.path.isdir(SHM):
        yield _space("shared memory", SHM, LITTLE_SHM, "NCCL and data loader workers need it; docker run --shm-size=8g")
    yield _open_files()
    yield _host_name()
    yield from _interfaces()
    yield _stacks()


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, titan-ckpt {__version__}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("fail", "Python", found, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return Finding("ok", "Python", found)


def _packages() -> Finding:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return Finding("ok", "packages", ", ".join(found))


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit = _text(CGROUP_LIMIT).strip()
    found = f"{format_size(free)} available"
    if limit.isdigit():
        found += f", at most {format_size(int(limit))} for this container"
        free = min(free, int(limit))
    if free < LITTLE_MEMORY:
        return Finding(
            "warn",
            "memory",
            found,
            "saving stages a copy of this rank's state in host memory; free some, or use more ranks",
        )
    return Finding("ok", "memory", found)


def _space(subject: str, folder: str, least: int, why: str) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{format_size(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("warn", subject, f"{folder} is not writable", why)
    return Finding("warn", subject, found, why) if free < least else Finding("ok", subject, found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} per process"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
        return Finding("warn", "open files", found, f"many ranks and uploads need more: ulimit -n {limit}")
    return Finding("ok", "open files", found)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(
            "fail", "host name", f"{name}: {error.strerror or error}",
            "gloo binds to the address of the host name: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )  # fmt: skip
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    limit = "; ranks on other nodes cannot reach that: set GLOO_SOCKET_IFNAME there" if is_loopback else ""
    return Finding("ok", "host name", f"{name} is {', '.join(addresses)}{limit}")


def _interfaces() -> Iterator[Finding]:
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        if wanted is None:
            continue
        names = [name.partition(":")[0] for name in wanted.lstrip("^=").split(",")]
        is_there = wanted.startswith("^") or any(other.startswith(name) for name in names for other in known)
        found = f"{wanted}; this machine has {', '.join(known)}"
        yield (
            Finding("ok", variable, found)
            if is_there
            else Finding("fail", variable, found, f"unset {variable}, or name an interface that is there")
        )


def _stacks() -> Finding:
    """Whether `debug collect --pid` and py-spy may read a process that is not their child (kernel.yama.ptrace_scope)."""
    scope = _text(PTRACE_SCOPE).strip()
    if scope in ("", "0") or os.geteuid() == 0:
        return Finding("ok", "stacks of others", "may be read")
    return Finding(
        "warn", "stacks of others", f"ptrace_scope is {scope}: py-spy sees only its own children",
        "record the stacks in the job (titan_ckpt.debug.Recorder), or run `debug collect --pid` as root",
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
