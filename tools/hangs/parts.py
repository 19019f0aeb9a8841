"""What the programs share: small models, batches, logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("train")

WIDTH = 16
FOREVER_S = 600.0


def layers() -> nn.Sequential:
    """A small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))


def ddp() -> DistributedDataParallel:
    """The small network under DDP."""
    return DistributedDataParallel(layers())


def fsdp() -> nn.Module:
    """The small network under FSDP2, each layer on its own."""
    model = layers()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def batches(count: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Random batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator)


def train_step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> float:
    """Forward, backward and, if there is an optimizer, an update; the loss."""
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def warm_up(model: nn.Module, steps: int = 3) -> None:
    """Some steps in which nothing goes wrong."""
    for number, batch in enumerate(batches(steps)):
        log.info("step %d loss %.4f", number, train_step(model, batch))


def reduce_steps(steps: int = 3) -> None:
    """Some all-reduces in which nothing goes wrong."""
    for number in range(steps):
        gradient = torch.ones(64)
        dist.all_reduce(gradient)
        log.info("step %d", number)
