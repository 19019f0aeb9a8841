"""Expert parallelism: each rank of `ep` has some experts of every layer; rows of tokens go to their experts and back.

The ranks of `ep` read different samples, so all other weights are sharded over `ep` as over dp_shard. Two all-to-alls with uneven
splits move rows of a layer forward, two more move gradients back; shared experts compute beside the first of each two. An
expert's gradient then lacks only the tokens of other ranks with the same experts (dp_shard, cp), over which FSDP sums it.

Shapes: N rows of this rank sorted by expert, M rows received, E experts, L experts of this rank, P ranks of ep, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.device_mesh import RankMesh
from titan_ckpt.trainer.model.by_expert import Products
from titan_ckpt.trainer.model.experts import BalanceConfig, Beside, Compute, inverse, permuted
from titan_ckpt.trainer.model.plan import Plan, routers_of
from titan_ckpt.trainer.model.stages import here

_ops = torch.ops._c10d_functional


def shard_experts(part: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Leave this rank its experts, consecutive ones, and send rows to the others'."""
    exchange = AllToAll(mesh.get_group())
    for _, module in here(part, plan.experts):
        module.__dict__["exchange"] = exchange
        for owner in module.modules():
            for name, weight in list(owner.named_parameters(recurse=False)):
                mine = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].contiguous()
                cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
                owner.register_parameter(name, nn.Parameter(cut))


def set_products(part: nn.Module, plan: Plan, products: Products) -> None:
    """Let the experts multiply so; ConfigError for modules that cannot."""
    for fqn, module in here(part, plan.experts):
        if not hasattr(module, "products"):
            raise ConfigError(f'mesh.experts_dtype: {fqn} has no attribute `products`; set it to "param_dtype"')
        module.__dict__["products"] = products


def set_balance(part: nn.Module, balance: BalanceConfig, ranks: RankMesh, *, is_sequence_cut: bool) -> None:
    """Tell the routers their losses, and who has the other parts of their sequences."""
    groups = [] if ranks.cp_group is None else [ranks.cp_group]
    if is_sequence_cut and ranks.spec.degree("tp") > 1:
        groups.append(ranks.group("tp"))
    for _, router in routers_of(part):
        router.balance, router.sequence_groups = balance, tuple(groups)


class AllToAll:
    """An `Exchange` between the ranks of a group, which have equal numbers of consecutive experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, compute: Compute, rows_ND: Tensor, counts_E: Tensor, beside: Beside) -> Tensor:
        """Send each row to the rank of its expert, compute there, and fetch the results."""
        ranks = self._group.size()
        counts_PL = counts_E.view(ranks, -1)
        received_PL = _ops.wait_tensor(_send(counts_PL, [1] * ranks, [1] * ranks, self._group))
        sent, received = counts_PL.sum(dim=1).tolist(), received_PL.sum(dim=1).tolist()
        rows_MD = _move(rows_ND, sent, received, self._group, beside)
        local_L = torch.arange(received_PL.shape[1], device=rows_MD.device)
        expert_M = local_L.expand(ranks, -1).flatten().repeat_interleave(received_PL.flatten())
        order_M = expert_M.argsort(stable=True)  # from sorted by sender to sorted by expert
        y_MD = compute(permuted(rows_MD, order_M), received_PL.sum(dim=0))
        return _move(permuted(y_MD, inverse(order_M)), received, sent, self._group)


def _send(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """What the other ranks send, still under way: nothing may use it before `wait_tensor`."""
    out: Tensor = _ops.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return out


def _move(
    x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, beside: Beside | None = None
) -> Tensor:
    """Exchange rows. What `beside` computes is computed meanwhile, and so is its backward: autograd goes back in this order."""
    flight = _Flight()
    coming: Tensor = _Send.apply(x_ND, sent, received, group, flight)  # type: ignore[no-untyped-call]
    if beside is not None:
        beside()
    out: Tensor = _Arrive.apply(coming, sent, received, group, flight)  # type: ignore[no-untyped-call]
    return out


class _Flight:
    """The gradients of an exchange on their way: autograd takes no gradient of another shape than its tensor's."""

    def __init__(self) -> None:
        self.gradients: Tensor | None = None


class _Send(torch.autograd.Function):
    """Begins an exchange; in the backward ends the one of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, flight: _Flight
    ) -> Tensor:
        ctx.flight = flight
        return _send(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        coming: Tensor = _ops.wait_tensor(ctx.flight.gradients)
        ctx.flight.gradients = None
        return coming, None, None, None, None


class _Arrive(torch.autograd.Function):
    """Ends an exchange; in the backward begins the one of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, flight: _Flight
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.flight = sent, received, group, flight
        here: Tensor = _ops.wait_tensor(x)
        return here.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.flight.gradients = _send(grads[0], ctx.received, ctx.sent, ctx.group)
        return grads[0], None, None, None, None
