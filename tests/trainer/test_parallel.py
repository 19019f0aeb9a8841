"""Every parallelism and schedule gives the single process's loss curve; impossible combinations are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.attention import Attend
from titan_ckpt.trainer.model.decoder import Decoder, decoder
from titan_ckpt.trainer.model.stages import BlockRange
from titan_ckpt.trainer.parallel.config import (
    ParallelConfig,
    PipelineSchedule,
    check_fits,
    layer_ranges,
    mesh_spec,
    num_stages,
    stages_of_rank,
)
from titan_ckpt.trainer.parallel.context import AllGatherAttend, FlexGatherAttend, head_tail_positions
from titan_ckpt.trainer.parallel.initialize import cut_axes
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.parallel.precision import apply_float8
from tools.rank_pool import RankPool
from tools.training.curves import EVERYTHING, SMALL, Curve, CurveCase, relative_error, single, train
from tools.training.mesh_cases import MEMORY, MESHES, PRECISIONS, SCHEDULES, mesh

FP32_BAR = 1e-5


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@cache
def expected(run: CurveCase) -> Curve:
    return single(replace(run, parallel=ParallelConfig()))


def assert_same_curve(pool: RankPool, run: CurveCase, bar: float = FP32_BAR) -> None:
    curves = pool.run(train, run)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about the loss"
    reference = expected(run)
    assert relative_error(curves[0].losses, reference.losses) <= bar
    assert relative_error(curves[0].norms, reference.norms) <= 10 * bar


def named(parallel: ParallelConfig) -> str:
    return str(mesh_spec(parallel, 4))


UNUSUAL = {
    "replicas x tp": mesh(dp_replicate=2, tp=2),
    "replicas x ring": mesh(dp_replicate=2, cp=2),
    "replicas x 1f1b": mesh(dp_replicate=2, pp=2),
    "all-gather x tp, no sequence parallel": mesh(cp=2, tp=2, cp_method="all_gather", sequence_parallel=False),
    "offloaded stages": mesh(pp=2, cpu_offload=True),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_single_process_curve(ranks: RankPool, name: str) -> None:
    assert_same_curve(ranks, CurveCase(parallel=MESHES[name]))


@pytest.mark.dist
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_mesh_gives_the_single_process_curve_too(ranks: RankPool, name: str) -> None:
    assert_same_curve(ranks, CurveCase(parallel=UNUSUAL[name]))


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel", [mesh(), mesh(tp=2, sequence_parallel=False), mesh(pp=2), mesh(pp=4, pp_schedule="GPipe")], ids=named
)
def test_an_odd_sequence_fits_where_it_is_not_cut(ranks: RankPool, parallel: ParallelConfig) -> None:
    assert_same_curve(ranks, CurveCase(parallel=parallel, seq_len=47))


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_three_stages_per_rank_give_the_single_process_curve(ranks: RankPool, schedule: PipelineSchedule) -> None:
    parallel = mesh(pp=2, pp_schedule=schedule, pp_layers_per_stage=(1,) * 6)
    assert_same_curve(ranks, CurveCase(model=replace(SMALL, n_layers=6), parallel=parallel, batch_size=12))


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_recompute_under_tensor_parallelism(ranks: RankPool) -> None:
    parallel = mesh(tp=2, compile=True, activation_checkpoint="full")
    assert_same_curve(ranks, CurveCase(model=replace(SMALL, n_layers=2), steps=1, parallel=parallel))


@pytest.mark.dist
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_single_process_curve(ranks: RankPool, name: str) -> None:
    assert_same_curve(ranks, CurveCase(parallel=SCHEDULES[name]))


def _states_after_validation(_rank: int) -> list[str]:
    """The weights of the state after a forward without backward that FSDP does not divide; a step follows."""
    parallel = mesh(dp_shard=2, tp=2)
    spec = decoder(SMALL)
    model = build_parallel_model(spec, parallel, mesh_spec(parallel, 4), device=torch.device("cpu"), seed=1)
    batch = {name: torch.zeros(1, 48, dtype=torch.long) for name in ("tokens", "labels")}
    model.forward_loss(batch)
    state = model.model_state()
    whole = [fqn for fqn, weight in state.items() if "dp_shard" not in cut_axes(weight)]
    if whole:
        return whole
    for weight in state.values():
        local_tensor(weight).numpy()  # as a save does, after which a storage cannot be resized
    model.forward_backward(batch, count=48 * 2)
    return whole


@pytest.mark.dist
def test_validation_leaves_no_whole_weights_in_the_state(ranks: RankPool) -> None:
    assert ranks.run(_states_after_validation) == [[]] * 4


@pytest.mark.dist
@pytest.mark.parametrize("name", MEMORY)
def test_recomputing_activations_changes_nothing(ranks: RankPool, name: str) -> None:
    assert_same_curve(ranks, CurveCase(parallel=MEMORY[name]))


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [mesh(tp=2), mesh(tp=4, sequence_parallel=False), mesh(cp=2), mesh(cp=4, cp_method="all_gather"), mesh(pp=2)],
    ids=named,
)
def test_biases_norms_windows_and_documents_follow(ranks: RankPool, parallel: ParallelConfig) -> None:
    assert_same_curve(ranks, CurveCase(model=EVERYTHING, parallel=parallel, has_documents=True))


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel", [mesh(dp_shard=4), mesh(tp=4), mesh(tp=2), mesh(pp=4), mesh(pp=2), mesh(pp=2, tp=2)], ids=named
)
def test_tied_embeddings_stay_one_weight(ranks: RankPool, parallel: ParallelConfig) -> None:
    assert_same_curve(ranks, CurveCase(model=replace(SMALL, tied_embeddings=True), parallel=parallel))


@pytest.mark.dist
@pytest.mark.parametrize("parallel", [mesh(tp=2), mesh(pp=2)], ids=named)
def test_accumulated_parts_add_up_to_the_batch(ranks: RankPool, parallel: ParallelConfig) -> None:
    assert_same_curve(ranks, CurveCase(parallel=parallel, accumulate=2))


@pytest.mark.dist
def test_a_curve_is_bit_equal_when_run_again(ranks: RankPool) -> None:
    run = CurveCase(parallel=mesh(pp=2, tp=2))
    assert ranks.run(train, run) == ranks.run(train, run)


@pytest.mark.dist
@pytest.mark.parametrize("name", PRECISIONS)
def test_narrow_numbers_stay_near_the_float32_curve(ranks: RankPool, name: str) -> None:
    parallel, bar = PRECISIONS[name]
    run = CurveCase(parallel=parallel)
    found = ranks.run(train, run)[0]
    assert 0.0 < relative_error(found.losses, expected(run).losses) <= bar


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ({"tp": 3}, 8, r"dp_shard=-1: pp 1 x dp_replicate 1 x cp 1 x tp 3 = 3 does not divide the world of 8"),
        ({"dp_shard": 2, "tp": 2}, 8, r"pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 4, but there are 8 ranks"),
        ({"cp": 0}, 8, r"dp_shard=-1"),
    ],
)
def test_degrees_that_do_not_make_the_world_are_refused(options: Any, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh_spec(ParallelConfig(**options), world_size)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp": 8}, r"model.layers.0.self_attn.q_proj.weight: key/value heads 4 / tp 8 = 0.50"),
    ({"cp": 5}, r"seq_len 48 / 2 x cp .* 10 = 4.80"),
    ({"pp": 5}, r"4 layers over 5 stages leaves a stage without a layer: \[1, 1, 1, 1, 0\]"),
    ({"pp": 2, "pp_layers_per_stage": (2, 3)}, r"adds up to 5, the model has 4"),
    ({"pp": 2, "pp_layers_per_stage": (1, 1, 2)}, r"3 stages over pp=2"),
    ({"pp": 2, "pp_layers_per_stage": (1, 1, 1, 1)}, r"1F1B takes one stage per rank, but 4 stages / pp=2 = 2"),
    (
        {"pp": 2, "pp_schedule": "ZBVZeroBubble", "pp_layers_per_stage": (2, 2)},
        r"ZBVZeroBubble takes two stages per rank",
    ),
    ({"pp": 2, "microbatches": 3}, r"samples per forward 8 / microbatches 3"),
    ({"pp": 2, "microbatches": 1}, r"1F1B over pp=2 needs at least 2 microbatches; got 1"),
    ({"pp": 2, "pp_schedule": "DualPipeV", "microbatches": 2}, r"at least 4 microbatches; got 2"),
    ({"cp": 2, "attention": "flex"}, r"a ring merges the results of other kernels"),
    ({"activation_checkpoint": "budget"}, r"set compile=true"),
    ({"float8": "rowwise", "float8_all_gather": True}, r"float8_all_gather needs float8=tensorwise, not 'rowwise'"),
    ({"async_tp": True}, r"set both"),
    ({"async_tp": True, "tp": 2, "sequence_parallel": False}, r"set both"),
    ({"async_tp": True, "tp": 2, "float8": "tensorwise"}, r"only the compiler overlaps products in float8"),
    ({"async_tp": True, "tp": 2, "pp": 2, "pp_schedule": "ZBVZeroBubble"}, r"this schedule splits them"),
    (
        {"float8": "rowwise", "tp": 4},
        r"float8: model.layers.0.self_attn.k_proj: outputs 32 / the alignment 16 x tp 4 = 64 = 0.50",
    ),
    (
        {"float8": "mxfp8", "tp": 2},
        r"float8: model.layers.0.self_attn.k_proj: outputs 32 / the alignment 32 x tp 2 = 64 = 0.50",
    ),
    (
        {"float8": "mxfp8", "pp": 4, "microbatches": 8},
        r"float8: tokens of a forward 48 / the alignment 32 x cp 1 = 32 = 1.50",
    ),
    (
        {"pp": 2, "pp_schedule": "ZBVZeroBubble", "activation_checkpoint": "selective"},
        r"selective with ZBVZeroBubble: it allows one backward pass, and this schedule makes two",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_divide_is_refused_with_the_arithmetic(options: dict[str, Any], message: str) -> None:
    parallel = ParallelConfig(**{"dp_shard": 1} | options)
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "cp", "tp")}
    with pytest.raises(ConfigError, match=message):
        check_fits(decoder(SMALL), parallel, MeshSpec.of(degrees), seq_len=48, microbatch_size=8)


def test_tied_embeddings_are_refused_on_v_shaped_schedules() -> None:
    with pytest.raises(
        ConfigError, match=r"tied weights .lm_head.weight. with ZBVZeroBubble: a rank would have first and last stage"
    ):
        check_fits(
            decoder(replace(SMALL, tied_embeddings=True)), mesh(pp=2, pp_schedule="ZBVZeroBubble"), MeshSpec.parse("pp=2"),
            seq_len=48, microbatch_size=8,
        )  # fmt: skip


def _dense(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool) -> Tensor:
    """FlexAttention's arithmetic, differentiable on a CPU."""
    b, h, at, keys = (torch.arange(n) for n in (len(q), 1, q.shape[2], k.shape[2]))
    seen = block_mask.mask_mod(b[:, None, None, None], h[:, None, None], at[:, None], keys)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.expand(len(q), 1, -1, -1), scale=scale, enable_gqa=enable_gqa
    )


def _gathered_attention(rank: int, window: int | None, has_documents: bool) -> list[Tensor]:
    """Of this rank's half: torch's FlexAttention; SDPA's output and gradients; those of FlexAttention's arithmetic."""
    group = dist.new_subgroups(2)[0]  # type: ignore[no-untyped-call]
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 64, heads, 16, generator=generator) for heads in (4, 2, 2)]
    documents_BS = (torch.arange(64) // 23).expand(2, -1) if has_documents else None
    mine_S = head_tail_positions(64, 2, rank % 2)
    flex = FlexGatherAttend(group, window)
    flex.flex.kernel = flex_attention  # uncompiled: compiling takes 15 s
    positions_BS = mine_S.expand(2, -1)
    q, k, v = (x[:, mine_S] for x in whole)
    torchs = flex(q, k, v, flex.plan(positions_BS, documents_BS))
    flex.flex.kernel = _dense
    found: list[Tensor] = [torchs]
    kernels: tuple[Attend, ...] = (AllGatherAttend(group, window), flex)
    for kernel in kernels:
        q, k, v = (x[:, mine_S].requires_grad_() for x in whole)
        out = kernel(q, k, v, kernel.plan(positions_BS, documents_BS))
        torch.autograd.backward(out.square().sum())
        found += [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
    return found


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("window", "has_documents"), [(None, False), (20, True)])
def test_flex_attention_over_gathered_keys_equals_sdpa(
    ranks: RankPool, window: int | None, has_documents: bool
) -> None:
    for found in ranks.run(_gathered_attention, window, has_documents):
        assert len(found) == 9
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[5:], found[1:5], atol=1e-5, rtol=1e-4)


def test_flex_attention_is_refused_where_it_has_no_backward() -> None:
    with pytest.raises(ConfigError, match=r"attention=flex on a CPU"):
        single(CurveCase(parallel=mesh(attention="flex")))


def test_mxfp8_is_refused_on_an_accelerator_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    with torch.device("meta"):
        part = Decoder(SMALL)
    with pytest.raises(ConfigError, match=r"needs compute capability 10.0 or 10.3; NVIDIA H200 has 9.0"):
        apply_float8(dict(part.named_children()), mesh(float8="mxfp8"), torch.device("cuda"))


def test_layers_are_cut_evenly_or_by_list() -> None:
    two, four = MeshSpec.parse("pp=2"), MeshSpec.parse("pp=4")
    assert layer_ranges(4, mesh(pp=2), two) == [BlockRange(0, 2), BlockRange(2, 4)]
    assert layer_ranges(8, mesh(pp=4, pp_layers_per_stage=(1, 3, 3, 1)), four)[1] == BlockRange(1, 4)
    assert num_stages(mesh(pp=2, pp_schedule="Interleaved1F1B"), two) == 4


def test_a_v_schedule_brings_first_and_last_stage_together() -> None:
    four = MeshSpec.parse("pp=4")
    assert stages_of_rank(mesh(pp=4, pp_schedule="DualPipeV"), four, 0) == [0, 7]
    assert stages_of_rank(mesh(pp=4, pp_schedule="Interleaved1F1B"), four, 0) == [0, 4]


@pytest.mark.filterwarnings("ignore")  # the compiler warns while tracing
def test_blocks_are_compiled_once_and_change_nothing() -> None:
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    run = CurveCase(model=replace(SMALL, n_layers=3), steps=2)
    compiled = single(replace(run, parallel=mesh(compile=True, activation_checkpoint="selective")))
    assert relative_error(compiled.losses, expected(run).losses) <= FP32_BAR
    assert counters["stats"]["unique_graphs"] - before == 2  # one with gradients and one without, not one per block
