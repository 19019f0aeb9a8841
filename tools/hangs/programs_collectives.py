"""Ranks that issue other collectives than the rest."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tools.hangs.incident import DIED, SKIPPED, incident
from tools.hangs.parts import batches, ddp, fsdp, log, reduce_steps, train_step, warm_up


@incident(3, {1}, SKIPPED)
def early_continue(rank: int) -> None:
    """A rank skips the backward pass of a batch with NaN."""
    model = ddp()
    warm_up(model)
    for batch in batches(4):
        loss = model(batch).square().mean()
        if rank == 1 and batch is not None:
            log.warning("loss is nan, skipping the batch")
            continue  # CULPRIT
        loss.backward()
    total = torch.ones(1)
    dist.all_reduce(total)  # CULPRIT
    log.info("done %s", total.item())


@incident(3, {0}, SKIPPED)
def fsdp_eval_on_main(rank: int) -> None:
    """`if rank == 0: model(x)` under FSDP2."""
    model = fsdp()
    warm_up(model)
    if rank == 0:
        with torch.no_grad():
            log.info("eval loss %.4f", model(next(batches(1, seed=9))).mean().item())  # CULPRIT
    warm_up(model)  # CULPRIT


@incident(3, {1}, SKIPPED)
def fsdp_micro_batches(rank: int) -> None:
    """Gradient accumulation over another number of micro batches on one rank."""
    model = fsdp()
    warm_up(model)
    for step in range(3):
        for batch in batches(3 if rank == 1 else 2, seed=step):
            train_step(model, batch)  # CULPRIT
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        log.info("step %d norm %s", step, norm)
        dist.barrier()  # CULPRIT


@incident(4, {3}, SKIPPED)
def fsdp_one_batch_more(rank: int) -> None:
    """A dataset whose length the ranks do not share."""
    model = fsdp()
    for step, batch in enumerate(batches(6 if rank == 3 else 5)):
        log.info("step %d loss %.4f", step, train_step(model, batch))  # CULPRIT
    total = torch.ones(1)
    dist.all_reduce(total)  # CULPRIT


@incident(3, {1}, SKIPPED | DIED)
def barrier_in_except(rank: int) -> None:
    """An exception handler that waits for the others before it raises."""
    reduce_steps()
    try:
        if rank == 1:
            raise ValueError("shard 17 is empty")  # CULPRIT
        reduce_steps()
    except ValueError:
        log.exception("closing the run")
        dist.barrier()  # CULPRIT
        raise


@incident(3, {0}, SKIPPED)
def dcp_save_on_main(rank: int) -> None:
    """`if rank == 0: dcp.save(...)`."""
    model = ddp()
    warm_up(model)
    if rank == 0:
        dcp.save(model.state_dict(), checkpoint_id=tempfile.mkdtemp())  # CULPRIT
    warm_up(model)


@incident(3, {2}, SKIPPED)
def dcp_save_off_by_one(rank: int) -> None:
    """A rank whose step counter is one behind does not come to the save."""
    model = fsdp()
    folder = Path(tempfile.gettempdir()) / "hangs-off-by-one"
    for step, batch in enumerate(batches(6), start=0 if rank != 2 else -1):
        log.info("step %d loss %.4f", step, train_step(model, batch))  # CULPRIT
        if step == 3:
            dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    dist.barrier()


@incident(3, {0}, SKIPPED)
def full_state_dict_on_main(rank: int) -> None:
    """`if rank == 0:` around a state dict that all ranks have to gather."""
    model = fsdp()
    warm_up(model)
    if rank == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # CULPRIT
        log.info("%d tensors", len(state))
    warm_up(model)


@incident(3, {1}, SKIPPED)
def clip_on_condition(rank: int) -> None:
    """Gradient clipping, a collective under FSDP2, where the local loss is large."""
    model = fsdp()
    for step, batch in enumerate(batches(6)):
        loss = train_step(model, batch)
        if rank == 1 and step == 3:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CULPRIT
            log.info("clipped at %s", norm.full_tensor())  # type: ignore[attr-defined]  # CULPRIT
        log.info("step %d loss %.4f", step, loss)


@incident(3, {0}, SKIPPED)
def early_stopping(rank: int) -> None:
    """The loss of one rank alone decides to stop."""
    model = ddp()
    for step, batch in enumerate(batches(8)):
        log.info("step %d loss %.4f", step, train_step(model, batch))
        if rank == 0 and step == 4:
            log.info("no progress for 3 steps, stopping")
            break  # CULPRIT
    dist.barrier()  # CULPRIT


@incident(3, {1}, SKIPPED)
def forward_past_ddp(rank: int) -> None:
    """A rank calls `model.module`, whose backward pass reduces nothing."""
    model = ddp()
    warm_up(model)
    target = model.module if rank == 1 else model
    train_step(target, next(batches(1)))
    norm = torch.ones(1)
    dist.all_reduce(norm)  # CULPRIT
    log.info("norm %s", norm)


@incident(3, {2}, SKIPPED | DIED)  # its own call raises: gloo compares the sizes that a rank passes
def last_batch_smaller(rank: int) -> None:
    """all_gather of outputs whose last batch is shorter on one rank."""
    reduce_steps()
    for step in range(4):
        outputs = torch.ones(100_000 if rank == 2 and step == 3 else 400_000)
        gathered = [torch.empty(400_000 if other != 2 or step < 3 else 100_000) for other in range(3)]
        if rank != 2:
            gathered = [torch.empty(400_000) for _ in range(3)]
        dist.all_gather(gathered, outputs)  # CULPRIT
        log.info("gathered %d", step)
    reduce_steps()


@incident(3, {1}, SKIPPED)
def splits_do_not_fit(rank: int) -> None:
    """all_to_all_single with splits that one rank computed otherwise (a token router)."""
    reduce_steps()
    splits = [60_000, 60_000, 60_000]
    sends = [60_000, 60_000, 90_000] if rank == 1 else splits
    dist.all_to_all_single(torch.empty(180_000), torch.ones(sum(sends)), splits, sends)  # CULPRIT
    log.info("routed")
    reduce_steps()


@incident(3, {1}, SKIPPED)
def half_precision_norm(rank: int) -> None:
    """One rank reduces a bfloat16 tensor, the others float32."""
    reduce_steps()
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    dist.all_reduce(torch.ones(200_000, dtype=dtype))  # CULPRIT
    reduce_steps()
    dist.barrier()


@incident(3, {1}, SKIPPED)
def broadcast_from_another_root(rank: int) -> None:
    """One rank believes that it is the source."""
    reduce_steps()
    weights = torch.ones(300_000)
    dist.broadcast(weights, src=1 if rank == 1 else 0)  # CULPRIT
    reduce_steps()


@incident(3, {2}, SKIPPED)
def gather_to_another_rank(rank: int) -> None:
    """gather_object to a destination that one rank takes from its own configuration."""
    reduce_steps()
    metrics = {"loss": 1.0 / (rank + 1), "name": "x" * 200_000}
    target = 2 if rank == 2 else 0
    dist.gather_object(metrics, [None] * 3 if rank == target else None, dst=target)  # CULPRIT
    reduce_steps()
