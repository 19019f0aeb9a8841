"""The products of experts: grouped, one expert at a time, and in another dtype than the rest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.experts.test_mixtures import EIGHT, filled, hidden
from titan_ckpt.debug.record.recorder import Recorder
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model import by_expert, linear
from titan_ckpt.trainer.model.by_expert import Products, grouped_product, looped_product
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.experts import ClampedExperts, Experts
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.precision import describe_precision
from tools.rank_pool import RankPool
from tools.training.curves import GPT_OSS, MIXTURE, SMALL, Curve, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize(("dim", "dtype"), [(32, torch.float32), (32, torch.bfloat16), (6, torch.float32)])
def test_grouped_products_equal_the_loop(dim: int, dtype: torch.dtype) -> None:
    counts_E = torch.tensor([3, 0, 9, 4])
    x_NI = hidden(16, dim).to(dtype).requires_grad_()
    weights_EOI = hidden(4, 24, dim, seed=2).to(dtype).requires_grad_()
    grads = []
    for product in (grouped_product, looped_product):
        y_NO = product(x_NI, weights_EOI, counts_E)
        grads.append((y_NO, *torch.autograd.grad(y_NO.float().square().sum(), (x_NI, weights_EOI))))
    torch.testing.assert_close(*grads)
    assert grads[0][2][1].count_nonzero() == 0


@pytest.mark.parametrize("make", [Experts, ClampedExperts])
def test_one_expert_at_a_time_equals_grouped_products(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = filled(make(replace(EIGHT, limit=7.0), 16))
    x_ND, counts_E = hidden(16, 16).requires_grad_(), torch.tensor([3, 0, 9, 4, 0, 0, 0, 0])
    found = []
    for by_onednn in (linear.by_onednn, lambda *_: False):
        monkeypatch.setattr(by_expert, "by_onednn", by_onednn)
        y_ND = experts.compute(x_ND, counts_E)
        found.append((y_ND, *torch.autograd.grad(y_ND.square().sum(), (x_ND, *experts.parameters()))))
    torch.testing.assert_close(*found)
    experts.requires_grad_(False)
    monkeypatch.undo()
    torch.testing.assert_close(
        torch.autograd.grad(experts.compute(x_ND, counts_E).square().sum(), x_ND)[0], found[0][1]
    )


@pytest.mark.parametrize("make", [Experts, ClampedExperts])
@pytest.mark.parametrize("by_onednn", [linear.by_onednn, lambda *_: False])
def test_products_in_bfloat16_are_those_of_experts_cast_to_it(
    make: Any, by_onednn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_expert, "by_onednn", by_onednn)
    experts, x_ND, counts_E = filled(make(replace(EIGHT, limit=7.0), 16)), hidden(16, 16), torch.tensor([3, 0, 9, 4])
    counts_E = torch.nn.functional.pad(counts_E, (0, 4))
    narrow = filled(make(replace(EIGHT, limit=7.0), 16)).to(BF16)
    expected = narrow.compute(x_ND.to(BF16), counts_E)
    expected.float().square().sum().backward()
    experts.products = Products(dtype=BF16)
    found = experts.compute(x_ND, counts_E)
    found.square().sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=0.0, atol=2**-6 * float(found.detach().abs().max()))
    for mine, theirs in zip(experts.parameters(), narrow.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad.float(), rtol=0.0, atol=2**-5 * float(mine.grad.abs().max()))


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        mesh(ep=2, experts_dtype="bfloat16"),
        mesh(tp=2, experts_dtype="bfloat16"),
        mesh(ep=4, activation_checkpoint="selective", experts_dtype="bfloat16"),
        mesh(ep=2, tp=2, experts_dtype="mxfp8"),
    ],
    ids=str,
)
def test_experts_in_narrow_dtypes_on_meshes(ranks: RankPool, parallel: ParallelConfig) -> None:
    bar = 2**-8 if parallel.experts_dtype == "bfloat16" else 2**-6
    run = CurveCase(model=MIXTURE, parallel=parallel, steps=5)
    losses = ranks.run(train, run)[0].losses
    exact = single(replace(run, parallel=mesh()))
    narrow = single(replace(run, parallel=mesh(experts_dtype=parallel.experts_dtype))).losses
    assert relative_error(losses, narrow) <= bar
    assert 0 < relative_error(narrow, exact.losses) <= bar


def test_the_dtype_of_experts_is_said_and_needs_experts() -> None:
    parallel = mesh(experts_dtype="bfloat16")
    check_fits(decoder(MIXTURE), parallel, mesh_spec(parallel, 1), seq_len=48, microbatch_size=1)
    assert "products float32, those of experts bfloat16," in describe_precision(parallel, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r'mesh\.experts_dtype = "bfloat16", but the model has no experts'):
        check_fits(decoder(SMALL), parallel, mesh_spec(parallel, 1), seq_len=48, microbatch_size=1)


def recorded(rank: int, run: CurveCase) -> Curve:
    with tempfile.TemporaryDirectory() as folder, Recorder.start(folder, rank=rank, world_size=4, stall_s=0):
        return train(rank, run)


@pytest.mark.dist
def test_a_compiled_ring_can_be_recorded(ranks: RankPool) -> None:
    run = CurveCase(model=SMALL, parallel=mesh(cp=4, compile=True), steps=2)
    found, expected = ranks.run(recorded, run)[0], single(replace(run, parallel=mesh()))
    assert relative_error(found.losses, expected.losses) <= 1e-5


@pytest.mark.dist
def test_compiled_blocks_leave_their_mixtures_as_they_are(ranks: RankPool) -> None:
    parallel = mesh(ep=2, tp=2, compile=True, activation_checkpoint="full")
    run = CurveCase(model=MIXTURE, parallel=parallel, steps=4)
    found, expected = ranks.run(train, run)[0], single(replace(run, parallel=mesh()))
    assert relative_error(found.losses, expected.losses) <= 1e-5
    assert found.loads == expected.loads


@pytest.mark.parametrize("config", [MIXTURE, GPT_OSS])
def test_experts_in_mxfp8_are_near_those_in_float32(config: ModelConfig) -> None:
    run = CurveCase(model=config, parallel=mesh(experts_dtype="mxfp8"), steps=3)
    found, exact = single(run).losses, single(replace(run, parallel=mesh())).losses
    assert 0 < relative_error(found, exact) <= 2**-6


def test_mxfp8_needs_blocks_of_32() -> None:
    parallel, odd = mesh(experts_dtype="mxfp8"), replace(MIXTURE, experts=replace(EIGHT, ffn_dim=40))
    with pytest.raises(ConfigError, match="gate_up_proj has a side of 80, not a multiple of 32"):
        check_fits(decoder(odd), parallel, mesh_spec(parallel, 1), seq_len=48, microbatch_size=1)
