"""Ranks that wait for something outside of the job, or do not run."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tools.hangs.incident import FROZEN, STUCK, incident
from tools.hangs.parts import FOREVER_S, batches, ddp, fsdp, log, reduce_steps, train_step, warm_up

_LOCK = threading.Lock()


class _Samples(Dataset[torch.Tensor]):
    """Samples whose loading takes a lock, as tokenizers and loggers do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        with _LOCK:
            return torch.ones(16) * index


def _hold(held: threading.Event) -> None:
    with _LOCK:
        held.set()
        time.sleep(FOREVER_S)


@incident(2, {1}, STUCK)
def worker_forked_with_a_lock(rank: int) -> None:
    """The loader's worker inherits a lock that a thread of its parent holds."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        held = threading.Event()
        threading.Thread(target=_hold, args=(held,), daemon=True).start()
        held.wait()
    loader = DataLoader(_Samples(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    for batch in loader:  # CULPRIT
        train_step(model, batch)


@incident(3, {2}, STUCK)
def open_of_a_dead_mount(rank: int) -> None:
    """Opening a file never returns, as on a mount whose server is gone."""
    model = ddp()
    warm_up(model)
    path = tempfile.mkdtemp() + "/shard-00017.bin"
    os.mkfifo(path)
    if rank == 2:
        with open(path, "rb") as file:  # CULPRIT
            log.info("%d bytes", len(file.read()))
    warm_up(model)


@incident(3, {2}, FROZEN)
def stopped_inside_a_collective(rank: int) -> None:
    """A debugger stops a rank while it waits in all_reduce."""
    reduce_steps()
    if rank == 2:
        subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(1.5); os.kill({os.getpid()}, {signal.SIGSTOP})"]
        )
    if rank == 0:
        time.sleep(3.5)  # late, and no more: by then the other one is stopped
    reduce_steps(6)


@incident(3, {1}, STUCK)
def producer_died_queue_full(rank: int) -> None:
    """The thread that empties the queue of log records died, and the main thread puts one more."""
    model = ddp()
    warm_up(model)
    records: queue.Queue[str] = queue.Queue(maxsize=2)

    def drain() -> None:
        records.get()
        raise ConnectionError("tracker: 502 Bad Gateway")

    if rank == 1:
        threading.Thread(target=drain, daemon=True).start()
    for step, batch in enumerate(batches(8)):
        loss = train_step(model, batch)
        if rank == 1:
            records.put(f"step {step} loss {loss}")  # CULPRIT


@incident(2, {0}, STUCK)
def log_into_a_full_pipe(rank: int) -> None:
    """A handler writes to a pipe that nobody reads any more."""
    model = fsdp()
    warm_up(model)
    reader, writer = os.pipe()
    handler = logging.StreamHandler(os.fdopen(writer, "w"))
    for _ in range(200):
        if rank == 0:
            handler.emit(logging.LogRecord("train", 20, "x", 1, "y" * 1000, (), None))  # CULPRIT
    os.close(reader)
    warm_up(model)


@incident(3, {2}, STUCK)
def late_for_monitored_barrier(rank: int) -> None:
    """One rank does not come to monitored_barrier in time."""
    reduce_steps()
    if rank == 2:
        time.sleep(FOREVER_S)  # CULPRIT
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


@incident(2, {1}, STUCK)
def two_locks_in_two_orders(rank: int) -> None:
    """The main thread and a checkpoint thread take two locks in opposite orders."""
    reduce_steps()
    model_lock, disk_lock, taken = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def save() -> None:
        with disk_lock:
            taken.wait()
            with model_lock:
                log.info("saved")

    if rank == 1:
        threading.Thread(target=save, daemon=True).start()
        with model_lock:
            taken.wait()
            with disk_lock:  # CULPRIT
                log.info("updated")
    reduce_steps()


@incident(3, {0}, STUCK)
def evaluation_that_never_ends(rank: int) -> None:
    """Rank 0 evaluates by generating until an end token that never comes."""
    model = ddp()
    warm_up(model)
    if rank == 0:
        tokens = [1]
        while tokens[-1] != 0:
            tokens = [*tokens[-64:], int(model.module(torch.ones(1, 16)).item() > -1e9)]  # CULPRIT
    dist.barrier()


@incident(3, {1}, STUCK)
def retries_without_end(rank: int) -> None:
    """A download that is tried again for ever."""
    model = ddp()
    warm_up(model)
    while rank == 1:
        try:
            open("/nonexistent/shard-00001.bin", "rb").close()
            break
        except OSError:
            time.sleep(0.5)  # CULPRIT
    warm_up(model)


@incident(3, {1}, STUCK)
def child_process_waits(rank: int) -> None:
    """`multiprocessing.Pool` whose worker was killed: the pool waits for its answer for ever."""
    import multiprocessing

    reduce_steps()
    if rank == 1:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            answer = pool.apply_async(_end_me)
            answer.get()  # CULPRIT
    reduce_steps()


def _end_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
