"""torch as it runs here, asked in processes of their own: a broken driver or network hangs or crashes them, not this command."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from titan_ckpt.cli.examine.finding import Finding
from titan_ckpt.console.units import format_size

IMPORT_S, GLOO_S = 120.0, 60.0
OLDEST = (2, 11)

FACTS = """
import json, torch, torch.distributed as dist
there = torch.cuda.is_available()
numbers = range(torch.cuda.device_count() if there else 0)
devices = [(p.name, p.total_memory) for p in map(torch.cuda.get_device_properties, numbers)]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": devices,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there and dist.is_nccl_available() else "",
    "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""

ALL_REDUCE = """
import datetime, sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=30))
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.destroy_process_group()
"""


def examine() -> Iterator[Finding]:
    """Findings about torch, its devices, NCCL and gloo; one line if torch is not installed."""
    if find_spec("torch") is None:
        yield Finding("ok", "torch", "not installed; only `train`, saving and loading need it")
        return
    facts, problem = _facts()
    if facts is None:
        yield Finding("fail", "torch", problem, "mend the installation: python -c 'import torch' must work")
        return
    yield _version(facts)
    yield _devices(facts)
    if facts["gloo"]:
        yield _gloo()
    else:
        yield Finding("fail", "gloo", "this build of torch lacks it", "install a build with distributed support")


def _facts() -> tuple[dict[str, Any] | None, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", FACTS], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"importing it, or asking the driver, took more than {IMPORT_S:.0f} s"
    if done.returncode:
        return None, _last_line(done.stderr) or f"its import ended with code {done.returncode}"
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts, ""


def _version(facts: dict[str, Any]) -> Finding:
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    found = f"{facts['version']}, {built}"
    if tuple(int(part) for part in facts["version"].split(".")[:2]) < OLDEST:
        return Finding("fail", "torch", found, f"titan-ckpt needs torch {'.'.join(map(str, OLDEST))} or newer")
    return Finding("ok", "torch", found)


def _devices(facts: dict[str, Any]) -> Finding:
    if not facts["devices"]:
        built = facts["cuda"] or facts["hip"]
        if built:
            return Finding(
                "warn", "devices", "no GPU that torch can use", "check nvidia-smi, the driver, CUDA_VISIBLE_DEVICES"
            )
        return Finding("ok", "devices", "none, as this torch is built for CPUs; ranks talk by gloo")
    names = [f"{name} ({format_size(size)})" for name, size in facts["devices"]]
    nccl = f"; NCCL {facts['nccl']}" if facts["nccl"] else ""
    return Finding("ok", "devices", f"{len(names)}: {', '.join(sorted(set(names)))}{nccl}")


def _gloo() -> Finding:
    """A real all_reduce of two processes over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ALL_REDUCE, str(rank), port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    problem = _outcome(ranks)
    if not problem:
        return Finding("ok", "gloo", "two processes reduced a tensor over loopback")
    mend = "check GLOO_SOCKET_IFNAME, the host name's address and a firewall on loopback"
    return Finding("fail", "gloo", problem, mend)


def _outcome(ranks: Sequence[subprocess.Popen[str]]) -> str:
    """Why the ranks failed; "" if they did not. Ends those that are left."""
    try:
        errors = [rank.communicate(timeout=GLOO_S)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"two processes did not meet within {GLOO_S:.0f} s"
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.wait()
    ended = zip(ranks, errors, strict=True)
    failed = [_last_line(error) or f"code {rank.returncode}" for rank, error in ended if rank.returncode]
    return failed[0] if failed else ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
