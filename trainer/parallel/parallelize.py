"""From a model's shape and a mesh to a model that trains on it.

The order is fixed: build on the meta device (no memory) -> float8 -> tensor parallel -> activation checkpointing -> compile ->
FSDP -> allocate this rank's shards -> initialise them. Pipeline parallelism is outside: each stage is a model of its own that
goes through the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import FSDP_AXES, RankMesh, init_rank_mesh, pipeline_ends
from titan_ckpt.trainer.model.attention import Attend, FlexAttend, check_on_cpu
from titan_ckpt.trainer.model.experts import BalanceConfig
from titan_ckpt.trainer.model.head import LmHead
from titan_ckpt.trainer.model.loss import TokenLoss
from titan_ckpt.trainer.model.plan import Plan, plan_of, routers_of
from titan_ckpt.trainer.model.stages import BlockRange, blocks_of, build_stage, here, named_weights, tie
from titan_ckpt.trainer.parallel.config import ParallelConfig, expert_axes, layer_ranges, stages_of_rank
from titan_ckpt.trainer.parallel.context import AllGatherAttend, FlexGatherAttend, RingAttend
from titan_ckpt.trainer.parallel.experts import set_balance, set_products, shard_experts
from titan_ckpt.trainer.parallel.initialize import fill
from titan_ckpt.trainer.parallel.overlap.compiled import overlap_in_compiled_blocks
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.precision import apply_float8, expert_products, mixed_precision
from titan_ckpt.trainer.parallel.recompute import apply_activation_checkpointing, apply_compile, splits_backward
from titan_ckpt.trainer.parallel.stage_forward import compute_loss_in
from titan_ckpt.trainer.parallel.tensor import TensorMethod, apply_tensor_parallel, compute_on_shards
from titan_ckpt.trainer.parallel.varlen import VarlenAttend
from titan_ckpt.trainer.seams.boundary import calling
from titan_ckpt.trainer.seams.loss import Loss
from titan_ckpt.trainer.seams.model import ModelSpec


def build_parallel_model(
    spec: ModelSpec,
    parallel: ParallelConfig,
    mesh: MeshSpec,
    *,
    device: torch.device,
    seed: int,
    loss: Loss | None = None,
    metrics: Sequence[Loss] = (),
    balance: BalanceConfig | None = None,
    extend: Callable[[nn.Module, Plan, RankMesh], set[str]] | None = None,
) -> Parallelized:
    """This rank's part of the model, sharded and initialised; collective. A seed gives the same weights on every mesh.

    `loss` replaces the spec's; `metrics` are computed with it where there are no gradients. `extend` adds modules to a stage on
    the meta device; it returns the FQNs whose gradients are partial over tp.
    """
    ranks = init_rank_mesh(mesh, device, expert_axes=expert_axes(parallel, mesh))
    model = _build(spec, parallel, ranks, seed=seed, losses=(loss or spec.loss, *metrics), extend=extend)
    is_cut = parallel.sequence_parallel
    for part in model.parts:
        set_balance(part, balance or BalanceConfig(), ranks, is_sequence_cut=is_cut)
    return model


def build_frozen_model(spec: ModelSpec, parallel: ParallelConfig, ranks: RankMesh, *, seed: int) -> Parallelized:
    """A second model on the mesh of the first, without loss and gradients; collective."""
    model = _build(spec, parallel, ranks, seed=seed, losses=(), extend=None)
    for weight in model.named_parameters().values():
        weight.requires_grad_(False)
    return model


def _build(
    spec: ModelSpec,
    parallel: ParallelConfig,
    ranks: RankMesh,
    *,
    seed: int,
    losses: Sequence[Loss],
    extend: Callable[[nn.Module, Plan, RankMesh], set[str]] | None,
) -> Parallelized:
    plan, mesh = plan_of(spec), ranks.spec
    ranges = layer_ranges(len(plan.blocks), parallel, mesh)
    stages = stages_of_rank(parallel, mesh, ranks.coordinate["pp"])
    parts, partial = [], set()
    for stage in stages:
        part = build_stage(plan, ranges[stage])
        partial |= extend(part, plan, ranks) if extend is not None else set()
        partial |= parallelize(part, plan, parallel, ranks)
        allocate(part, spec, parallel, ranks)
        initialize(part, spec, ranks, seed)
        compute_loss_in(part, spec, losses, parallel, _ends(ranges[stage], plan))
        parts.append(part)
    return Parallelized(
        plan=plan, parallel=parallel, ranks=ranks, parts=parts, stages=stages, partial_over_tp=frozenset(partial),
        tied_group=pipeline_ends(mesh) if spec.tied and mesh.degree("pp") > 1 else None,
    )  # fmt: skip


def _ends(blocks: BlockRange, plan: Plan) -> tuple[bool, bool]:
    """Whether a stage is the first, and the last."""
    return blocks.start == 0, blocks.end == len(plan.blocks)


def parallelize(part: nn.Module, plan: Plan, parallel: ParallelConfig, ranks: RankMesh) -> set[str]:
    """Apply everything but pipeline parallelism to a stage on the meta device; returns FQNs of gradients partial over tp."""
    partial: set[str] = set()
    set_attention(part, plan, parallel, ranks)
    loss = TokenLoss(chunk_tokens=parallel.loss_chunk_tokens)
    tp_mesh = ranks.tp_mesh()
    blocks = blocks_of(plan, part)
    eager = mixtures_of(plan)
    apply_float8(blocks, parallel, ranks.device)
    for module in part.modules():
        if isinstance(module, LmHead):
            module.loss = loss
    if tp_mesh is not None:
        if parallel.async_tp and parallel.compile:
            overlap_in_compiled_blocks(tp_mesh, ranks.device)
        method = TensorMethod(
            sequence_parallel=parallel.sequence_parallel, loss=loss, loss_parallel=parallel.loss_parallel,
            around_ring=parallel.async_tp and not parallel.compile,
        )  # fmt: skip
        partial |= set(apply_tensor_parallel(part, plan, tp_mesh, method))
    if parallel.experts_dtype != "param_dtype":
        set_products(part, plan, expert_products(parallel, ranks.device))
    partial -= shard_experts(part, plan, ranks, etp=parallel.etp)
    if tp_mesh is not None or ranks.expert_mesh is not None:
        compute_on_shards(part, but=(*plan.blocks, *plan.units) if parallel.compile else (), yet=eager)
    # Neither modules that are left out nor a recomputation that two passes share can be inside what is compiled.
    is_first = bool(eager) or splits_backward(parallel)
    if parallel.compile and is_first:
        apply_compile(blocks, eager=eager)
    order = (*plan.blocks, *plan.units)
    apply_activation_checkpointing({order.index(fqn): block for fqn, block in blocks.items()}, parallel)
    if parallel.compile and not is_first:
        apply_compile(blocks)
    if needs_fsdp(parallel, ranks.spec):
        apply_fsdp(part, plan, parallel, ranks)
    return partial


def mixtures_of(plan: Plan) -> tuple[str, ...]:
    """The modules that hold experts and their router; experts alone if they are right in a block."""
    parents = {fqn: fqn.rpartition(".")[0] for fqn in plan.experts}
    return tuple(fqn if parent in (*plan.blocks, *plan.units) else parent for fqn, parent in parents.items())


def set_attention(part: nn.Module, plan: Plan, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """Share attention kernels among blocks with the same window: context parallel if cp > 1, the configured kernel."""
    modules = [module for _, module in here(part, plan.attention)]
    if ranks.cp_group is None and parallel.attention == "sdpa":
        return
    if modules and ranks.device.type == "cpu":
        check_on_cpu(parallel.attention)
    kernels: dict[tuple[int | None, float | None], Attend] = {}
    for module in modules:
        window, scale = getattr(module.attend, "window", None), getattr(module.attend, "scale", None)
        if (window, scale) not in kernels:
            kernels[window, scale] = _kernel(window, scale, parallel, ranks)
        module.__dict__["attend"] = kernels[window, scale]


def _kernel(window: int | None, scale: float | None, parallel: ParallelConfig, ranks: RankMesh) -> Attend:
    if parallel.attention == "varlen":
        return VarlenAttend(ranks.cp_group, window, scale)
    if ranks.cp_group is None:
        return FlexAttend(window, scale)
    if parallel.cp_method == "ring":
        return RingAttend(ranks.cp_group, window, scale, is_eager=parallel.compile)
    if parallel.attention == "flex":
        return FlexGatherAttend(ranks.cp_group, window, scale)
    return AllGatherAttend(ranks.cp_group, window, scale)


def needs_fsdp(parallel: ParallelConfig, mesh: MeshSpec) -> bool:
    """Whether weights are sharded, replicated, cast or offloaded."""
    is_spread = mesh.degree(f"dp_replicate+{FSDP_AXES}") > 1
    return is_spread or parallel.cpu_offload or (parallel.param_dtype, parallel.reduce_dtype) != ("float32", "float32")


def apply_fsdp(part: nn.Module, plan: Plan, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """FSDP2: one group per block, one for each module before them, one for those after, the rest in the root's.

    Experts that ep divides are groups of their own, over fewer ranks.
    """
    mesh, policy = ranks.fsdp_mesh(), mixed_precision(parallel)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu") if parallel.cpu_offload else OffloadPolicy()
    reshard = reshards_after_forward(parallel, ranks.spec)

    def shard(module: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    if ranks.expert_mesh is not None:  # before their blocks, whose groups then leave them out
        for _, experts in here(part, plan.experts):
            fully_shard(
                experts,
                mesh=ranks.expert_fsdp_mesh(),
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=offload,
            )
    for block in blocks_of(plan, part).values():
        shard(block, reshard=reshard)
    if not plan.spec.tied:  # a tied weight is used first and last, so it stays in the root's group
        for _, module in here(part, plan.first):
            shard(module, reshard=reshard)
        if after := [module for _, module in here(part, plan.last)]:
            shard(after, reshard=False)
    shard(part, reshard=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is a sum already divided by all ranks' tokens
            module.set_force_sum_reduction_for_comms(True)


def reshards_after_forward(parallel: ParallelConfig, mesh: MeshSpec) -> bool:
    """Whether a block's weights are freed between forward and backward (ZeRO-3) or kept (ZeRO-2)."""
    if parallel.reshard_after_forward == "auto":
        return mesh.degree("pp") == 1
    return parallel.reshard_after_forward == "always"


def allocate(part: nn.Module, spec: ModelSpec, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """Allocate this rank's shards, uninitialised, and compute the buffers."""
    part.to_empty(device="cpu" if parallel.cpu_offload else ranks.device)
    tie(spec, part)
    for _, router in routers_of(part):
        router.reset_state(ranks.device)
    if spec.fill_buffers is not None:
        with calling("ModelSpec.fill_buffers", spec.fill_buffers):
            spec.fill_buffers(part)


@torch.no_grad()
def initialize(part: nn.Module, spec: ModelSpec, ranks: RankMesh, seed: int) -> None:
    """Initialise the shards; values depend only on the seed and the position in the global weight."""
    for fqn, parameter in named_weights(spec, part):
        fill(parameter, fqn, spec, seed, ranks.spec, ranks.coordinate)
