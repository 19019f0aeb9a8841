"""Ranks that crash, leave or never join, as programs without our recorder log it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tools.hangs.incident import DIED, GROUP, SKIPPED, STUCK, incident
from tools.hangs.parts import FOREVER_S, WIDTH, batches, ddp, fsdp, log, train_step, warm_up


@incident(4, {2}, DIED)
def killed_while_training(rank: int) -> None:
    """The kernel's out-of-memory killer ends one rank."""
    model = ddp()
    for step, batch in enumerate(batches(8)):
        if rank == 2 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        log.info("step %d loss %.4f", step, train_step(model, batch))


@incident(3, {1}, DIED)
def segfault_in_an_extension(rank: int) -> None:
    """A C extension reads address 0."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        ctypes.string_at(0)
    warm_up(model)


@incident(2, {0}, DIED)
def assert_finite(rank: int) -> None:
    """One rank asserts that its loss is finite."""
    model = ddp()
    for step, batch in enumerate(batches(6)):
        if rank == 0 and step == 3:
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()
        assert torch.isfinite(loss), f"loss is {loss.item()} at step {step}"  # CULPRIT
        loss.backward()
        print(f"[{rank}] step {step} loss {loss.item():.4f}", flush=True)  # noqa: T201


@incident(3, {1}, SKIPPED)
def leaves_with_zero(rank: int) -> None:
    """`sys.exit(0)` on a rank that finds its work done."""
    model = ddp()
    for step, batch in enumerate(batches(6)):
        if rank == 1 and step == 3:
            sys.exit(0)  # CULPRIT
        log.info("step %d loss %.4f", step, train_step(model, batch))


@incident(3, {2}, DIED | SKIPPED)
def leaves_by_os_exit(rank: int) -> None:
    """`os._exit(0)`, with nothing flushed."""
    model = ddp()
    for step, batch in enumerate(batches(6)):
        if rank == 2 and step == 3:
            os._exit(0)  # CULPRIT
        log.info("step %d loss %.4f", step, train_step(model, batch))


@incident(3, {2}, DIED)
def wrong_index_on_one_rank(rank: int) -> None:
    """An index error in the data of one rank under FSDP2; the others see a closed connection."""
    model = fsdp()
    table = torch.randn(10, WIDTH)
    for step in range(6):
        row = 11 if rank == 2 and step == 3 else step
        batch = table[row].repeat(4, 1)  # CULPRIT
        loss = train_step(model, batch)
        if rank == 0:
            print(f"step={step} loss={loss:.4f}", flush=True)  # noqa: T201


@incident(3, {1}, DIED)
def out_of_memory_on_one_rank(rank: int) -> None:
    """An allocation fails on one rank."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        torch.empty(1 << 50)  # CULPRIT
    warm_up(model)


@incident(3, {2}, STUCK | GROUP, joins=False)
def never_joins(rank: int) -> None:
    """One rank stays in its set-up; the others wait in init_process_group."""
    if rank == 2:
        log.info("waiting for the dataset cache")
        time.sleep(FOREVER_S)  # CULPRIT
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    warm_up(ddp())


@incident(2, {1}, STUCK | SKIPPED | GROUP, joins=False)
def waits_for_an_unset_key(rank: int) -> None:
    """A key of the store is set under another name than the one that is waited for."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=12))
    if rank == 0:
        store.set("dataset/ready", "1")
    else:
        store.get("datasets/ready")  # CULPRIT
    warm_up(ddp())


@incident(4, {1}, DIED)
def dies_in_the_first_step(rank: int) -> None:
    """A wrong dtype on one rank, before any step is logged."""
    model = ddp()
    batch = next(batches(1))
    train_step(model, batch.long() if rank == 1 else batch)  # CULPRIT


@incident(3, {0}, DIED)
def main_cannot_write(rank: int) -> None:
    """Rank 0 saves to a folder that is not there; the others wait in the barrier behind it."""
    model = ddp()
    warm_up(model)
    if rank == 0:
        torch.save(model.module.state_dict(), "/no/such/folder/model.pt")  # CULPRIT
    dist.barrier()


@incident(3, {1}, DIED)
def raises_and_cannot_end(rank: int) -> None:
    """A rank raises, and its exit waits for a thread that never ends."""
    model = ddp()
    warm_up(model)
    if rank == 1:
        threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
        raise RuntimeError("bad shard")  # CULPRIT
    warm_up(model)


@incident(3, {2}, frozenset({"RANK_FROZEN"}))
def stops_itself(rank: int) -> None:
    """SIGSTOP, as a debugger or a batch system sends it."""
    model = ddp()
    warm_up(model)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    warm_up(model)
