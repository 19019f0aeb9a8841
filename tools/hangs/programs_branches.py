"""Ranks that take another way than the rest, and what torch says of it: as programs without our recorder log it."""

from __future__ import annotations

import logging
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tools.hangs.incident import DIED, PEER, SKIPPED, STUCK, incident
from tools.hangs.parts import FOREVER_S, WIDTH, batches, ddp, layers, log, reduce_steps, train_step, warm_up


@incident(3, {0}, SKIPPED | DIED)
def saves_with_a_barrier_on_main(rank: int) -> None:
    """`if rank == 0: save(); barrier()`: nobody else comes."""
    model = ddp()
    for step, batch in enumerate(batches(6)):
        log.info("step %d loss %.4f", step, train_step(model, batch))
        if rank == 0 and step == 3:
            log.info("saving checkpoint")
            torch.save(model.module.state_dict(), tempfile.mkdtemp() + "/model.pt")
            dist.barrier()  # CULPRIT


@incident(3, {0}, SKIPPED)
def saves_and_no_barrier_on_main(rank: int) -> None:
    """Rank 0 saves and returns from the function early, before the barrier that the others call."""
    model = ddp()
    warm_up(model)
    _save(rank, model)
    warm_up(model)


def _save(rank: int, model: DistributedDataParallel) -> None:
    if rank == 0:
        torch.save(model.module.state_dict(), tempfile.mkdtemp() + "/model.pt")
        return  # CULPRIT
    dist.barrier()


@incident(4, {2}, SKIPPED)
def reduce_before_gather(rank: int) -> None:
    """One rank calls two different collectives in the other order."""
    reduce_steps()
    x, parts = torch.ones(8), [torch.zeros(8) for _ in range(4)]
    if rank == 2:
        dist.all_gather(parts, x)  # CULPRIT
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        dist.all_gather(parts, x)  # CULPRIT
    reduce_steps()


@incident(3, {2}, SKIPPED)
def barrier_in_one_branch(rank: int) -> None:
    """A rank whose validation loss is best waits in an extra barrier."""
    for step in range(4):
        reduce_steps(1)
        if rank == 2 and step == 2:
            log.info("new best model")
            dist.barrier()  # CULPRIT
    total = torch.ones(16)
    dist.all_reduce(total)


@incident(3, {1}, SKIPPED | DIED)
def mismatched_shapes(rank: int) -> None:
    """The vocabulary of one rank is larger: its gradient bucket has another size."""
    reduce_steps()
    embedding = torch.ones(1000 + 24 * (rank == 1), 4)
    dist.all_reduce(embedding)  # CULPRIT
    log.info("reduced %s", tuple(embedding.shape))


@incident(3, {1}, SKIPPED | DIED)
def another_model_on_one_rank(rank: int) -> None:
    """DDP's constructor compares the parameters of all ranks."""
    model = nn.Linear(WIDTH, 9 if rank == 1 else 8)
    DistributedDataParallel(model)  # CULPRIT
    log.info("wrapped")


class _Branching(nn.Module):
    """A layer that some inputs do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.extra = layers(), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, *, use_extra: bool) -> torch.Tensor:
        y: torch.Tensor = self.trunk(x)
        return self.extra(y) if use_extra else y


@incident(3, {2}, DIED | SKIPPED)
def unused_parameters_on_one_rank(rank: int) -> None:
    """One rank's inputs leave a layer unused: DDP refuses its next forward pass, the others wait."""
    torch.manual_seed(0)
    model = DistributedDataParallel(_Branching())
    for step, batch in enumerate(batches(5)):
        loss = model(batch, use_extra=not (rank == 2 and step >= 2)).square().mean()  # CULPRIT
        loss.backward()
        log.info("step %d loss %.4f", step, loss.item())


@incident(3, {1}, SKIPPED | STUCK)
def broadcast_from_itself(rank: int) -> None:
    """`src=rank` on one rank: it sends where it should receive."""
    state = torch.full((64,), float(rank))
    dist.broadcast(state, src=1 if rank == 1 else 0)  # CULPRIT
    reduce_steps()


@incident(3, {2}, PEER | SKIPPED | STUCK)
def last_stage_expects_more(rank: int) -> None:
    """The last stage of a pipeline expects one micro batch more than it is sent."""
    for step in range(2):
        count = 5 if rank == 2 and step == 1 else 4
        for number in range(count):
            x = torch.ones(WIDTH)
            if rank > 0:
                dist.recv(x, rank - 1)  # CULPRIT
            if rank < 2:
                dist.send(x, rank + 1)
            log.info("stage %d micro batch %d", rank, number)
        dist.barrier()


@incident(2, {0}, SKIPPED)
def dcp_save_by_one(rank: int) -> None:
    """torch.distributed.checkpoint.save under `if rank == 0`."""
    model = ddp()
    for step, batch in enumerate(batches(4)):
        loss = train_step(model, batch)
        print(f"[rank {rank}] step {step} loss {loss:.3f}", flush=True)  # noqa: T201
        if rank == 0 and step == 2:
            dcp.save({"model": model.module.state_dict()}, checkpoint_id=tempfile.mkdtemp())  # CULPRIT


@incident(4, {3}, STUCK | SKIPPED)
def missed_monitored_barrier(rank: int) -> None:
    """monitored_barrier names the rank that did not come."""
    reduce_steps()
    if rank == 3:
        _wait_for_nothing()  # CULPRIT
    dist.monitored_barrier(timeout=timedelta(seconds=8))


def _wait_for_nothing() -> None:
    threading.Event().wait(FOREVER_S)


@incident(3, {1}, DIED | SKIPPED)
def logs_and_leaves_main(rank: int) -> None:
    """`except Exception: log.exception(...)` around main: the rank ends with exit code 0 after an error."""
    model = ddp()
    try:
        for step, batch in enumerate(batches(6)):
            if rank == 1 and step == 3:
                raise KeyError("input_ids")  # CULPRIT
            log.info("step %d loss %.4f", step, train_step(model, batch))
    except KeyError:
        logging.getLogger("train").exception("training failed")


@incident(3, {0}, SKIPPED)
def early_stop_on_main(rank: int) -> None:
    """Rank 0 decides alone that training has converged."""
    model = ddp()
    for step, batch in enumerate(batches(8)):
        loss = train_step(model, batch)
        if rank == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)  # noqa: T201
            if step == 4:
                print("converged, stopping early", flush=True)  # noqa: T201
                break  # CULPRIT
