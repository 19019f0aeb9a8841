"""Recomputation under schedules that split the backward pass in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from titan_ckpt.trainer.model.decoder import DecoderLayer, ModelConfig
from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.recompute import apply_activation_checkpointing
from tools.rank_pool import RankPool
from tools.training.curves import DEEPSEEK, SMALL, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh

ZBV = mesh(pp=2, pp_schedule="ZBVZeroBubble", microbatches=4, activation_checkpoint="full")
STEPS, BLOCKS = 2, 4


def calls_and_losses(rank: int, run: CurveCase) -> tuple[int, list[float]]:
    """How often the blocks of this rank ran, in forward and recomputation, and the losses."""
    calls, forward = 0, DecoderLayer.forward

    def counted(self: DecoderLayer, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return forward(self, *args, **kwargs)

    DecoderLayer.forward = counted  # type: ignore[method-assign]
    try:
        losses = train(rank, run).losses
    finally:
        DecoderLayer.forward = forward  # type: ignore[method-assign]
    return calls, losses


def compiled_calls_and_losses(rank: int, run: CurveCase) -> tuple[int, list[float]]:
    """How often the compiled blocks of this rank ran, in forward and recomputation, and the losses."""
    calls, compile_really = 0, torch.compile

    def compile_counted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = compile_really(forward)

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += torch.is_grad_enabled()
            return compiled(*args, **kwargs)

        return counted

    with mock.patch.object(torch, "compile", compile_counted):
        losses = train(rank, run).losses
    return calls, losses


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.dist
@pytest.mark.parametrize("model", [SMALL, DEEPSEEK], ids=["dense", "mixture"])
def test_a_split_backward_recomputes_a_block_once(ranks: RankPool, model: ModelConfig) -> None:
    run = CurveCase(model=replace(model, n_layers=BLOCKS), parallel=ZBV, steps=STEPS)
    check_recomputed_once(ranks, calls_and_losses, run)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_a_split_backward_recomputes_a_compiled_block_once(ranks: RankPool) -> None:
    run = CurveCase(model=replace(SMALL, n_layers=BLOCKS), parallel=replace(ZBV, compile=True), steps=STEPS)
    check_recomputed_once(ranks, compiled_calls_and_losses, run)


def check_recomputed_once(ranks: RankPool, function: Callable[..., Any], run: CurveCase) -> None:
    expected = single(replace(run, parallel=mesh()))
    for calls, losses in ranks.run(function, run):
        forwards = (STEPS + 1) * 4 * BLOCKS // 2  # one more step for the last loss; microbatches; blocks of a rank
        assert forwards < calls <= 2 * forwards
        assert relative_error(losses, expected.losses) <= 1e-5


def test_a_recomputation_that_saves_other_tensors_is_an_error() -> None:
    class Forgetful(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.exp() if self.calls == 1 else x * 2.0

    block = Forgetful()
    apply_activation_checkpointing(
        {0: block}, ParallelConfig(pp=2, pp_schedule="ZBVZeroBubble", activation_checkpoint="full")
    )
    with pytest.raises(RuntimeError, match="saved 1 tensors, its recomputation 0"):
        block(torch.ones(3, requires_grad=True)).sum().backward()
