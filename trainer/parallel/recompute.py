"""Activation checkpointing, and compilation block by block.

Both wrap `forward` in place, which leaves names, hooks and weights of a block unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_ckpt.trainer.parallel.config import ParallelConfig

# Outputs kept under `selective`: costly to recompute, or a collective. Not the CPU's attention kernel, whose pair of outputs
# the compiler (torch 2.13) cannot keep.
_KEPT = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def apply_activation_checkpointing(layers: nn.ModuleDict, parallel: ParallelConfig) -> None:
    """Drop activations in forward and recompute them in backward, according to the mode.

    full: all blocks. every_n: every n-th. selective: all blocks, but keep attention, collectives and every second matrix product.
    budget: the compiler decides what to keep within `activation_memory_budget` (1.0 keeps everything).
    """
    match parallel.activation_checkpoint:
        case "none":
            return
        case "budget":
            torch._functorch.config.activation_memory_budget = parallel.activation_memory_budget
        case "every_n":
            for index, block in layers.items():
                if int(index) % parallel.checkpoint_every_n == 0:
                    _recompute(block)
        case "full":
            for block in layers.values():
                _recompute(block)
        case "selective":
            for block in layers.values():
                _recompute(block, context_fn=_selective_contexts)


def apply_compile(layers: nn.ModuleDict) -> None:
    """Compile each block's forward separately: one compilation serves all, and FSDP's hooks stay outside."""
    for block in layers.values():
        block.forward = _on_local_weights(block, torch.compile(block.forward))


def _on_local_weights(block: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run the compiled `forward` on local shards, as plain tensors, of the weights that tensor parallelism has sharded.

    torch 2.13 cannot recompute inside a compiled region with DTensors (it would save their mesh as if it were a tensor), and
    plain tensors need no unwrapping at each call.
    """
    owners = [
        (module, name)
        for module in block.modules()
        for name, weight in module.named_parameters(recurse=False)
        if isinstance(weight, DTensor)
    ]
    if not owners:
        return forward

    def run(*args: Any) -> Tensor:
        whole = [module._parameters[name] for module, name in owners]
        for (module, name), weight in zip(owners, whole, strict=True):
            module._parameters[name] = weight.to_local() if isinstance(weight, DTensor) else weight
        try:
            return forward(*args)
        finally:
            for (module, name), weight in zip(owners, whole, strict=True):
                module._parameters[name] = weight

    return run


def _recompute(block: nn.Module, **options: Any) -> None:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}  # counted separately in forward and in recomputation

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = op in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
