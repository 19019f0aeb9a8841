"""Shared experts, and their backward, compute while rows and gradients are on their way to other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ckpt.trainer.model.experts import ExpertsConfig, MixtureOfExperts
from titan_ckpt.trainer.parallel.experts import AllToAll
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist
CONFIG = ExpertsConfig(number=4, per_token=2, ffn_dim=8, shared=1)
WATCHED = ("all_to_all_single", "wait_tensor", "tanh", "tanh_backward")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of `WATCHED` in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names += [name] if name in WATCHED else []
        return func(*args, **(kwargs or {}))


def mixture(rank: int | None) -> MixtureOfExperts:
    """All experts, or those of one of two ranks."""
    torch.manual_seed(0)
    made = MixtureOfExperts(CONFIG, 8, nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.3)
    if rank is not None:
        world = dist.group.WORLD
        assert world is not None
        made.experts.exchange = AllToAll(world)
        for name, weight in list(made.experts.named_parameters()):
            made.experts.register_parameter(name, nn.Parameter(weight.detach().chunk(2)[rank].clone()))
    return made


def both_ways(rank: int) -> tuple[list[str], list[str], list[torch.Tensor]]:
    """The operations forward and backward on this rank, and results: output, gradients of input and shared experts."""
    made, x = mixture(rank), samples(rank)
    forward, backward = Watch(), Watch()
    with forward:
        y = made(x)
    with backward:
        y.square().sum().backward()
    return forward.names, backward.names, results(made, x, y)


def samples(rank: int) -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(rank + 1)).requires_grad_()


def results(made: MixtureOfExperts, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    shared = made.shared_experts
    assert isinstance(shared, nn.Sequential)
    gradients = [x.grad, *(weight.grad for weight in shared.parameters())]
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def test_shared_experts_compute_while_rows_travel(ranks: RankPool) -> None:
    for rank, (forward, backward, found) in enumerate(ranks.run(both_ways)):
        a2a, wait = "all_to_all_single", "wait_tensor"
        assert forward == [a2a, wait, a2a, "tanh", wait, a2a, wait], "counts, rows, results"
        assert backward == [a2a, wait, a2a, "tanh_backward", wait]
        made, x = mixture(None), samples(rank)
        y = made(x)
        y.square().sum().backward()
        assert len(found) == 4
        for one, other in zip(found, results(made, x, y), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
