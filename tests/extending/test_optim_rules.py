"""Rules of the optimizer in one process: Muon as torch's, moments in 8 bits and bfloat16, averages, rules of users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer import OptimizerSpec
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.optim.adamw import AdamW
from titan_ckpt.trainer.optim.eight_bit import Blocks, block_size, codes_of, dequantize, quantize
from titan_ckpt.trainer.optim.rule import Trained
from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.optimizer import GroupConfig, OptimizerConfig, build_optimizer, check_numbers, rule_of
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.boundary import OwnCodeError
from tools.training.curves import GPT_OSS, SMALL

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Iterator[Parallelized]:
    yield build_parallel_model(decoder(SMALL), ParallelConfig(), MeshSpec(), device=CPU, seed=0)
    dist.destroy_process_group()


def _backward(model: Parallelized) -> None:
    tokens = torch.arange(32).view(2, 16)
    model.forward_backward({"tokens": tokens, "labels": tokens.roll(-1, 1)}, count=32)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_equals_torchs_own(model: Parallelized, scale: Any) -> None:
    weights = model.named_parameters()
    matrices = [fqn for fqn, weight in weights.items() if ".layers." in fqn and weight.ndim == 2]
    copies = {fqn: torch.nn.Parameter(weights[fqn].detach().clone()) for fqn in matrices}
    theirs = torch.optim.Muon(copies.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn=scale)
    ours = build_optimizer(model, OptimizerConfig(name="muon", muon_scale=scale, muon_dtype="bfloat16"))
    for _ in range(3):
        _backward(model)
        for fqn, copy in copies.items():
            copy.grad = weights[fqn].grad
        theirs.step()  # type: ignore[no-untyped-call]
        ours.step(1e-2)
        ours.zero_grad()
    assert len(matrices) == 4 * 7
    assert all(torch.equal(weights[fqn], copy) for fqn, copy in copies.items())
    assert "state.model.embed_tokens.weight.exp_avg" in ours.state()


@pytest.fixture
def clamped() -> Iterator[Parallelized]:
    yield build_parallel_model(decoder(GPT_OSS), ParallelConfig(), MeshSpec(), device=CPU, seed=0)
    dist.destroy_process_group()


def test_muon_of_experts_is_torchs_own_of_each(clamped: Parallelized) -> None:
    weights = clamped.named_parameters()
    stack = weights["model.layers.0.mlp.experts.gate_up_proj"]
    copies = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stack]
    theirs = torch.optim.Muon(copies, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = build_optimizer(clamped, OptimizerConfig(name="muon", muon_dtype="bfloat16"))
    for _ in range(2):
        _backward(clamped)
        assert stack.grad is not None
        for copy, gradient in zip(copies, stack.grad, strict=True):
            copy.grad = gradient.clone()
        theirs.step()  # type: ignore[no-untyped-call]
        ours.step(1e-2)
        ours.zero_grad()
    assert all(torch.equal(matrix, copy) for matrix, copy in zip(stack, copies, strict=True))


def test_biases_of_experts_are_vectors(clamped: Parallelized) -> None:
    fqn = "model.layers.0.mlp.experts.gate_up_proj_bias"
    bias = torch.nn.init.ones_(clamped.named_parameters()[fqn])
    ours = build_optimizer(clamped, OptimizerConfig(name="muon", weight_decay=0.5))
    assert f"state.{fqn}.exp_avg" in ours.state()
    _backward(clamped)
    bias.grad = torch.zeros_like(bias)
    ours.step(1e-2)
    assert torch.equal(bias, torch.ones_like(bias))  # no decay
    muon = GroupConfig(weights=("**.gate_up_proj_bias",), name="muon")
    with pytest.raises(ConfigError, match=r"up_proj_bias: Muon is for matrices, and each of its experts has 1 dim"):
        build_optimizer(clamped, OptimizerConfig(groups=(muon,)))


def test_groups_choose_the_rule_of_a_weight() -> None:
    groups = (GroupConfig(weights=("**.v",), name="adamw"), GroupConfig(weights=("head",), name="muon"))
    config, blocks = OptimizerConfig(name="muon", groups=groups), {"layers.0"}
    found = [rule_of(config, fqn, 2, blocks) for fqn in ("layers.0.q", "layers.0.v", "embed", "head")]
    assert found == ["muon", "adamw", "adamw", "muon"]
    assert rule_of(config, "layers.0.bias", 1, blocks) == "adamw"


def test_a_vector_cannot_be_given_to_muon(model: Parallelized) -> None:
    groups = (GroupConfig(weights=("model.norm.weight",), name="muon"),)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: Muon is for matrices, and this weight has 1 dim"):
        build_optimizer(model, OptimizerConfig(groups=groups))


def test_blocks_divide_what_tensor_parallelism_leaves() -> None:
    for columns in (64, 98, 100, 176, 704, 4096, 11008, 14336):
        size = block_size(columns)
        assert 16 <= size <= 128
        parts = next(share for share in (8, 4, 2, 1) if columns % share == 0 and (columns // share) % size == 0)
        assert (columns // parts) % size == 0


def test_the_codes_are_256_numbers_from_minus_one_to_one() -> None:
    for signed, least in ((True, -0.993), (False, 0.0)):
        codes = codes_of(CPU, signed=signed)
        numbers = codes.tolist()
        assert len(set(numbers)) == 256
        assert numbers[0] < least + 0.01
        assert (numbers[-1], 0.0 in numbers) == (1.0, True)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_comes_back_within_half_a_step(signed: bool) -> None:
    values = torch.randn(12, 70, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.abs()
    values[3] = 0.0
    blocks = Blocks(size=32, columns=70, whole=3, here=3)
    codes, scales = quantize(values, blocks, signed=signed)
    back = dequantize(codes, scales, blocks, signed=signed)
    assert (codes.dtype, tuple(scales.shape)) == (torch.uint8, (12, 3))
    assert torch.all((back - values).abs() <= 0.008 * scales.repeat_interleave(32, dim=1)[:, :70] + 0.12 * values.abs())
    assert torch.equal(back[3], torch.zeros(70))
    again = quantize(back, blocks, signed=signed)
    if signed:  # a block's largest number is negative in some: its code is -0.993
        assert (again[0].int() - codes.int()).abs().max() <= 1
    else:
        assert torch.equal(again[0], codes)


def test_a_root_that_is_not_zero_is_never_stored_as_zero() -> None:
    blocks = Blocks(size=4, columns=4, whole=1, here=1)
    values = torch.tensor([[1.0, 1e-30, 0.0, 1e-9]])
    codes, scales = quantize(values, blocks, signed=False)
    assert (dequantize(codes, scales, blocks, signed=False) > 0).tolist() == [[True, True, False, True]]


@pytest.mark.parametrize(("moments", "most"), [("bfloat16", 2e-2), ("int8", 0.15)])
def test_narrow_moments_stay_near_those_of_float32(moments: Any, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    start = weight.clone()
    found = {}
    for kind in ("float32", moments):
        rule, mine = AdamW(betas=(0.9, 0.95), eps=1e-8, moments=kind), start.clone()
        state = rule.state("w", mine)
        for step in range(1, 11):
            gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
            each = Trained(fqn="w", weight=mine, gradient=gradient, state=state, step=torch.tensor(float(step)))
            rule.update([each], lr=1e-2, decay=0.1)
        found[kind] = mine
    moved = (found["float32"] - start).norm()
    assert 0.0 < (found[moments] - found["float32"]).norm() <= most * moved


def test_small_weights_keep_moments_in_float32(model: Parallelized) -> None:
    state = build_optimizer(model, OptimizerConfig(moments="int8")).state()
    assert state["state.model.norm.weight.exp_avg_sq"].dtype == torch.float32
    assert state["state.model.layers.0.mlp.up_proj.weight.exp_avg_codes"].dtype == torch.uint8
    assert state["state.model.layers.0.mlp.up_proj.weight.exp_avg_root_scales"].shape == (96, 4)


def test_averages_begin_with_the_weights_and_follow_them(model: Parallelized) -> None:
    weight = model.named_parameters()["model.norm.weight"]
    optimizer = build_optimizer(model, OptimizerConfig(ema_decay=0.75))
    weight.data.fill_(2.0)  # as a checkpoint that is loaded after the optimizer is built
    seen = []
    for _ in range(2):
        _backward(model)
        optimizer.step(1e-2)
        optimizer.zero_grad()
        seen.append(weight.detach().clone())
    expected = 0.75 * (0.75 * 2.0 + 0.25 * seen[0]) + 0.25 * seen[1]
    with optimizer.averaged():
        assert torch.allclose(weight, expected, rtol=1e-6)
    assert torch.equal(weight, seen[1])


def test_an_own_rule_that_fails_names_the_weight(model: Parallelized) -> None:
    def update(*_: Any, **__: Any) -> None:
        raise KeyError("momentum")

    optimizer = build_optimizer(model, OptimizerConfig(), spec=OptimizerSpec(name="mine", state={}, update=update))
    _backward(model)
    with pytest.raises(
        OwnCodeError, match=r"in update: OptimizerSpec.update\('model.embed_tokens.weight'\) raised KeyError"
    ):
        optimizer.step(1e-3)


@pytest.mark.parametrize("change", [{"momentum": 1.0}, {"ema_decay": -0.1}, {"ema_decay": 1.0}, {"muon_iterations": 0}])
def test_numbers_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        check_numbers(OptimizerConfig(**change))
