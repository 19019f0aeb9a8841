"""Faults of expert parallelism that `debug inject` causes: tokens that go to experts on other ranks, and come back."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from titan_ckpt.debug.drill.cases import WARM_STEPS, DrillJob

log = logging.getLogger("job")


def route_tokens(job: DrillJob, *, extra: int = 0) -> None:
    """Expert parallelism: every rank sends each rank its share of tokens; the culprit `extra` ones too many to the others."""
    others = range(job.size)
    sent = [16 + extra * (job.is_culprit and rank != job.rank) for rank in others]
    expected = [16 for _ in others]
    dist.all_to_all_single(torch.empty(sum(expected), 4), torch.ones(sum(sent), 4), expected, sent)


def split_sizes(job: DrillJob) -> None:
    job.warm_up()
    route_tokens(job)
    route_tokens(job)
    log.info("step 3 start")
    route_tokens(job, extra=80_000)
    job.step(3)


def expert_skipped(job: DrillJob) -> None:
    """A rank whose router chose no expert of its group leaves the exchange out."""
    experts = dist.new_group(list(range(job.size)))
    parts = [torch.empty(8) for _ in range(job.size)]
    for number in range(WARM_STEPS + 1):
        log.info("step %d start", number)
        if number < WARM_STEPS or not job.is_culprit:
            exchange_tokens(parts, experts)
        job.step(number)


def exchange_tokens(parts: list[torch.Tensor], experts: dist.ProcessGroup | None) -> None:
    dist.all_to_all_single(torch.empty(8 * len(parts)), torch.cat(parts), group=experts)
