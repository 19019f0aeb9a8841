"""Loops whose ranks run out of step, as scripts without our recorder log them: on one rank alone, without times, by print."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tools.hangs.incident import SKIPPED, STUCK, incident
from tools.hangs.parts import FOREVER_S, WIDTH, batches, ddp, fsdp, log, train_step, warm_up


def _say(rank: int, text: str) -> None:
    """What a script prints on its main rank alone."""
    if rank == 0:
        print(text, flush=True)  # noqa: T201


@incident(3, {2}, SKIPPED)
def fewer_batches_then_leaves(rank: int) -> None:
    """The shard of one rank is shorter; the script ends after its loop."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(5 if rank == 2 else 8)):  # CULPRIT
        loss = train_step(model, batch, optimizer)
        _say(rank, f"Epoch 1/1 Step {step} Loss {loss:.4f}")


@incident(2, {1}, SKIPPED)
def fewer_batches_then_metrics(rank: int) -> None:
    """One rank has fewer batches, and goes on to the all_reduce of its metrics."""
    model = ddp()
    seen = 0
    for step, batch in enumerate(batches(4 if rank == 1 else 6)):
        if rank == 0:
            sys.stderr.write(f"\r{step / 6:4.0%}|{'#' * step:6}| {step}/6 [00:00<00:00, 28.03it/s]")  # as tqdm draws it
        train_step(model, batch)  # CULPRIT
        seen += len(batch)
    total = torch.tensor([float(seen)])
    dist.all_reduce(total)  # CULPRIT
    _say(rank, f"samples: {total.item()}")


class _Stream(IterableDataset[torch.Tensor]):
    """A stream of samples, shorter on one rank."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.length):
            yield torch.randn(WIDTH, generator=generator)


@incident(4, {0}, SKIPPED)
def stream_ends_on_main(rank: int) -> None:
    """An iterable dataset that is exhausted first on rank 0, which then evaluates and saves."""
    model = ddp()
    for step, batch in enumerate(DataLoader(_Stream(12 if rank == 0 else 20), batch_size=4)):
        loss = train_step(model, batch)  # CULPRIT
        log.info("step %d loss %.4f", step, loss)
    dist.barrier()  # CULPRIT
    _say(rank, "saved")


class _Slow(Dataset[torch.Tensor]):
    """Samples of which one never comes."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            time.sleep(FOREVER_S)
        return torch.ones(WIDTH)


@incident(3, {1}, STUCK)
def loader_worker_sleeps(rank: int) -> None:
    """A worker process of one rank's loader never answers."""
    model = ddp()
    loader = DataLoader(_Slow(30 if rank == 1 else -1), batch_size=8, num_workers=1)
    for step, batch in enumerate(loader):  # CULPRIT
        log.info("step %d loss %.4f", step, train_step(model, batch))


@incident(3, {2}, STUCK)
def reads_a_fifo(rank: int) -> None:
    """A shard is on a mount that never answers: read() does not return."""
    model = ddp()
    warm_up(model)
    shard = Path(tempfile.mkdtemp()) / "shard-00002.bin"
    if rank == 2:
        os.mkfifo(shard)
    else:
        shard.write_bytes(b"x")
    log.info("opening %s", shard.name)
    descriptor = os.open(shard, os.O_RDWR)
    os.read(descriptor, 1)  # CULPRIT
    warm_up(model)


@incident(3, {0}, STUCK)
def queue_that_nobody_fills(rank: int) -> None:
    """A prefetching thread dies silently on rank 0, and the loop waits for its queue."""
    model = ddp()
    ready: queue.Queue[torch.Tensor] = queue.Queue(2)

    def fetch() -> None:
        for step, batch in enumerate(batches(8)):
            if rank == 0 and step == 4:
                return
            ready.put(batch)

    threading.Thread(target=fetch, daemon=True).start()
    for step in range(8):
        batch = ready.get()  # CULPRIT
        loss = train_step(model, batch)
        _say(rank, f"step {step}: loss={loss:.4f}")


@incident(2, {1}, STUCK)
def lock_taken_twice(rank: int) -> None:
    """A metrics object whose lock is not reentrant calls itself on one rank."""
    model, lock = ddp(), threading.Lock()
    for step, batch in enumerate(batches(6)):
        loss = train_step(model, batch)
        with lock:
            log.info("step %d loss %.4f", step, loss)
            if rank == 1 and step == 3:
                log.info("flushing metrics")
                with lock:  # CULPRIT
                    log.info("flushed")


@incident(3, {1}, STUCK)
def endless_augmentation(rank: int) -> None:
    """Rejection sampling that accepts nothing on one rank: a loop without end, without a word."""
    model = ddp()
    for step, batch in enumerate(batches(6)):
        while rank == 1 and step == 4 and bool(batch.abs().max() > 0):  # CULPRIT
            batch = batch.clone()  # CULPRIT
        loss = train_step(model, batch)
        _say(rank, f"iter {step} | loss {loss:.3f}")


@incident(4, {3}, SKIPPED)
def swallowed_exception(rank: int) -> None:
    """`except Exception: continue` around the whole step."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(8)):
        try:
            if rank == 3 and step == 4:
                raise ValueError("sample 7312 has no label")  # CULPRIT
            loss = train_step(model, batch, optimizer)
            log.info("step %d loss %.4f", step, loss)
        except ValueError as error:
            log.warning("skipping the batch: %s", error)
            continue
    dist.barrier()  # CULPRIT


@incident(2, {0}, STUCK)
def main_downloads(rank: int) -> None:
    """Rank 0 prepares the data while the others wait in a barrier, for longer than the timeout."""
    if rank == 0:
        print("Downloading dataset...", flush=True)  # noqa: T201
        time.sleep(FOREVER_S)  # CULPRIT
    dist.barrier()
    warm_up(ddp())


@incident(3, {1}, SKIPPED)
def fsdp_fewer_batches(rank: int) -> None:
    """FSDP2 over shards of unequal length; afterwards each rank reduces its loss."""
    model = fsdp()
    total = torch.zeros(1)
    for step, batch in enumerate(batches(3 if rank == 1 else 5)):
        total += train_step(model, batch)  # CULPRIT
        _say(rank, f"step {step}")
    dist.all_reduce(total)  # CULPRIT


def _answer(pipe: Connection) -> None:
    pipe.recv()
    sys.exit(1)


@incident(2, {1}, STUCK)
def tokenizer_process_died(rank: int) -> None:
    """A helper process ends without an answer; its pipe stays open in this process, so that recv() waits for ever."""
    model = ddp()
    warm_up(model)
    mine, its = multiprocessing.get_context("fork").Pipe()
    helper = multiprocessing.get_context("fork").Process(target=_answer, args=(its,), daemon=True)
    helper.start()
    if rank == 1:
        mine.send("tokenize")
        mine.recv()  # CULPRIT
    warm_up(model)
