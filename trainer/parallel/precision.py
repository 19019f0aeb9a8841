"""Number formats: FSDP's mixed precision, the base of adapters in NF4, and Float8 and MXFP8 matrix products through torchao.

The optimizer's weights are always float32. Forward and backward compute in `param_dtype`, gradients are summed in
`reduce_dtype`. Float8 applies to the products of the blocks' projections; embedding, norms, head and adapters keep
`param_dtype`. Without hardware support the products are emulated: cast to float8 and back, multiplied in the wider type.
MXFP8 (32 elements share a scale) is emulated on CPUs only; accelerators without it are refused, since emulation is slower
than bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from titan_ckpt.errors import ConfigError, MissingExtraError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.by_expert import Products
from titan_ckpt.trainer.model.lora import LoraConfig
from titan_ckpt.trainer.parallel.config import MX_BLOCK, ParallelConfig, skips_float8

NO_LORA = LoraConfig()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def mixed_precision(parallel: ParallelConfig) -> MixedPrecisionPolicy:
    """FSDP's policy. Inputs are not cast: the embedding already returns `param_dtype`, rotations stay float32."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.param_dtype],
        reduce_dtype=DTYPES[parallel.reduce_dtype],
        cast_forward_inputs=False,
    )


def describe_precision(parallel: ParallelConfig, device: torch.device, lora: LoraConfig = NO_LORA) -> str:
    """One line for the log: the dtypes of weights, products, sums and loss."""
    products: str = parallel.param_dtype
    if parallel.float8 != "none":
        is_mx = parallel.float8 == "mxfp8"
        how = "" if (_has_mxfp8(device) if is_mx else _has_float8(device)) else ", emulated"
        name = parallel.float8 if is_mx else f"float8 {parallel.float8}"
        but = f" but for {', '.join(parallel.float8_skip)}" if parallel.float8_skip else ""
        products = f"{name} in the blocks{but} ({parallel.param_dtype} elsewhere{how})"
    if parallel.experts_dtype != "param_dtype":
        how = "" if parallel.experts_dtype != "mxfp8" or _has_mxfp8(device) else " (emulated)"
        products = f"{products}, those of experts {parallel.experts_dtype}{how}"
    base = f" (those of {', '.join(lora.targets)} {lora.base})" if lora.rank and lora.base != "float32" else ""
    return f"weights{base} and moments float32, products {products}, gradients summed in {parallel.reduce_dtype}, loss float32"


def check_base(lora: LoraConfig, parallel: ParallelConfig, mesh: MeshSpec) -> None:
    """ConfigError for a base in NF4 on a mesh, or with a method, that cannot have one."""
    if not lora.rank or lora.base == "float32":
        return
    chosen, instead = f'lora.base = "{lora.base}"', 'or keep the base with lora.base = "float32"'
    if mesh.degree("tp") > 1:
        raise ConfigError(
            f"{chosen} with tp={mesh.degree('tp')}: the scales of a weight share one mean, so that a part of it has other codes "
            f"than the whole, and torchao cuts no columns; use dp_shard, dp_replicate, pp or cp, {instead}"
        )
    if parallel.float8 != "none":
        raise ConfigError(
            f"{chosen} with float8={parallel.float8}: decoded weights are multiplied in param_dtype; set float8=none, {instead}"
        )
    if parallel.cpu_offload:
        raise ConfigError(
            f"{chosen} with cpu_offload: FSDP does not know these weights, so they stay on the device; {instead}"
        )


def apply_float8(blocks: Mapping[str, nn.Module], parallel: ParallelConfig, device: torch.device) -> None:
    """Replace the projections in the blocks by ones that multiply in float8."""
    if parallel.float8 == "none":
        return
    make = _mxfp8_factory(device) if parallel.float8 == "mxfp8" else _float8_factory(parallel, device)
    for block_fqn, block in blocks.items():
        for path, owner in list(block.named_modules(prefix=block_fqn)):
            for name, child in list(owner.named_children()):
                is_projection = isinstance(child, nn.Linear) and not isinstance(owner, nn.Linear)
                if is_projection and not skips_float8(parallel, f"{path}.{name}"):
                    setattr(owner, name, _with_adapter(make(child), child))


def _with_adapter(made: nn.Module, linear: nn.Linear) -> nn.Module:
    """`made` in place of `linear`, with the modules inside it, such as an adapter's factors, and what adds their output."""
    for name, child in linear.named_children():
        made.add_module(name, child)
    for hook in linear._forward_hooks.values():
        made.register_forward_hook(hook)
    return made


def _float8_factory(parallel: ParallelConfig, device: torch.device) -> Any:
    with _torchao("float8"):
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(parallel.float8),
        emulate=not _has_float8(device),
        enable_fsdp_float8_all_gather=parallel.float8_all_gather,
    )
    return lambda linear: Float8Linear.from_float(linear, config=config)


def expert_products(parallel: ParallelConfig, device: torch.device) -> Products:
    """How experts multiply with this `experts_dtype`."""
    if parallel.experts_dtype != "mxfp8":
        return Products(dtype=DTYPES[parallel.experts_dtype])
    kernel = _mxfp8_kernel(device, 'mesh.experts_dtype = "mxfp8"', 'use "bfloat16"')
    with _torchao("mxfp8"):
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

    def multiply(x_NI: Tensor, weights_EOI: Tensor, counts_E: Tensor) -> Tensor:
        y_NO: Tensor = _to_mxfp8_then_scaled_grouped_mm(
            x_NI, weights_EOI.contiguous().transpose(-2, -1), offs=counts_E.cumsum(0, dtype=torch.int32),
            kernel_preference=kernel, pad_token_groups_for_grouped_mm=True,
        )  # fmt: skip
        return y_NO

    return Products(dtype=torch.bfloat16, multiply=multiply)


def _mxfp8_kernel(device: torch.device, setting: str, instead: str) -> Any:
    """torchao's kernels for MXFP8: emulated on a CPU; ConfigError for a GPU without them."""
    if device.type == "cuda" and not _has_mxfp8(device):
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ConfigError(f"{setting} needs compute capability 10.0 or 10.3; {name} has {major}.{minor}: {instead}")
    with _torchao("mxfp8"):
        from torchao.quantization.quantize_.common import KernelPreference
    return KernelPreference.AUTO if device.type == "cuda" else KernelPreference.EMULATED


@contextmanager
def _torchao(what: str) -> Iterator[None]:
    """Around imports of torchao; MissingExtraError without it."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError("torchao", "train", what) from error


def _mxfp8_factory(device: torch.device) -> Any:
    kernel = _mxfp8_kernel(device, 'mesh.float8 = "mxfp8"', 'use float8 = "rowwise"')
    with _torchao("mxfp8"):
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, MXFP8Dim1CastKernelChoice
    recipe = MXFP8TrainingOpConfig(kernel_preference=kernel)
    is_real = device.type == "cuda"
    e4m3 = torch.float8_e4m3fn
    dim0 = MXFP8Dim0CastKernelChoice.TRITON if is_real else MXFP8Dim0CastKernelChoice.TORCH
    dim1 = MXFP8Dim1CastKernelChoice.CUDA if is_real else MXFP8Dim1CastKernelChoice.TORCH

    class MxLinear(nn.Linear):
        """A projection whose three products (forward, gradients of input and weight) are in MXFP8."""

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = mx_mm.apply(
                x, self.weight, e4m3, e4m3, e4m3, MX_BLOCK, recipe.kernel_preference, dim0, dim1,
                recipe.scale_calculation_mode, recipe.wgrad_with_hp,
            )  # fmt: skip
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def make(linear: nn.Linear) -> MxLinear:
        with torch.device("meta"):
            made = MxLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    return make


def _has_mxfp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((10, 0), (10, 3))


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
