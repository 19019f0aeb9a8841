"""The faults that `debug inject` really causes: one small training loop, one fault per case."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from titan_ckpt.debug.record.recorder import Recorder

log = logging.getLogger("job")

WARM_STEPS = 3
HANG_S = 600


@dataclass(slots=True, kw_only=True)
class DrillJob:
    """What a case's function needs: its own rank, the culprit, and the parts of a training loop."""

    rank: int
    size: int
    culprit: int
    recorder: Recorder
    folder: Path

    @property
    def is_culprit(self) -> bool:
        return self.rank == self.culprit

    def step(self, number: int) -> None:
        """One training step: reduce gradients, then broadcast a small tensor."""
        log.info("step %d start", number)
        with self.recorder.phase("backward", number):
            reduce_gradients(torch.ones(64, 32))
        with self.recorder.phase("optimizer", number):
            share_scale(torch.ones(8))
        log.info("step %d done", number)

    def warm_up(self) -> None:
        for number in range(WARM_STEPS):
            self.step(number)


def reduce_gradients(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


def share_scale(scale: torch.Tensor) -> None:
    dist.broadcast(scale, 0)


class ShardReader:
    """A data source whose storage is gone."""

    def read_shard(self) -> bytes:
        reader, _writer = os.pipe()
        return os.read(reader, 1)


def write_checkpoint() -> None:
    """A write to a store that accepts the first bytes, then no more."""
    _reader, writer = os.pipe()
    with open(writer, "wb") as upload:
        upload.write(bytes(1 << 20))


# ------------------------------------------------------------------------------------------------ mismatched programs


def skip(job: DrillJob) -> None:
    job.warm_up()
    log.info("step 3 start")
    if job.is_culprit:
        log.info("overflow here: no gradients this time")
    else:
        reduce_gradients(torch.ones(64, 32))
    share_scale(torch.ones(8))


def order(job: DrillJob) -> None:
    job.warm_up()
    gradient, scale = torch.ones(64, 32), torch.ones(8)
    if job.is_culprit:
        dist.broadcast(scale, 0)
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
        dist.broadcast(scale, 0)


def op_type(job: DrillJob) -> None:
    job.warm_up()
    part = torch.ones(64)
    if job.is_culprit:
        dist.all_gather([torch.empty(64) for _ in range(job.size)], part)
    else:
        dist.all_reduce(part)
    share_scale(torch.ones(8))


def size(job: DrillJob) -> None:
    job.warm_up()
    reduce_gradients(torch.ones(80_000 if job.is_culprit else 64, 32))
    share_scale(torch.ones(8))


def dtype(job: DrillJob) -> None:
    job.warm_up()
    reduce_gradients(torch.ones(64, 32, dtype=torch.float64 if job.is_culprit else torch.float32))
    share_scale(torch.ones(8))
    stall()


def extra_collective(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        log_global_loss(torch.ones(1))
    job.step(3)


def log_global_loss(loss: torch.Tensor) -> None:
    dist.all_gather([torch.empty(1) for _ in range(dist.get_world_size())], loss)


def finished_early(job: DrillJob) -> None:
    job.warm_up()
    if not job.is_culprit:
        job.step(3)


def wrong_group(job: DrillJob) -> None:
    second = dist.new_group(list(range(job.size)))
    job.warm_up()
    dist.all_reduce(torch.ones(4), group=second)
    log.info("step 3 start")
    dist.all_reduce(torch.ones(64, 32), group=second if job.is_culprit else None)
    job.step(4)


# -------------------------------------------------------------------------------------------------------- busy ranks


def dataloader(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        with job.recorder.phase("data", 3):
            ShardReader().read_shard()
    job.step(3)


def checkpoint_io(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        log.info("saving checkpoint step-3")
        with job.recorder.phase("ckpt_upload", 3):
            write_checkpoint()
    dist.barrier()


def python_lock(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    job.step(3)


def gil_held(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        re.match(r"(a+)+$", "a" * 64 + "b")  # exponential, in C, with the GIL
    job.step(3)


def user_code(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        settle_queue()
    job.step(3)


def settle_queue() -> int:
    """A loop that never ends."""
    left = 1
    while left:
        left = (left * 3 + 1) % 7_919 or 1
    return left


def gc_storm(job: DrillJob) -> None:
    """Garbage collection in an endless loop; each collection scans all live objects."""
    job.warm_up()
    if job.is_culprit:
        gc.freeze()  # exempt torch's objects from the scans, so that the recorder's threads run sooner
        keep = [[number] for number in range(50_000)]
        while keep:
            gc.collect()
    job.step(3)


def teardown(job: DrillJob) -> None:
    """At exit, the interpreter waits for a thread that never ends."""
    job.warm_up()
    if job.is_culprit:
        threading.Thread(target=stall, name="uploader").start()
        sys.exit(0)
    job.step(3)


def ring_overflow(job: DrillJob) -> None:
    for number in range(80):
        job.step(number)
    if job.is_culprit:
        stall()
    job.step(80)


def chain(job: DrillJob) -> None:
    """Tensor-parallel pairs in a pipeline: the first pair's second rank stops and all others wait, some far away."""
    pairs = [dist.new_group([i, i + 1]) for i in range(0, job.size, 2)]
    mine, stage = pairs[job.rank // 2], job.rank // 2
    for number in range(WARM_STEPS + 1):
        log.info("step %d start", number)
        activation = torch.ones(16)
        if stage > 0:
            dist.recv(activation, job.rank - 2)
        if number == WARM_STEPS and job.is_culprit:
            with job.recorder.phase("data", number):
                ShardReader().read_shard()
        dist.all_reduce(activation, group=mine)
        if stage < len(pairs) - 1:
            dist.send(activation, job.rank + 2)


# --------------------------------------------------------------------------------------------------------- dead ranks


def sigkill(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    job.step(3)


def segfault(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        ctypes.string_at(0)
    job.step(3)


def sigstop(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    job.step(3)


def exception(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        raise ValueError("tokenizer: bad utf-8 in shard 17")
    job.step(3)


def out_of_memory(job: DrillJob) -> None:
    job.warm_up()
    if job.is_culprit:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        bytearray(8 << 30)
    job.step(3)


# ------------------------------------------------------------------------------------------------------ point to point


def exchange(job: DrillJob, elements: int = 128) -> None:
    """Each rank sends to the next and receives from the previous one."""
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    works = [dist.isend(torch.ones(elements), after), dist.irecv(torch.empty(128), before)]
    for work in works:
        if work is not None:
            work.wait()


def p2p_missing(job: DrillJob) -> None:
    exchange(job)
    job.warm_up()
    after = (job.culprit + 1) % job.size
    if job.rank == after:
        dist.recv(torch.empty(128), job.culprit)
    dist.barrier()


def p2p_size(job: DrillJob) -> None:
    exchange(job)
    exchange(job)
    job.warm_up()
    exchange(job, elements=256 if job.is_culprit else 128)
    dist.barrier()


def p2p_cycle(job: DrillJob) -> None:
    exchange(job)
    job.warm_up()
    dist.recv(torch.empty(128), (job.rank - 1) % job.size)
    dist.send(torch.ones(128), (job.rank + 1) % job.size)


def p2p_batch(job: DrillJob) -> None:
    exchange(job)
    job.warm_up()
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    operations = [dist.P2POp(dist.irecv, torch.empty(128), before)]
    if not job.is_culprit:
        operations.append(dist.P2POp(dist.isend, torch.ones(128), after))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier()


# ---------------------------------------------------------------------------------------------------- making groups


def subset_new_group(job: DrillJob) -> None:
    job.warm_up()
    if not job.is_culprit:
        dist.new_group(list(range(job.size)))
    job.step(3)


# ------------------------------------------------------------------------------------------------- slow and healthy


def straggler(job: DrillJob) -> None:
    for number in range(10):
        if job.is_culprit:
            time.sleep(0.5)
        job.step(number)


def ok(job: DrillJob) -> None:
    for number in range(6):
        job.step(number)


def gc_pause(job: DrillJob) -> None:
    """A pause that ends: no rank may be named as culprit."""
    job.warm_up()
    if job.is_culprit:
        keep: list[object] = []
        for _ in range(200_000):
            keep = [keep]
        gc.collect()
    job.step(3)


def subset_groups(job: DrillJob) -> None:
    """Legal: groups that only some ranks belong to or use."""
    low = dist.new_group(list(range(max(1, job.size // 2))))
    job.warm_up()
    if job.rank < max(1, job.size // 2):
        for _ in range(4):
            dist.all_reduce(torch.ones(4), group=low)
    job.step(3)


def async_not_waited(job: DrillJob) -> None:
    """A handle that is never waited for: careless, but not a hang."""
    job.warm_up()
    works = [dist.all_reduce(torch.ones(4), async_op=True)]
    if not job.is_culprit:
        works[0].wait()
    job.step(3)


def stall() -> None:
    time.sleep(HANG_S)
