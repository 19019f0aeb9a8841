"""Matrix products of fp32 weights on a CPU, by oneDNN.

torch's own are MKL's, which leaves half of an AMD processor's vector units idle: oneDNN takes 0.45 times as long there.
Everywhere else (another device or dtype, a compiled block, a tensor subclass) these are torch's own products.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The operators are not part of torch's public API: without them all products are torch's own.
_HAS_ONEDNN: bool = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.aten, "mkldnn_linear_backward_weights")
)
_FEW_ROWS = 512  # up to here a plain product gives the weight's gradient sooner: its own kernel reorders both factors
ONEDNN_PRODUCTS = (torch.ops.mkldnn._linear_pointwise.default,) if _HAS_ONEDNN else ()  # for choosing what to keep


class Linear(nn.Linear):
    """torch's `Linear`, quicker in fp32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not by_onednn(x, self.weight):
            return F.linear(x, self.weight, self.bias)
        y: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is quicker for a product of these and its gradients."""
    return _suits(x, weight) and not torch.compiler.is_compiling()


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, without a gradient."""
    if not _suits(x, weight_OI):
        return F.linear(x, weight_OI, bias_O)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return y


def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """`grad_NO.T @ x_NI`, the gradient of the weight of `product`."""
    if not _suits(x_NI, grad_NO):
        return grad_NO.T @ x_NI
    if len(x_NI) <= _FEW_ROWS:
        return product(grad_NO.T, x_NI.T)
    like_OI = grad_NO.new_empty(()).expand(grad_NO.shape[1], x_NI.shape[1])  # only its dtype and device are read
    found_OI: Tensor
    found_OI, _ = torch.ops.aten.mkldnn_linear_backward_weights(grad_NO.to_mkldnn(), x_NI.to_mkldnn(), like_OI, False)
    return found_OI


def _suits(x: Tensor, other: Tensor) -> bool:
    """Whether oneDNN is to multiply these."""
    return (
        _HAS_ONEDNN
        and x.device.type == other.device.type == "cpu"
        and x.dtype == other.dtype == torch.float32
        and type(x) in (Tensor, nn.Parameter)
        and type(other) in (Tensor, nn.Parameter)
        and x.dim() > 1
        and x.numel() > 0
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.has_bias = bias_O is not None
        return product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        grad_NO, x_NI = grads[0].flatten(0, -2), x.flatten(0, -2)
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            return grads[0] @ weight_OI, grad_NO.T @ x_NI, grad_NO.sum(dim=0) if ctx.has_bias else None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grads[0], weight_OI.T) if needs_x else None,
            weight_gradient(grad_NO, x_NI) if needs_weight else None,
            grad_NO.sum(dim=0) if needs_bias else None,
        )
