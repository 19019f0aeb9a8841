"""Tensor parallelism: weights become DTensors sharded over `tp`; computation uses their local tensors.

It takes four collectives, each the gradient of another (Megatron-LM, arXiv 1909.08053; sequence parallel, 2205.05198):

    sequence parallel   entering a region: all-gather along S     leaving: reduce-scatter along S
    without             entering: nothing (backward: all-reduce)   leaving: all-reduce (backward: nothing)

Replicated weights (norms) see only some of the tokens or heads, so their gradients are partial sums; `apply_tensor_parallel`
returns their names, and they are reduced once per optimizer step.

Shapes: B batch, S sequence, D model dim, V vocabulary of this rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model import decoder
from titan_ckpt.trainer.model.decoder import Decoder, Embedding
from titan_ckpt.trainer.model.loss import TokenLoss, VocabShard

SEQUENCE = 1  # dimension of S in x_BSD
_ops = torch.ops._c10d_functional  # collectives that the compiler can see


def apply_tensor_parallel(
    part: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, loss: TokenLoss, loss_parallel: bool
) -> list[str]:
    """Shard `part` over `mesh` according to the model's tables; returns the FQNs whose gradients are partial over tp."""
    group, rank, degree = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    enter = functools.partial(_gather if sequence_parallel else _copy, group=group)
    leave = functools.partial(_scatter if sequence_parallel else _reduce, group=group)
    partial = [fqn for fqn, module in part.named_modules() for fqn in _cut(module, fqn, mesh, sequence_parallel)]
    for fqn, module in part.named_modules():
        if fqn.rpartition(".")[2] in decoder.TENSOR_REGIONS:
            module.register_forward_pre_hook(lambda _, args: (enter(args[0]), *args[1:]))
            module.register_forward_hook(lambda _, _args, out: leave(out))
    if part.model.embed_tokens is not None:
        part.model.embed_tokens.lookup = functools.partial(_lookup, rank=rank, leave=leave)
    if part.lm_head is not None:
        shard = VocabShard(group=group, rank=rank, degree=degree, gather_logits=not loss_parallel)
        part.lm_head.loss = TokenLoss(chunk_tokens=loss.chunk_tokens, shard=shard)
        part.lm_head.register_forward_pre_hook(lambda _, args: (enter(args[0]), *args[1:]))
    part.tie()
    return partial


def overlap_with_products(mesh: DeviceMesh, device: torch.device) -> None:
    """Let the compiler split a region's collectives and matrix products into chunks that overlap (async TP).

    Needs symmetric memory, hence GPUs; ConfigError elsewhere.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"async_tp overlaps copies between GPUs with products; this device is {device}: set async_tp=false"
        )
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def _cut(module: nn.Module, fqn: str, mesh: DeviceMesh, sequence_parallel: bool) -> list[str]:
    """Replace the module's weights by DTensors; returns its FQNs whose gradient is partial over tp."""
    name = fqn.rpartition(".")[2]
    if name in decoder.NORMS_INSIDE or (name in decoder.NORMS_OUTSIDE and sequence_parallel):
        return [f"{fqn}.weight"]
    if name not in decoder.TENSOR_CUTS or not isinstance(module, nn.Linear | Embedding):
        return []
    dim = decoder.TENSOR_CUTS[name]
    _shard(module, "weight", mesh, dim)
    if getattr(module, "bias", None) is None:
        return []
    if dim == 0:
        _shard(module, "bias", mesh, 0)
        return []
    module.__dict__["bias_share"] = 1.0 / mesh.size()
    return [f"{fqn}.bias"]


def _shard(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = module.get_parameter(name)
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    cut = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(cut))


def _lookup(ids_BS: Tensor, weight_VD: Tensor, *, rank: int, leave: Any) -> Tensor:
    """Look up the ids in this rank's vocabulary shard, zeros for other ids, then reduce over ranks."""
    rows_BS = ids_BS - rank * weight_VD.shape[0]
    is_mine_BS = (rows_BS >= 0) & (rows_BS < weight_VD.shape[0])
    x_BSD = F.embedding(rows_BS.clamp(0, weight_VD.shape[0] - 1), weight_VD) * is_mine_BS[..., None]
    out: Tensor = leave(x_BSD)
    return out


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(whole.chunk(group.size()), dim=SEQUENCE)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = torch.cat(x.chunk(group.size(), dim=SEQUENCE))
    part: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))
    return part


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004 - torch's signature
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return grads[0], None


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out
