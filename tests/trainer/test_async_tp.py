"""Asynchronous tensor parallelism: the ring equals plain products, in models too; the compiler fuses the regions of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.attention import SdpaAttend
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.model.loss import TokenLoss
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.model.rope import rotation
from titan_ckpt.trainer.model.stages import BlockRange, build_stage
from titan_ckpt.trainer.parallel.local_weights import local_tensor, on_local_weights
from titan_ckpt.trainer.parallel.overlap.around import gather_products, products_scatter
from titan_ckpt.trainer.parallel.overlap.regions import RingRegion
from titan_ckpt.trainer.parallel.tensor import TensorMethod, apply_tensor_parallel
from tools.rank_pool import RankPool
from tools.training.curves import DEEPSEEK, EVERYTHING, SMALL, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh

BAR = 1e-6  # of the largest value, float32


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _draw(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


def _furthest(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    pairs = list(zip(found, expected, strict=True))
    assert all(a is not None and b is not None for a, b in pairs)
    return max(_distance(a, b) for a, b in pairs if a is not None and b is not None)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gathered(rank: int, batch: int, has_bias: bool) -> float:
    """Two projections of a gathered input, one more use of it, and all gradients, against products of the whole tensors."""
    world = dist.get_world_size()
    xs = [_draw(batch, 6, 32, seed=r).requires_grad_() for r in range(world)]
    ones = [_draw(24, 32, seed=10 + r).requires_grad_() for r in range(world)]
    twos = [_draw(16, 32, seed=30 + r).requires_grad_() for r in range(world)]
    biases = [_draw(24, seed=50 + r).requires_grad_() for r in range(world)]
    outputs, total = [], torch.zeros(())
    for r in range(world):
        whole = torch.cat(xs, dim=1)
        first, second = F.linear(whole, ones[r], biases[r] if has_bias else None), F.linear(whole, twos[r])
        outputs.append((whole, first, second))
        total = total + first.square().sum() + second.sin().sum() + whole.exp().sum()
    total.backward()  # type: ignore[no-untyped-call]
    mine = [xs[rank], ones[rank], twos[rank], *([biases[rank]] if has_bias else [])]
    expected = [*outputs[rank], *(tensor.grad for tensor in mine)]
    for tensor in mine:
        tensor.grad = None
    projections = [(ones[rank], biases[rank] if has_bias else None), (twos[rank], None)]
    whole, (first, second) = gather_products(xs[rank], projections, _world())
    (first.square().sum() + second.sin().sum() + whole.exp().sum()).backward()  # type: ignore[no-untyped-call]
    return _furthest([whole, first, second, *(tensor.grad for tensor in mine)], expected)


def _scattered(rank: int, batch: int, has_bias: bool) -> float:
    """A row-wise product and its sum over ranks, with gradients, against the product of the whole tensors."""
    world = dist.get_world_size()
    hs = [_draw(batch, 6 * world, 16, seed=r).requires_grad_() for r in range(world)]
    weights = [_draw(32, 16, seed=20 + r).requires_grad_() for r in range(world)]
    bias = _draw(32, seed=3).requires_grad_() if has_bias else None
    y = torch.stack([F.linear(h, w, bias) for h, w in zip(hs, weights, strict=True)]).sum(dim=0)
    y.sin().sum().backward()  # type: ignore[no-untyped-call]
    h, weight = hs[rank], weights[rank]
    expected = [h.grad, weight.grad]
    h.grad = weight.grad = None
    mine = products_scatter(h, weight, bias, _world())
    mine.sin().sum().backward()  # type: ignore[no-untyped-call]
    return _furthest([mine, h.grad, weight.grad], [y.chunk(world, dim=1)[rank], *expected])


@pytest.mark.dist
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_ring_equals_plain_products(ranks: RankPool, batch: int, has_bias: bool) -> None:
    assert max(ranks.run(_gathered, batch, has_bias)) <= BAR
    assert max(ranks.run(_scattered, batch, has_bias)) <= BAR


CASES = {
    "tp": CurveCase(parallel=mesh(tp=4, async_tp=True)),
    "fsdp x tp": CurveCase(parallel=mesh(tp=2, async_tp=True)),
    "pp x tp": CurveCase(parallel=mesh(pp=2, tp=2, async_tp=True)),
    "recomputed": CurveCase(parallel=mesh(tp=2, async_tp=True, activation_checkpoint="full")),
    "selective": CurveCase(parallel=mesh(tp=2, async_tp=True, activation_checkpoint="selective")),
    "biases, windows, documents": CurveCase(model=EVERYTHING, parallel=mesh(tp=2, async_tp=True), has_documents=True),
    "latents": CurveCase(model=DEEPSEEK, parallel=mesh(tp=2, async_tp=True)),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_a_model_around_the_ring_has_the_same_curve(ranks: RankPool, name: str) -> None:
    run = CASES[name]
    curves = ranks.run(train, run)
    alone = single(CurveCase(model=run.model, has_documents=run.has_documents))
    assert all(curve == curves[0] for curve in curves)
    assert relative_error(curves[0].losses, alone.losses) <= 1e-5
    assert relative_error(curves[0].norms, alone.norms) <= 1e-4


class _Odd(nn.Module):
    """A region that is not what the ring can overlap: `where` names the side."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down, self.where = nn.Linear(4 if where == "narrow" else 8, 8), nn.Linear(8, 8), where

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up({"up": 2 * x, "narrow": x[..., :4]}.get(self.where, x)).relu())
        return 2 * y if self.where == "region" else y


ANOTHER = r"layers\.0\.mlp\.up multiplies another tensor"
REFUSED = {"": "", "up": ANOTHER, "narrow": ANOTHER, "region": r"layers\.0\.mlp does not return"}


@pytest.mark.parametrize("where", REFUSED)
def test_a_region_that_cannot_overlap_is_named(where: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        region, x = _Odd(where), _draw(2, 6, 8, seed=1)
        expected = region(x)
        ring = RingRegion("layers.0.mlp", _world(), {"layers.0.mlp.up": region.up})
        ring.sum_output_of(region.down)
        if where:
            with pytest.raises(ConfigError, match=f"async_tp: {REFUSED[where]}.*set mesh.async_tp = false"):
                ring.leave(region(ring.enter(x)))
        else:
            assert _distance(ring.leave(region(ring.enter(x))), expected) <= BAR
    finally:
        dist.destroy_process_group()


def _compiled(_rank: int) -> tuple[dict[str, int], float]:
    """How often each operator of tensor parallelism is in the graphs of a compiled block, and how far its gradients are off."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape  # warns of its own imports

    group = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    method = TensorMethod(sequence_parallel=True, loss=TokenLoss(chunk_tokens=0), loss_parallel=True)
    plan, counts = plan_of(decoder(SMALL)), Counter[str]()
    part = build_stage(plan, BlockRange(0, len(plan.blocks)))
    apply_tensor_parallel(part, plan, group, method)
    part.to_empty(device="cpu")
    for number, (name, weight) in enumerate(part.named_parameters()):
        local_tensor(weight.data).copy_(_draw(*local_tensor(weight).shape, seed=number) / (8 if "proj" in name else 1))
    block = part.get_submodule(plan.blocks[0])
    turn, mask = rotation(SMALL.rope, torch.arange(48)[None]), SdpaAttend().plan(torch.arange(48)[None], None)

    def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        with _test_mode():
            micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        counts.update(str(node.target).partition(".")[2] for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    results = []
    for forward in (block.forward, torch.compile(block.forward, backend=backend)):
        x = _draw(2, 48 // dist.get_world_size(), 64, seed=99).requires_grad_()
        y = on_local_weights(block, forward, below=[*block.modules()][1:])(x, turn, mask)
        y.sin().sum().backward()
        results.append([y, x.grad, *(local_tensor(w.grad) for w in block.parameters() if w.grad is not None)])
        block.zero_grad()
    return counts, max(_distance(a, b) for a, b in zip(*results, strict=True))


def _register_fused_operators(_rank: int) -> None:
    """Give symmetric memory's fused operators a plain meaning on the CPU, in this process, and let the pass run without NCCL."""
    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]

    def all_gather_matmul(
        shard: Tensor, weights: list[Tensor], dim: int, name: Any, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        whole = all_gather_tensor(shard.contiguous(), dim, name)
        return (whole if return_A else None), [whole @ weight for weight in weights]

    def matmul_reduce_scatter(x: Tensor, weight: Tensor, op: str, dim: int, name: Any) -> Tensor:
        part: Tensor = reduce_scatter_tensor(x @ weight, op, dim, name)
        return part

    library.impl("fused_all_gather_matmul", all_gather_matmul, "CPU")  # type: ignore[no-untyped-call]
    library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "CPU")  # type: ignore[no-untyped-call]
    _KEPT.append(library)
    mock.patch.object(dist, "is_nccl_available", return_value=True).start()


_KEPT: list[torch.library.Library] = []


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_fuses_the_regions_of_a_block(ranks: RankPool) -> None:
    ranks.run(_register_fused_operators)
    for counts, distance in ranks.run(_compiled):
        assert distance <= 1e-5
        # both gathers and both sums forward; backward the gathers alone: a sum of several products is no product to the compiler
        assert (counts["fused_all_gather_matmul.default"], counts["fused_matmul_reduce_scatter.default"]) == (4, 2)
        assert (counts["all_gather_into_tensor.default"], counts["reduce_scatter_tensor.default"]) == (0, 2)
