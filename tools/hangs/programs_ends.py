"""Ranks that die, end early, never begin; and what launchers and people do to jobs."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tools.hangs.incident import DIED, FROZEN, NO_FAULT, SKIPPED, STUCK, incident
from tools.hangs.parts import FOREVER_S, batches, ddp, fsdp, layers, log, reduce_steps, train_step, warm_up

OPEN = frozenset({"INSUFFICIENT_DATA"})


@incident(3, {1}, DIED | SKIPPED | frozenset({"TEARDOWN_STUCK"}))
def exit_code_in_atexit(rank: int) -> None:
    """A rank ends early, and a handler at exit sets another exit code."""
    reduce_steps()
    if rank == 1:
        atexit.register(os._exit, 3)
        sys.exit(0)  # CULPRIT
    reduce_steps()


@incident(3, {1}, DIED)
def exception_in_a_backward_hook(rank: int) -> None:
    """A gradient hook raises on one rank."""
    model = ddp()
    warm_up(model)

    def check(_gradient: torch.Tensor) -> None:
        if rank == 1:
            raise FloatingPointError("gradient is inf")  # CULPRIT

    for parameter in model.parameters():
        parameter.register_hook(check)  # type: ignore[no-untyped-call]
    warm_up(model)


@incident(3, {2}, DIED)
def killed_by_the_kernel(rank: int) -> None:
    """SIGKILL from outside, as the out-of-memory killer sends it."""
    model = fsdp()
    warm_up(model)
    if rank == 2:
        subprocess.run(["/bin/kill", "-9", str(os.getpid())], check=False)
    warm_up(model)


class _Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 17:
            raise OSError(5, "Input/output error: shard 17")  # CULPRIT
        return torch.ones(16)


@incident(2, {1}, DIED)
def exception_in_a_loader_worker(rank: int) -> None:
    """A sample cannot be read in a worker process of one rank."""
    model = ddp()
    for batch in DataLoader(_Samples(rank), batch_size=4, num_workers=1):  # CULPRIT
        train_step(model, batch)


@incident(3, {2}, DIED | SKIPPED)
def sys_exit_with_a_code(rank: int) -> None:
    """A check of the data ends the rank with exit code 2 and no traceback."""
    reduce_steps()
    if rank == 2:
        log.error("tokenizer does not match the data")
        sys.exit(2)  # CULPRIT
    reduce_steps()


@incident(3, {1}, DIED)
def interrupted_alone(rank: int) -> None:
    """SIGINT to one rank."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)  # CULPRIT
        time.sleep(0.1)  # CULPRIT
    warm_up(model)


@incident(3, {0, 1, 2}, DIED, any_of=True)
def same_exception_everywhere(_: int) -> None:
    """A wrong configuration: all ranks raise at the same line."""
    reduce_steps()
    torch.ones(4, 5) @ torch.ones(4, 5)  # CULPRIT


@incident(3, {1}, DIED | FROZEN | SKIPPED)
def connections_closed(rank: int) -> None:
    """A library closes all file descriptors of a rank, and so its connections."""
    reduce_steps()
    if rank == 1:
        time.sleep(0.5)
        for descriptor in range(3, 256):
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    socket.socket(fileno=descriptor).shutdown(socket.SHUT_RDWR)  # CULPRIT
            except OSError:
                continue
    reduce_steps()


@incident(3, {2}, SKIPPED | DIED | STUCK | frozenset({"TEARDOWN_STUCK"}))
def destroyed_by_one(rank: int) -> None:
    """A rank destroys its process group and goes on to upload, while the others train."""
    reduce_steps()
    if rank == 2:
        dist.destroy_process_group()  # CULPRIT
        time.sleep(FOREVER_S)  # CULPRIT
    reduce_steps()


@incident(3, set(), OPEN | frozenset({"PG_INIT_HANG"}), joins=False)
def one_rank_too_few(_: int) -> None:
    """Three ranks, each told that there are four."""
    os.environ["WORLD_SIZE"] = "4"
    dist.init_process_group("gloo", timeout=timedelta(seconds=25))


@incident(3, set(), OPEN | frozenset({"PG_INIT_HANG"}), joins=False)
def port_taken(rank: int) -> None:
    """Another program listens where the store should be: under torchrun, all ranks connect to it."""
    port = 29_473
    if rank == 0:
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
    options = {"rank": rank, "world_size": 3, "timeout": timedelta(seconds=20)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)  # type: ignore[arg-type]  # CULPRIT


@incident(3, {2}, DIED | frozenset({"PG_INIT_HANG"}), joins=False)
def import_error_before_joining(rank: int) -> None:
    """A rank's environment lacks a package."""
    if rank == 2:
        __import__("flash_attention_that_is_not_there")  # CULPRIT
    dist.init_process_group("gloo", timeout=timedelta(seconds=25))


@incident(2, {0}, STUCK, restarts=1)
def hang_after_a_restart(rank: int) -> None:
    """The first attempt dies of rank 1, the second one hangs because of rank 0."""
    model = ddp()
    warm_up(model)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        if rank == 1:
            raise RuntimeError("node lost its disk")
    elif rank == 0:
        time.sleep(FOREVER_S)  # CULPRIT
    warm_up(model)


@incident(3, {1}, DIED, restarts=1)
def dies_in_each_attempt(rank: int) -> None:
    """The same rank raises in each attempt."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        raise KeyError("layers.3.weight")  # CULPRIT
    warm_up(model)


@incident(3, set(), NO_FAULT | OPEN, end="SIGTERM")
def scheduler_ends_a_healthy_job(rank: int) -> None:
    """The time limit: SIGTERM to the launcher of a job that runs."""
    _run_for(rank, 60.0)


@incident(2, set(), NO_FAULT | OPEN, end="SIGINT")
def person_ends_a_healthy_job(rank: int) -> None:
    """Ctrl-C."""
    _run_for(rank, 60.0)


def _run_for(rank: int, seconds: float) -> None:
    model, until = ddp(), time.monotonic() + seconds
    flag = torch.zeros(1)
    while flag.item() == 0:
        for batch in batches(10):
            train_step(model, batch)
        time.sleep(0.02)
        flag = torch.tensor([float(rank == 0 and time.monotonic() > until)])
        dist.all_reduce(flag)


@incident(2, {1}, SKIPPED | DIED)
def joined_and_left(rank: int) -> None:
    """A rank finds no work for itself and returns."""
    reduce_steps()
    if rank == 1:
        return
    layers()
    reduce_steps()
