"""From a model's shape and a mesh to a model that trains on it.

The order is fixed: build on the meta device (no memory) -> float8 -> tensor parallel -> activation checkpointing -> compile ->
FSDP -> allocate this rank's shards -> initialise them. Pipeline parallelism is outside: each stage is a decoder of its own that
goes through the same steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import RankMesh, init_rank_mesh, pipeline_ends
from titan_ckpt.trainer.model.attention import Attend, FlexAttend
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig, SelfAttention, initial_std
from titan_ckpt.trainer.model.loss import TokenLoss
from titan_ckpt.trainer.parallel.config import ParallelConfig, layer_ranges, stages_of_rank
from titan_ckpt.trainer.parallel.context import AllGatherAttend, RingAttend
from titan_ckpt.trainer.parallel.initialize import fill_normal
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.precision import apply_float8, mixed_precision
from titan_ckpt.trainer.parallel.recompute import apply_activation_checkpointing, apply_compile
from titan_ckpt.trainer.parallel.tensor import apply_tensor_parallel, overlap_with_products


def build_parallel_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    mesh: MeshSpec,
    *,
    device: torch.device,
    seed: int,
    extend: Callable[[Decoder, RankMesh], set[str]] | None = None,
) -> Parallelized:
    """This rank's part of the model, sharded and initialised; collective. A seed gives the same weights on every mesh.

    `extend` adds modules to a decoder while it is on the meta device; it returns the FQNs whose gradients are partial over tp.
    """
    ranks = init_rank_mesh(mesh, device)
    layers = layer_ranges(model, parallel, mesh)
    stages = stages_of_rank(parallel, mesh, ranks.coordinate["pp"])
    parts, partial = [], set()
    for stage in stages:
        with torch.device("meta"):
            part = Decoder(model, layers[stage])
        partial |= extend(part, ranks) if extend is not None else set()
        partial |= parallelize(part, model, parallel, ranks)
        allocate(part, parallel, ranks)
        initialize(part, model, ranks, seed)
        parts.append(part)
    return Parallelized(
        model=model, parallel=parallel, ranks=ranks, parts=parts, stages=stages, partial_over_tp=frozenset(partial),
        tied_group=pipeline_ends(mesh) if model.tied_embeddings and mesh.degree("pp") > 1 else None,
    )  # fmt: skip


def parallelize(part: Decoder, model: ModelConfig, parallel: ParallelConfig, ranks: RankMesh) -> set[str]:
    """Apply everything but pipeline parallelism to a decoder on the meta device; returns FQNs of gradients partial over tp."""
    partial: set[str] = set()
    set_attention(part, model, parallel, ranks)
    loss = TokenLoss(chunk_tokens=parallel.loss_chunk_tokens)
    tp_mesh = ranks.tp_mesh()
    apply_float8(part, parallel, ranks.device)
    if part.lm_head is not None:
        part.lm_head.loss = loss
    if tp_mesh is not None:
        if parallel.async_tp:
            overlap_with_products(tp_mesh, ranks.device)
        partial |= set(
            apply_tensor_parallel(
                part,
                tp_mesh,
                sequence_parallel=parallel.sequence_parallel,
                loss=loss,
                loss_parallel=parallel.loss_parallel,
            )
        )
    apply_activation_checkpointing(part.model.layers, parallel)
    if parallel.compile:
        apply_compile(part.model.layers)
    if needs_fsdp(parallel, ranks.spec):
        apply_fsdp(part, parallel, ranks)
    return partial


def set_attention(part: Decoder, model: ModelConfig, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """Share one attention kernel among all layers: context parallel if cp > 1, FlexAttention if configured."""
    attend: Attend
    if ranks.cp_group is not None:
        kind = RingAttend if parallel.cp_method == "ring" else AllGatherAttend
        attend = kind(ranks.cp_group, model.sliding_window)
    elif parallel.attention == "flex":
        if ranks.device.type == "cpu":
            raise ConfigError("attention=flex on a CPU: torch's FlexAttention has no backward there; use sdpa")
        attend = FlexAttend(model.sliding_window)
    else:
        return
    for module in part.modules():
        if isinstance(module, SelfAttention):
            module.attend = attend


def needs_fsdp(parallel: ParallelConfig, mesh: MeshSpec) -> bool:
    """Whether weights are sharded, replicated, cast or offloaded."""
    is_spread = mesh.degree("dp_replicate+dp_shard+cp") > 1
    return is_spread or parallel.cpu_offload or (parallel.param_dtype, parallel.reduce_dtype) != ("float32", "float32")


def apply_fsdp(part: Decoder, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """FSDP2: one group per block, one for the head and final norm, the rest in the root's."""
    mesh, policy = ranks.fsdp_mesh(), mixed_precision(parallel)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu") if parallel.cpu_offload else OffloadPolicy()
    reshard = reshards_after_forward(parallel, ranks.spec)

    def shard(module: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for block in part.model.layers.values():
        shard(block, reshard=reshard)
    if not part.tied_embeddings:  # a tied weight is used first and last, so it stays in the root's group
        if part.model.embed_tokens is not None:
            shard(part.model.embed_tokens, reshard=reshard)
        if part.lm_head is not None and part.model.norm is not None:
            shard([part.model.norm, part.lm_head], reshard=False)
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


def allocate(part: Decoder, parallel: ParallelConfig, ranks: RankMesh) -> None:
    """Allocate this rank's shards, uninitialised."""
    part.to_empty(device="cpu" if parallel.cpu_offload else ranks.device)
    part.tie()


@torch.no_grad()
def initialize(part: Decoder, model: ModelConfig, ranks: RankMesh, seed: int) -> None:
    """Initialise the shards; values depend only on the seed and the position in the global weight."""
    for fqn, parameter in part.named_weights():
        std = initial_std(fqn, model.n_layers)
        if std is None:
            parameter.fill_(0.0 if fqn.endswith(".bias") else 1.0)
        else:
            fill_normal(parameter, fqn, std, seed, ranks.spec, ranks.coordinate)
