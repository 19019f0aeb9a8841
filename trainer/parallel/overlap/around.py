"""All-gather followed by products, and products followed by reduce-scatter, decomposed around a ring (arXiv 2302.05442).

Each rank sends to the next and receives from the one before while it multiplies:

    gather_products    y = all_gather(x) @ w.T    the part in hand is multiplied while it travels on
    products_scatter   y = reduce_scatter(h @ w.T)    a partial sum travels to its owner; each rank on the way adds its product

Each is the gradient of the other. The gradients of weights are summed part by part while the ring is busy. With P ranks, a part's
products taking p and its transfer t, either takes p + (P - 1) max(p, t) where one after the other takes P p + (P - 1) t.

Shapes: B batch, S sequence, s = S / P tokens of a rank, D inputs, F outputs. Without B too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SEQUENCE = -2  # dimension of S in x_BSD


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A tensor on its way to the next rank, and one from the rank before."""

    sent: Tensor  # must live until it has been sent
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What was received."""
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(sent: Tensor, group: dist.ProcessGroup) -> _Exchange:
    received = torch.empty_like(sent)
    before, after = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()
    sending = dist.P2POp(dist.isend, sent, group=group, group_peer=after)
    receiving = dist.P2POp(dist.irecv, received, group=group, group_peer=before)
    return _Exchange(sent, received, dist.batch_isend_irecv([sending, receiving]))


def parts_around(x: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Each rank's `x` with its rank, this one's first; the next is on its way while the caller has one."""
    size, held = group.size(), x.contiguous()
    for step in range(size):
        exchange = _pass_on(held, group) if step < size - 1 else None
        yield (group.rank() - step) % size, held
        if exchange is not None:
            held = exchange.wait()


def sum_around(
    part_of: Callable[[int], Tensor], group: dist.ProcessGroup, meanwhile: Callable[[int], None] | None = None
) -> Tensor:
    """The sum over ranks of their `part_of(this rank)`.

    `part_of(r)` is called once for each rank r, this rank last, while the sum for the rank before it travels; so is `meanwhile`.
    """
    size, rank = group.size(), group.rank()
    owners = [(rank - 1 - step) % size for step in range(size)]
    total = part_of(owners[0]).contiguous()
    for before, owner in itertools.pairwise(owners):
        exchange = _pass_on(total, group)
        mine = part_of(owner)
        if meanwhile is not None:
            meanwhile(before)
        total = exchange.wait().add_(mine)
    if meanwhile is not None:
        meanwhile(rank)
    return total


def _cut(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    return x.chunk(parts, dim=SEQUENCE)


def _join(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None], dim=SEQUENCE)


class _WeightGradient:
    """The gradients of one projection's weight [F, D] and bias [F], summed over parts of the tokens."""

    def __init__(self, weight: Tensor, *, is_needed: bool, has_bias: bool) -> None:
        self.weight = torch.zeros_like(weight) if is_needed else None
        self.bias = weight.new_zeros(weight.shape[0]) if has_bias else None

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Add that of tokens with inputs `x` [..., D] and output gradients `dy` [..., F]."""
        dy_NF = dy.flatten(0, -2)
        if self.weight is not None:
            self.weight.addmm_(dy_NF.T, x.flatten(0, -2))
        if self.bias is not None:
            self.bias += dy_NF.sum(dim=0)


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        inputs: list[Tensor | None] = [None] * group.size()
        outputs: list[list[Tensor | None]] = [[None] * group.size() for _ in weights]
        for rank, part in parts_around(x, group):
            inputs[rank] = part
            for output, weight, bias in zip(outputs, weights, biases, strict=True):
                assert weight is not None
                output[rank] = F.linear(part, weight, bias)
        whole = _join(inputs)
        ctx.group, ctx.has_bias = group, [bias is not None for bias in biases]
        ctx.save_for_backward(whole, *weights)
        ctx.set_materialize_grads(False)
        return whole, *map(_join, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        size = ctx.group.size()
        whole, *weights = ctx.saved_tensors
        sums = [
            _WeightGradient(weight, is_needed=ctx.needs_input_grad[2 + 2 * i], has_bias=has_bias)
            for i, (weight, has_bias) in enumerate(zip(weights, ctx.has_bias, strict=True))
        ]
        found = [
            (_cut(dy, size), w, total) for dy, w, total in zip(grads[1:], weights, sums, strict=True) if dy is not None
        ]
        direct, inputs = None if grads[0] is None else _cut(grads[0], size), _cut(whole, size)

        def input_gradient(rank: int) -> Tensor:
            terms = [dy[rank] @ weight for dy, weight, _ in found]
            terms += [] if direct is None else [direct[rank]]
            return torch.stack(terms).sum(dim=0) if len(terms) != 1 else terms[0]

        def weight_gradients(rank: int) -> None:
            for dy, _, total in found:
                total.add(dy[rank], inputs[rank])

        dx = sum_around(input_gradient, ctx.group, weight_gradients)
        return dx, None, *(gradient for total in sums for gradient in (total.weight, total.bias))


class _ProductsScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, group: dist.ProcessGroup, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = _cut(h, group.size())
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.save_for_backward(h, weight)
        return sum_around(lambda rank: F.linear(parts[rank], weight, bias), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        h, weight = ctx.saved_tensors
        inputs = _cut(h, ctx.group.size())
        total = _WeightGradient(weight, is_needed=ctx.needs_input_grad[2], has_bias=ctx.has_bias)
        parts: list[Tensor | None] = [None] * ctx.group.size()
        for rank, dy in parts_around(grads[0], ctx.group):
            parts[rank] = dy @ weight
            total.add(dy, inputs[rank])
        return _join(parts), None, total.weight, total.bias


def gather_products(
    x: Tensor, projections: Sequence[tuple[Tensor, Tensor | None]], group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    """All tokens of `x` [B, s, D], as [B, S, D], and their products with each weight [F, D] and bias [F], as [B, S, F]."""
    flat = [tensor for pair in projections for tensor in pair]
    whole, *products = _GatherProducts.apply(x, group, *flat)  # type: ignore[no-untyped-call]
    return whole, products


def products_scatter(h: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens, [B, s, F], of the sum over ranks of `h` [B, S, D] times weight [F, D] plus bias [F]."""
    out: Tensor = _ProductsScatter.apply(h, group, weight, bias)  # type: ignore[no-untyped-call]
    return out
