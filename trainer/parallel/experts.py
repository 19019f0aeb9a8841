"""Expert parallelism: each rank of `ep` has some experts of every layer; rows of tokens go to their experts and back.

The ranks of `ep` read different samples, so all other weights are sharded over `ep` as over dp_shard. Two all-to-alls with uneven
splits move rows of a layer forward, two more move gradients back; shared experts compute beside the first of each two. An
expert's gradient then lacks only the tokens of other ranks with the same experts (dp_shard, cp), over which FSDP sums it.

With `etp` the ranks of tp have a part of each expert's features. All get the rows of all, and what they compute of a row is added
up on the rank that it came from. A gradient then has the tokens of all ranks of tp.

Shapes: N rows of this rank sorted by expert, M rows received, E experts, L experts of this rank, P ranks of a group, D model dim,
F features of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.device_mesh import RankMesh
from titan_ckpt.trainer.model.by_expert import Products, grouped_product
from titan_ckpt.trainer.model.experts import BalanceConfig, Beside, Compute, Exchange, Experts, inverse, permuted
from titan_ckpt.trainer.model.plan import Plan, routers_of
from titan_ckpt.trainer.model.stages import here
from titan_ckpt.trainer.parallel.config import divided_weights
from titan_ckpt.trainer.parallel.local_weights import SHARES

_ops = torch.ops._c10d_functional


def shard_experts(part: nn.Module, plan: Plan, ranks: RankMesh, *, etp: int) -> set[str]:
    """Leave this rank its experts, consecutive ones, and with `etp` its part of each; send rows to the others'.

    Returns the FQNs of weights that tp cuts, whose gradients are not partial over tp.
    """
    by_expert = None if ranks.expert_mesh is None else ranks.expert_mesh[ranks.expert_axes]
    exchange: Exchange | None = None if by_expert is None else AllToAll(by_expert.get_group())
    if etp > 1:
        exchange = through(exchange, ToAll(ranks.group("tp")))
    cut: set[str] = set()
    for fqn, module in here(part, plan.experts) if exchange is not None else ():
        divided = divided_weights(fqn, module) if etp > 1 else {}
        module.__dict__["exchange"] = exchange
        if etp > 1 and isinstance(module, Experts):
            _pair(module, ranks.group("tp"))
        for path, weight in list(module.named_parameters()):
            owner, name = module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            dim = divided.get(path)
            if dim is not None or by_expert is not None:
                owner.register_parameter(name, _shard(weight, ranks, dim))
            if dim is None and etp > 1:
                owner.__dict__[SHARES] = {**getattr(owner, SHARES, {}), name: 1.0 / etp}
        cut |= {f"{fqn}.{name}" for name, dim in divided.items() if dim is not None}
    return cut


def _shard(weight: Tensor, ranks: RankMesh, dim: int | None) -> nn.Parameter:
    """This rank's experts of a weight, and of dimension `dim` what it has along tp."""
    mesh = ranks.device_mesh if ranks.expert_mesh is None else ranks.expert_mesh
    cuts = {} if ranks.expert_mesh is None else {ranks.expert_axes: 0}
    cuts |= {} if dim is None else {"tp": dim}
    mine = weight.detach()
    for axis, at in cuts.items():
        mine = mine.chunk(mesh[axis].size(), at)[mesh[axis].get_local_rank()]
    placements = [Shard(at) for at in cuts.values()]
    return nn.Parameter(DTensor.from_local(mine.contiguous(), mesh[tuple(cuts)], placements, run_check=False))


def _pair(experts: Experts, group: dist.ProcessGroup) -> None:
    """Let gate and up of the same features meet, those of all experts in one exchange."""
    experts.pair = partial(paired, group=group)
    experts.products = replace(experts.products, multiply=experts.products.multiply or grouped_product)


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


class ToAll:
    """An `Exchange` between ranks that each have a part of every expert: all get the rows of all, whose results are added up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._exchange = AllToAll(group)

    def __call__(self, compute: Compute, rows_ND: Tensor, counts_E: Tensor, beside: Beside) -> Tensor:
        """Send each row to every rank, compute there, and add up the results."""
        ranks = self._group.size()
        y_ND = self._exchange(compute, rows_ND.repeat(ranks, 1), counts_E.repeat(ranks), beside)
        return y_ND.view(ranks, *rows_ND.shape).sum(dim=0)


def through(outer: Exchange | None, inner: Exchange) -> Exchange:
    """Rows go to the ranks of their experts by `outer`, and from there by `inner`."""
    if outer is None:
        return inner

    def exchange(compute: Compute, rows_ND: Tensor, counts_E: Tensor, beside: Beside) -> Tensor:
        def at_experts(rows_MD: Tensor, counts_L: Tensor) -> Tensor:
            return inner(compute, rows_MD, counts_L, lambda: None)

        return outer(at_experts, rows_ND, counts_E, beside)

    return exchange


def paired(both_MF: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Gate and up [M, 2 F] of this rank's features. It has 2 F consecutive columns of all gates, then all ups.

    Of the 2 P parts of all columns, rank r has parts 2 r and 2 r + 1, and wants r and P + r.
    """
    ranks, rank = group.size(), group.rank()
    to = [2 * rank % ranks, (2 * rank + 1) % ranks]
    sent = [to.count(other) for other in range(ranks)]
    owners = [rank // 2, (ranks + rank) // 2]
    received = [owners.count(other) for other in range(ranks)]
    parts_2MF = both_MF.view(len(both_MF), 2, both_MF.shape[1] // 2).transpose(0, 1)
    mine_2MF = _move(parts_2MF if to[0] < to[1] else parts_2MF.flip(0), sent, received, group)
    return mine_2MF.transpose(0, 1).flatten(1)


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
