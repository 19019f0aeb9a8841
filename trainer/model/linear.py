"""Projections: fp32 weights on a CPU by oneDNN, frozen weights in NF4 by torchao.

torch's own products on a CPU are MKL's, which leaves half of an AMD processor's vector units idle: oneDNN takes 0.45 times as
long. Everywhere else (another device or dtype, a compiled block, a tensor subclass) these are torch's own products.

NF4 (QLoRA, arXiv 2305.14314) is a 4-bit code for each value and a scale for each 64 of them. The scales are 8-bit codes of their
difference from one mean of the whole weight, so a part of a weight would have other codes: a rank holds such a weight whole.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.errors import ConfigError, LoadContractError, MissingExtraError

# The operators are not part of torch's public API: without them all products are torch's own.
_HAS_ONEDNN: bool = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.aten, "mkldnn_linear_backward_weights")
)
_FEW_ROWS = 512  # up to here a plain product gives the weight's gradient sooner: its own kernel reorders both factors
ONEDNN_PRODUCTS = (torch.ops.mkldnn._linear_pointwise.default,) if _HAS_ONEDNN else ()  # for choosing what to keep
BLOCK, SCALES = 64, 256  # values that share a scale, and scales that share a factor, at most
_MISSING = ("torchao", "train", 'lora.base = "nf4"')


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


class Nf4Linear(nn.Module):
    """A frozen projection, whose weight is no parameter: nothing shards, casts, saves or initialises it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)
        self._codes: Any = None  # torchao's NF4Tensor, once `quantise` has made it

    def quantise(self, weight_OI: Tensor, name: str) -> None:
        """Take the weight `name`. LoadContractError if its values have no codes."""
        codes = _to_nf4()(weight_OI, BLOCK, math.gcd(weight_OI.numel() // BLOCK, SCALES))
        if not codes.get_original_weight().isfinite().all():
            raise LoadContractError(
                f"{name}: holds an infinity or NaN, which would spoil all values that NF4 scales with it; take the base from an "
                "intact checkpoint"
            )
        self._codes = codes

    def forward(self, x: Tensor) -> Tensor:
        """torchao's product, whose backward decodes the weight again."""
        return F.linear(x, self._codes, self.bias)


def check_nf4(name: str, linear: nn.Linear) -> None:
    """ConfigError for a projection whose weight cannot be kept in NF4; MissingExtraError without torchao."""
    if find_spec("torchao") is None:  # its import takes seconds
        raise MissingExtraError(*_MISSING)
    if type(linear) not in (nn.Linear, Linear):
        raise ConfigError(
            f'lora.base = "nf4": {name} is a {type(linear).__name__}, whose forward would be replaced by a plain product; '
            'leave it out of lora.targets, or use lora.base = "float32"'
        )
    if linear.weight.numel() % BLOCK:
        raise ConfigError(
            f'lora.base = "nf4": {name}.weight has {linear.out_features} x {linear.in_features} values, not a multiple of the '
            f'{BLOCK} that share a scale; leave it out of lora.targets, or use lora.base = "float32"'
        )


def nf4_bytes(num_values: int) -> float:
    """What a weight takes: half a byte per value, a byte per scale, 4 per factor."""
    scales = num_values // BLOCK
    return num_values / 2 + scales + 4 * scales / math.gcd(scales, SCALES)


def _to_nf4() -> Callable[[Tensor, int, int], Any]:
    try:  # an extra
        try:
            from torchao.quantization import to_nf4
        except ImportError:
            from torchao.dtypes import to_nf4  # before 0.16
    except ImportError as error:
        raise MissingExtraError(*_MISSING) from error
    found: Callable[[Tensor, int, int], Any] = to_nf4
    return found
