"""Healthy jobs of many kinds, small and real: processes over gloo that know nothing of the analyzer but `Recorder.start`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from titan_ckpt.debug.record.environment import environment

_FRAME = """
import gc, logging, os, sys, threading, time, torch, torch.distributed as dist
from torch import nn
from titan_ckpt.debug import Recorder
folder, rank, world, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
form = "%(asctime)s %(levelname)s train: %(message)s"
logging.basicConfig(filename=f"{{folder}}/rank_{{rank}}.log", level=logging.INFO, format=form)
log = logging.getLogger()
Recorder.start(folder, rank=rank, world_size=world)
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=world)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
end = time.time() + seconds
def going():
    flag = torch.tensor([time.time() < end])
    dist.broadcast(flag, 0)
    return bool(flag)
def train(model, pause=0.02):
    model(torch.ones(2, 8)).sum().backward()
    time.sleep(pause)
step, threads = 0, []
{setup}
while going():
{step}
    log.info("step %d", step)
    step += 1
for thread in threads:
    thread.join()
log.info("done")
dist.destroy_process_group()
"""
_DDP = "model = nn.parallel.DistributedDataParallel(net)"
# A kind: what is done before the loop, and each step.
_KINDS: dict[str, tuple[str, str]] = {
    "ddp": (_DDP, "train(model)"),
    "fsdp2": ("from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(net)", "train(model)"),
    "noisy_log": (
        _DDP,
        "train(model)\ntry:\n    raise RuntimeError('Connection closed by peer: NCCL error, timed out')\n"
        "except RuntimeError:\n    log.exception('metrics server failed, ignored')",
    ),
    "caught_errors": (
        _DDP,
        "train(model)\nif rank == 1:\n    try:\n        {}['cache']\n    except KeyError:\n"
        "        log.exception('cache miss')\n    log.error('CUDA out of memory avoided, retrying')",
    ),
    "long_steps": (_DDP, "train(model, 2.0)"),
    "slow_save": (_DDP, "train(model)\nif step % 20 == 10:\n    time.sleep(2 * (rank == 0))\n    dist.barrier()"),
    "evaluation": (_DDP, "train(model)\nif step % 20 == 10 and rank == 0:\n    time.sleep(2)"),
    "compile_first": (_DDP, "time.sleep((3 + rank) * (step == 0))\ntrain(model)"),
    "data_stall": (_DDP, "time.sleep(2 * (rank == 1 and step % 30 == 15))\ntrain(model)"),
    "accumulation": (_DDP, "with model.no_sync():\n    train(model)\ntrain(model)"),
    "subgroups": (
        "groups = [dist.new_group([r]) for r in range(world)] + [dist.new_group(list(range(world)))]\nx = torch.ones(4)",
        "dist.all_reduce(x, group=groups[rank])\ndist.all_reduce(x, group=groups[-1])\ntime.sleep(0.02)",
    ),
    "pipeline": (
        "x = torch.ones(4)",
        "if rank:\n    dist.recv(x, rank - 1)\ntime.sleep(0.05)\nif rank + 1 < world:\n    dist.send(x, rank + 1)",
    ),
    "objects": ("", "found = [None] * world\ndist.all_gather_object(found, {'rank': rank})\ntime.sleep(0.05)"),
    "async_handles": (
        "x = torch.ones(4)",
        "works = [dist.all_reduce(x, async_op=True) for _ in range(3)]\ntime.sleep(0.05)\nfor work in works:\n    work.wait()",
    ),
    "gc": (_DDP, "train(model)\nif rank == 1 and step % 10 == 5:\n    gc.collect()\n    time.sleep(0.3)"),
    "barriers": ("", "for _ in range(10):\n    dist.barrier()\ntime.sleep(0.02)"),
    "second_thread": (
        _DDP + "\nother = dist.new_group()\ndef save():\n    flag = torch.ones(1)\n    while flag:\n"
        "        flag = torch.tensor([time.time() < end])\n        dist.broadcast(flag, 0, group=other)\n"
        "        time.sleep(0.1)\n"
        "threads.append(threading.Thread(target=save))\nthreads[0].start()",
        "train(model)",
    ),
    "monitored_barrier": (_DDP, "train(model)\ndist.monitored_barrier()"),
    "straggler": (_DDP, "time.sleep(0.2 * (rank == 1))\ntrain(model)"),
    "uneven_tensors": (
        "",
        "found = [torch.zeros(4) for _ in range(world)]\ndist.all_gather(found, torch.ones(4))\n"
        "dist.broadcast(torch.ones(4 + step), 0)\ntime.sleep(0.02)",
    ),
}
KINDS = tuple(_KINDS)


def program(kind: str) -> str:
    """The source of a job."""
    setup, step = _KINDS[kind]
    return _FRAME.format(setup=setup, step=textwrap.indent(step, "    "))


def start(kind: str, folder: Path, *, world: int, seconds: float) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a healthy job that trains for about `seconds`. The caller waits for them or ends them."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **environment(200), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program(kind), str(folder), str(rank), str(world), str(seconds)],
            env=variables, stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]  # fmt: skip
