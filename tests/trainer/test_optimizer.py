"""AdamW on shards, learning rate schedules, and the optimizer state that checkpoints save."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer, learning_rate
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.training.curves import SMALL

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Iterator[Parallelized]:
    yield build_parallel_model(decoder(SMALL), ParallelConfig(), MeshSpec(), device=CPU, seed=0)
    dist.destroy_process_group()


def one_backward(model: Parallelized) -> None:
    tokens = torch.arange(32).view(2, 16)
    model.forward_backward({"tokens": tokens, "labels": tokens.roll(-1, 1)}, count=32)


def test_steps_equal_torchs_own_adamw(model: Parallelized) -> None:
    weights = model.named_parameters()
    copies = {fqn: torch.nn.Parameter(weight.detach().clone()) for fqn, weight in weights.items()}
    matrices = [copy for copy in copies.values() if copy.ndim > 1]
    vectors = [copy for copy in copies.values() if copy.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    ours = build_optimizer(model, OptimizerConfig())
    for _ in range(3):
        one_backward(model)
        for fqn, copy in copies.items():
            copy.grad = weights[fqn].grad
        theirs.step()
        ours.step(1e-2)
        ours.zero_grad()
    assert all(torch.equal(weights[fqn], copy) for fqn, copy in copies.items())


def test_state_exists_before_the_first_step_and_is_live(model: Parallelized) -> None:
    optimizer = build_optimizer(model, OptimizerConfig())
    state = optimizer.state()
    assert len(state) == 3 * len(model.model_state())
    one_backward(model)
    optimizer.step(1e-3)
    assert state["state.model.norm.weight.step"] == 1
    assert state["state.model.layers.3.mlp.down_proj.weight.exp_avg"].abs().sum() > 0


def test_clipping_scales_by_the_norm_of_all_gradients(model: Parallelized) -> None:
    one_backward(model)
    grads = [weight.grad for weight in model.named_parameters().values() if weight.grad is not None]
    before = torch.cat([grad.flatten().double() for grad in grads]).norm().float()
    torch.testing.assert_close(model.clip_grad_norm(0.01), before)
    after = torch.cat([grad.flatten().double() for grad in grads]).norm().float()
    torch.testing.assert_close(after, torch.tensor(0.01), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("schedule", ["constant", "wsd", "cosine", "linear", "sqrt"])
def test_a_schedule_rises_then_never_rises_again(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule=schedule, min_lr_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("schedule", ["wsd", "sqrt"])
def test_a_stable_phase_lasts_until_the_decay(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, decay_fraction=0.25)  # type: ignore[arg-type]
    assert learning_rate(config, 75, 100) == 1.0
    assert learning_rate(config, 76, 100) < 1.0


def test_an_impossible_optimizer_is_refused(model: Parallelized) -> None:
    with pytest.raises(ConfigError, match=r"betas \(0.9, 1.0\)"):
        build_optimizer(model, OptimizerConfig(betas=(0.9, 1.0)))
    with pytest.raises(ConfigError, match=r"lr 0.0"):
        build_optimizer(model, OptimizerConfig(lr=0.0))
