"""The collectives of tensor parallelism, each the gradient of another.

From Megatron-LM (arXiv 1909.08053) and sequence parallelism (arXiv 2205.05198):

    sequence parallel   entering a region: all-gather along S     leaving: reduce-scatter along S
    without             entering: nothing (backward: all-reduce)   leaving: all-reduce (backward: nothing)

A module that every rank computes in whole takes all tokens and returns its own: `whole` gathers, backward keeps its own part;
`part` does the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE = 1  # dimension of S in x_BSD
FEATURES = -1
_ops = torch.ops._c10d_functional  # collectives that the compiler can see


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE) -> Tensor:
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(whole.chunk(group.size()), dim=dim)


def _own(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


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


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own(grads[0], ctx.group, ctx.dim), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own(x, group, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of a region; the gradients of the ranks are parts of a sum."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over ranks."""
    out: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`; the gradients of the ranks are parts of a sum."""
    out: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks."""
    out: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def whole(x: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE) -> Tensor:
    """All parts along `dim`, for a computation that all ranks repeat, so that their gradients are equal."""
    out: Tensor = _Whole.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return out


def part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of a result that all ranks have."""
    out: Tensor = _Part.apply(x, group)  # type: ignore[no-untyped-call]
    return out
