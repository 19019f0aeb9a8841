"""Jobs that look odd and are well: looked at again and again while they run, no rank of theirs may be accused."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from concurrent.futures import Future

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

from tools.hangs.incident import NO_FAULT, incident
from tools.hangs.parts import batches, ddp, fsdp, layers, log, train_step

WELL_S = 45.0
"""How long each of them runs after its first steps, so that there is time for looks."""


class _Clock:
    """The same answer on all ranks to the question whether time is up."""

    def __init__(self) -> None:
        self._until = time.monotonic() + WELL_S

    def is_up(self) -> bool:
        flag = torch.tensor([float(time.monotonic() > self._until)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag.item() > 0


@incident(3, set(), NO_FAULT)
def noisy_steps(rank: int) -> None:
    """Steps of 10 ms to 2 s, by chance, on each rank for itself."""
    chance, model, clock = random.Random(rank), ddp(), _Clock()
    while not clock.is_up():
        train_step(model, next(batches(1)))
        time.sleep(chance.choice((0.01, 0.01, 0.05, 0.5, 2.0)))


@incident(2, set(), NO_FAULT)
def long_steps(_: int) -> None:
    """Steps of 5 s in which no operation is issued."""
    model, clock = fsdp(), _Clock()
    while not clock.is_up():
        train_step(model, next(batches(1)))
        time.sleep(5.0)


@incident(3, set(), NO_FAULT)
def main_saves_for_long(rank: int) -> None:
    """Rank 0 writes a checkpoint for 8 s every 20 steps; the others wait at the next step."""
    model, clock, step = ddp(), _Clock(), 0
    while not clock.is_up():
        train_step(model, next(batches(1)))
        if rank == 0 and step % 20 == 5:
            until = time.monotonic() + 8.0
            while time.monotonic() < until:
                torch.save(model.state_dict(), tempfile.mkdtemp() + "/model.pt")
                time.sleep(0.2)
        time.sleep(0.1)
        step += 1


@incident(3, set(), NO_FAULT)
def main_evaluates_behind_a_barrier(rank: int) -> None:
    """Rank 0 evaluates the bare model for 7 s while the others wait at a barrier."""
    model, clock, step = ddp(), _Clock(), 0
    while not clock.is_up():
        train_step(model, next(batches(1)))
        if step % 30 == 10:
            until = time.monotonic() + 7.0
            while rank == 0 and time.monotonic() < until:
                with torch.no_grad():
                    model.module(next(batches(1)))
            dist.barrier()
        time.sleep(0.05)
        step += 1


class _Slow(Dataset[torch.Tensor]):
    """Every fortieth sample takes 6 s, as from a cold cache."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 40 == 30:
            time.sleep(6.0)
        return torch.ones(16)


@incident(2, set(), NO_FAULT)
def loader_stalls(rank: int) -> None:
    """A worker of the loader stalls on one rank now and then."""
    model, clock = ddp(), _Clock()
    for batch in DataLoader(_Slow() if rank == 1 else torch.ones(100_000, 16), batch_size=4, num_workers=1):  # type: ignore[arg-type]
        train_step(model, batch)
        if clock.is_up():
            break
        time.sleep(0.05)


@incident(2, set(), NO_FAULT)
def compiles_on_one_rank(rank: int) -> None:
    """torch.compile, and once more for each new shape on one rank."""
    dist.barrier()
    plain = layers()
    model = torch.nn.parallel.DistributedDataParallel(torch.compile(plain, backend="aot_eager", dynamic=False))
    clock, step = _Clock(), 0
    while not clock.is_up():
        rows = 4 + (step // 10 % 6 if rank == 1 else 0)
        train_step(model, torch.randn(rows, 16))
        time.sleep(0.05)
        step += 1


@incident(3, set(), NO_FAULT)
def accumulates_gradients(_: int) -> None:
    """Seven micro batches of eight reduce nothing."""
    model, clock = ddp(), _Clock()
    while not clock.is_up():
        for number, batch in enumerate(batches(8)):
            with contextlib.nullcontext() if number == 7 else model.no_sync():
                train_step(model, batch)
            time.sleep(0.3)


@incident(4, set(), NO_FAULT)
def stages_of_unequal_length(rank: int) -> None:
    """A pipeline whose third stage takes most of the time."""
    clock = _Clock()
    while not clock.is_up():
        for _ in range(4):
            activations = torch.ones(64)
            if rank > 0:
                dist.recv(activations, rank - 1)
            time.sleep(0.6 if rank == 2 else 0.02)
            if rank < 3:
                dist.send(activations, rank + 1)


@incident(3, set(), NO_FAULT)
def saves_in_the_background(_: int) -> None:
    """dcp.async_save in its own group, while training goes on."""
    model, clock, step = fsdp(), _Clock(), 0
    group = dist.new_group(backend="gloo")
    folder, saving = f"{tempfile.gettempdir()}/hangs-async", None
    while not clock.is_up():
        train_step(model, next(batches(1)))
        if step % 40 == 10:
            if isinstance(saving, Future):
                saving.result()
            saving = dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=group)
        time.sleep(0.05)
        step += 1
    if isinstance(saving, Future):
        saving.result()


@incident(3, set(), NO_FAULT)
def thread_with_a_group_of_its_own(_: int) -> None:
    """Metrics are reduced in a thread, in another group, every 3 s."""
    group, model, clock = dist.new_group(), ddp(), _Clock()
    ended = threading.Event()

    def report() -> None:
        for _ in range(int(WELL_S / 3.0)):
            dist.all_reduce(torch.ones(1), group=group)
            if ended.wait(3.0):
                pass

    thread = threading.Thread(target=report)
    thread.start()
    while not clock.is_up():
        train_step(model, next(batches(1)))
        time.sleep(0.1)
    thread.join()


@incident(3, set(), NO_FAULT)
def handled_exceptions(rank: int) -> None:
    """A rank logs a traceback now and then, and goes on."""
    model, clock, step = ddp(), _Clock(), 0
    while not clock.is_up():
        train_step(model, next(batches(1)))
        if rank == 1 and step % 20 == 3:
            try:
                raise ConnectionResetError(104, "Connection reset by peer")
            except ConnectionResetError:
                log.exception("the tracker does not answer, trying again later")
        time.sleep(0.1)
        step += 1
