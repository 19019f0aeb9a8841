"""Tensor parallelism: weights become DTensors sharded over `tp`; computation uses their local tensors.

Whole weights that see only some of the tokens or heads (`Shared`) have gradients that are partial sums;
`apply_tensor_parallel` returns their names, and they are reduced once per optimizer step.

Shapes: B batch, S sequence, D model dim, V vocabulary of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.trainer.model.head import LmHead
from titan_ckpt.trainer.model.loss import TokenLoss, VocabShard
from titan_ckpt.trainer.model.plan import Plan
from titan_ckpt.trainer.model.stages import Elsewhere, tie
from titan_ckpt.trainer.parallel import collectives
from titan_ckpt.trainer.parallel.collectives import FEATURES
from titan_ckpt.trainer.parallel.local_weights import SHARES, on_local_weights
from titan_ckpt.trainer.parallel.overlap.regions import RingRegion
from titan_ckpt.trainer.seams.model import Colwise, Head, Region, Rowwise, Shared, Vocab, Whole
from titan_ckpt.trainer.seams.patterns import is_below


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMethod:
    """How tensor parallelism is done."""

    sequence_parallel: bool
    loss: TokenLoss
    loss_parallel: bool
    around_ring: bool = False  # regions compute while their tokens travel; needs sequence_parallel


def apply_tensor_parallel(part: nn.Module, plan: Plan, mesh: DeviceMesh, method: TensorMethod) -> list[str]:
    """Shard a stage over `mesh` by the rules of its plan; returns the FQNs whose gradients are partial over tp."""
    group = mesh.get_group()
    is_sequence = method.sequence_parallel
    enter = functools.partial(collectives.gather if is_sequence else collectives.copy, group=group)
    leave = functools.partial(collectives.scatter if is_sequence else collectives.reduce, group=group)
    partial: list[str] = []
    for fqn, module in list(part.named_modules()):
        rule = plan.rules.get(fqn)
        if isinstance(module, Elsewhere) or rule is None:
            continue
        match rule:
            case Region(divided=names):
                for name in names:
                    _shard_one(module, name, mesh, 0)
                before, after = _around_ring(module, fqn, plan, group) if method.around_ring else (None, None)
                _around(module, before=before or enter, after=after or leave)
            case Colwise():
                _shard(module, mesh, 0)
            case Rowwise():
                partial += _shard_rowwise(module, fqn, mesh)
            case Vocab():
                _shard(module, mesh, 0)
                module.forward = functools.partial(_lookup, module, rank=mesh.get_local_rank(), leave=leave)
            case Head():
                _shard_head(module, mesh, method)
                _around(module, before=enter)
            case Shared():
                if is_sequence or plan.is_in_region(fqn):
                    partial += [f"{fqn}.{name}" for name, _ in module.named_parameters()]
            case Whole() if is_sequence:
                _compute_whole(module, fqn, plan, group)
    tie(plan.spec, part)
    return partial


def compute_on_shards(part: nn.Module, *, but: tuple[str, ...] = (), yet: tuple[str, ...] = ()) -> None:
    """Let every module that has divided weights run on this rank's shards of them, except below `but`, yet below `yet`."""
    for fqn, module in part.named_modules():
        if not is_below(fqn, but) or is_below(fqn, yet):
            module.forward = on_local_weights(module, module.forward)


def _around(
    module: nn.Module,
    *,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Apply `before` to the first argument of a module, by position or name, and `after` to its (first) output."""
    if before is not None:

        def change_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (before(args[0]), *args[1:]), kwargs
            name = next(iter(kwargs))
            return args, kwargs | {name: before(kwargs[name])}

        module.register_forward_pre_hook(change_input, with_kwargs=True)
    if after is not None:

        def change_output(_: nn.Module, _args: Any, out: Any) -> Any:
            return (after(out[0]), *out[1:]) if isinstance(out, tuple) else after(out)

        module.register_forward_hook(change_output)


def _around_ring(
    region: nn.Module, fqn: str, plan: Plan, group: dist.ProcessGroup
) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
    """Compute a region's projections around the ring; what to do with its input and its output, None as without a ring.

    Without one are a side that has no projection, an output that several projections add up to, and one to which an adapter adds;
    and the input of a region with whole projections, such as those to latents, from which divided ones may take theirs.
    """
    projections = {f"{fqn}.{name}": module for name, module in region.named_modules() if isinstance(module, nn.Linear)}
    is_direct = not any(isinstance(plan.rules.get(name), Shared) for name in projections)
    columns = {name: m for name, m in projections.items() if is_direct and isinstance(plan.rules.get(name), Colwise)}
    rows = [module for name, module in projections.items() if isinstance(plan.rules.get(name), Rowwise)]
    ring = RingRegion(fqn, group, columns)
    is_summed = len(rows) == 1 and not rows[0]._forward_hooks
    if is_summed:
        ring.sum_output_of(rows[0])
    return ring.enter if columns else None, ring.leave if is_summed else None


def _compute_whole(module: nn.Module, fqn: str, plan: Plan, group: dist.ProcessGroup) -> None:
    """All tokens in, this rank's out; what comes before the first module and after the last is whole already."""
    enters = not is_below(fqn, plan.first)
    leaves = not is_below(fqn, plan.last)
    _around(
        module,
        before=functools.partial(collectives.whole, group=group) if enters else None,
        after=functools.partial(collectives.part, group=group) if leaves else None,
    )


def _shard_head(module: nn.Module, mesh: DeviceMesh, method: TensorMethod) -> None:
    group = mesh.get_group()
    _shard(module, mesh, 0)
    gather = functools.partial(collectives.whole, group=group, dim=FEATURES)
    if not isinstance(module, LmHead):
        _around(module, after=gather)
        return
    shard = VocabShard(
        group=group, rank=mesh.get_local_rank(), degree=mesh.size(), gather_logits=not method.loss_parallel
    )
    module.loss = TokenLoss(chunk_tokens=method.loss.chunk_tokens, shard=shard)
    module.gather = gather


def _shard_rowwise(module: nn.Module, fqn: str, mesh: DeviceMesh) -> list[str]:
    """Cut the weight along its inputs; the whole bias, of which each rank adds its share, has a partial gradient."""
    _shard_one(module, "weight", mesh, 1)
    if getattr(module, "bias", None) is None:
        return []
    module.__dict__[SHARES] = {"bias": 1.0 / mesh.size()}
    return [f"{fqn}.bias"]


def _shard(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        _shard_one(module, name, mesh, dim)


def _shard_one(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = module.get_parameter(name)
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    cut = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(cut))


def _lookup(module: nn.Module, ids_BS: Tensor, *, rank: int, leave: Callable[[Tensor], Tensor]) -> Tensor:
    """Look up the ids in this rank's vocabulary shard, zeros for other ids, then reduce over ranks."""
    weight_VD = module.get_parameter("weight")
    rows_BS = ids_BS - rank * weight_VD.shape[0]
    is_mine_BS = (rows_BS >= 0) & (rows_BS < weight_VD.shape[0])
    x_BSD = F.embedding(rows_BS.clamp(0, weight_VD.shape[0] - 1), weight_VD) * is_mine_BS[..., None]
    return leave(x_BSD)
