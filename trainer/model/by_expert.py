"""The products of experts: sorted rows through the feed-forward of each expert.

Two ways that give the same to rounding: all experts in one grouped product, torch's; and on a CPU in fp32 one expert at a time by
oneDNN, which takes half as long.

Shapes: N rows, E experts, D model dim, F expert width, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_ckpt.trainer.model.linear import by_onednn, product, weight_gradient

_ALIGNMENT_BYTES = 16  # of the rows that torch's grouped product takes
GroupedProduct: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # as `grouped_product`
Activation: TypeAlias = Callable[[Tensor], Tensor]  # from gate and up [N, 2 F] to [N, F]


class ExpertWeights(NamedTuple):
    """Of all experts: [E, 2 F, D], [E, 2 F], [E, D, F], [E, D]."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How experts multiply: in `dtype` (None: that of rows and weights), by `multiply` (None: what is quickest)."""

    dtype: torch.dtype | None = None
    multiply: GroupedProduct | None = None


def through_experts(
    activation: Activation, rows_ND: Tensor, weights: ExpertWeights, counts_E: Tensor, how: Products
) -> Tensor:
    """Rows sorted by expert, of which expert e has counts_E[e], through their experts."""
    if how.multiply is None and by_onednn(rows_ND, weights.gate_up):
        sizes, dtype = counts_E.tolist(), how.dtype or rows_ND.dtype
        y_ND: Tensor = _ByExpert.apply(activation, sizes, dtype, rows_ND, *weights)  # type: ignore[no-untyped-call]
        return y_ND
    if how.dtype is not None:
        cast = ExpertWeights._make(None if weight is None else weight.to(how.dtype) for weight in weights)
        rest = replace(how, dtype=None)
        return through_experts(activation, rows_ND.to(how.dtype), cast, counts_E, rest).to(rows_ND.dtype)
    multiply = how.multiply or grouped_product
    both_NF = multiply(rows_ND, weights.gate_up, counts_E)
    if weights.gate_up_bias is not None:
        both_NF = both_NF + of_each_row(weights.gate_up_bias, counts_E)
    y_ND = multiply(activation(both_NF), weights.down, counts_E)
    return y_ND if weights.down_bias is None else y_ND + of_each_row(weights.down_bias, counts_E)


def of_each_row(values_EO: Tensor, counts_E: Tensor) -> Tensor:
    """The values of its expert for every row: [N, O]."""
    return values_EO.repeat_interleave(counts_E, dim=0)


def grouped_product(x_NI: Tensor, weights_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows of group e times the transposed weights of e, in one call where torch has the kernel: [N, O]."""
    width = x_NI.element_size()
    is_aligned = all(size * width % _ALIGNMENT_BYTES == 0 for size in weights_EOI.shape[1:])
    if not is_aligned or not len(x_NI):
        return looped_product(x_NI, weights_EOI, counts_E)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    y_NO: Tensor = torch._grouped_mm(x_NI, weights_EOI.transpose(-2, -1), offs=ends_E)
    return y_NO


def looped_product(x_NI: Tensor, weights_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """The reference of `grouped_product`: one product for each group."""
    parts = torch.split(x_NI, counts_E.tolist())
    return torch.cat([part @ weights.T for part, weights in zip(parts, weights_EOI.unbind(), strict=True)])


class _ByExpert(torch.autograd.Function):
    """All rows through their experts, one expert at a time: what is between its two products stays in the processor's cache.

    Inputs: the activation, the rows of each expert, the products' dtype, the sorted rows, and `ExpertWeights`.
    """

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, sizes: list[int], dtype: torch.dtype, *tensors: Tensor | None
    ) -> Tensor:
        ctx.activation, ctx.sizes, ctx.dtype = activation, sizes, dtype
        rows_ND, *weights = tensors
        assert rows_ND is not None
        y_ND, boths = torch.empty_like(rows_ND), []
        groups = _each_expert(sizes, (rows_ND,), weights, dtype)
        for (y,), (rows, gate_up, gate_up_bias, down, down_bias) in zip(
            _each_expert(sizes, (y_ND,), ()), groups, strict=True
        ):
            boths.append(product(rows, gate_up, gate_up_bias))
            y.copy_(product(activation(boths[-1]), down, down_bias))
        ctx.save_for_backward(*tensors, *boths)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
        rows_ND, *saved = ctx.saved_tensors
        weights, boths = saved[:4], iter(saved[4:])
        found_ND, needed = torch.empty_like(rows_ND), ctx.needs_input_grad[4:]
        found = [_like_used(w, ctx.sizes) if is_needed else None for w, is_needed in zip(weights, needed, strict=True)]
        to_each = _each_expert(ctx.sizes, (found_ND,), found)
        groups = _each_expert(ctx.sizes, (rows_ND, grad_ND), weights, ctx.dtype)
        for (to_rows, *to_weights), (rows, grad, gate_up, _, down, _), both in zip(to_each, groups, boths, strict=True):
            to_gate_up, to_gate_up_bias, to_down, to_down_bias = to_weights
            with torch.enable_grad():
                both = both.detach().requires_grad_()
                h = ctx.activation(both)
            (to_both,) = torch.autograd.grad(h, both, product(grad, down.T))
            to_rows.copy_(product(to_both, gate_up.T))
            _write_gradients(to_gate_up, to_gate_up_bias, to_both, rows)
            _write_gradients(to_down, to_down_bias, grad, h.detach())
        return None, None, None, found_ND, *found


def _each_expert(
    sizes: list[int], by_row: Sequence[Tensor], by_expert: Sequence[Tensor | None], dtype: torch.dtype | None = None
) -> Iterator[list[Any]]:
    """For each expert with rows its part of each tensor, in `dtype`: those that are sorted by expert, those of all experts."""
    parts = [
        *(torch.split(x, sizes) for x in by_row),
        *([None] * len(sizes) if x is None else x.unbind() for x in by_expert),
    ]
    for size, *tensors in zip(sizes, *parts, strict=True):
        if size:
            yield [None if x is None else x.to(dtype or x.dtype) for x in tensors]


def _write_gradients(to_weight: Tensor | None, to_bias: Tensor | None, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Those of a product, where they are wanted."""
    if to_weight is not None:
        to_weight.copy_(weight_gradient(grad_NO, x_NI))
    if to_bias is not None:
        to_bias.copy_(grad_NO.sum(dim=0))


def _like_used(weight: Tensor, sizes: list[int]) -> Tensor:
    """For a gradient that is written expert by expert; zeros for experts without rows."""
    grad = torch.empty_like(weight)
    for part, size in zip(grad.unbind(), sizes, strict=True):
        if not size:
            part.zero_()
    return grad
