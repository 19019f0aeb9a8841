"""Activation checkpointing, and compilation block by block.

Both wrap `forward` in place, which leaves names, hooks and weights of a block unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_ckpt.trainer.model.linear import ONEDNN_PRODUCTS
from titan_ckpt.trainer.model.plan import routers_of
from titan_ckpt.trainer.parallel.config import SPLIT_BACKWARD, ParallelConfig
from titan_ckpt.trainer.parallel.local_weights import on_local_weights
from titan_ckpt.trainer.seams.patterns import is_below

# Outputs kept under `selective`: costly to recompute, or a collective. Not the CPU's attention kernel, whose pair of outputs
# the compiler (torch 2.13) cannot keep.
_KEPT = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)
_CHOICES = [torch.ops.aten.topk.default]  # of routers: made once, so that the backward sees the same experts
# FSDP names its steps for the profiler, in a recomputation one more (`FSDP::root_pre_forward`). torch 2.13 counts these
# calls like any other and refuses one more than in the forward, although they have no value.
_LABELS = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *ONEDNN_PRODUCTS})


def splits_backward(parallel: ParallelConfig) -> bool:
    """Whether the schedule computes gradients of inputs and of weights in passes of their own."""
    return parallel.pp > 1 and parallel.pp_schedule in SPLIT_BACKWARD


def apply_activation_checkpointing(blocks: Mapping[int, nn.Module], parallel: ParallelConfig) -> None:
    """Drop activations in forward and recompute them in backward, according to the mode. `blocks` by their index in the model.

    full: all blocks. every_n: every n-th. selective: all blocks, but keep attention, collectives and every second matrix product.
    budget: the compiler decides what to keep within `activation_memory_budget` (1.0 keeps everything).
    """
    SAC_IGNORED_OPS.update(_LABELS)
    can_keep = not splits_backward(parallel)  # selecting allows one backward pass
    match parallel.activation_checkpoint:
        case "none":
            return
        case "budget":
            torch._functorch.config.activation_memory_budget = parallel.activation_memory_budget
        case "every_n":
            for index, block in blocks.items():
                if index % parallel.checkpoint_every_n == 0:
                    _recompute_whole(block, can_keep=can_keep)
        case "full":
            for block in blocks.values():
                _recompute_whole(block, can_keep=can_keep)
        case "selective":
            for block in blocks.values():
                _recompute(block, context_fn=_selective_contexts)


def apply_compile(blocks: Mapping[str, nn.Module], *, eager: tuple[str, ...] = ()) -> None:
    """Compile each block's forward separately: one compilation serves all, and FSDP's hooks stay outside.

    Modules below `eager` are not compiled: how many rows an expert has changes with each batch.
    """
    for block_fqn, block in blocks.items():
        modules = [*block.named_modules(prefix=block_fqn)][1:]
        for fqn, module in modules:
            if fqn in eager:
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        compiled = torch.compile(block.forward)
        below = [module for fqn, module in modules if not is_below(fqn, eager)]
        block.forward = on_local_weights(block, compiled, below=below)


def _recompute_whole(block: nn.Module, *, can_keep: bool) -> None:
    """Keep nothing but the choices of routers."""
    if not can_keep:
        block.forward = functools.partial(_recomputed_once, block.forward)
    elif routers_of(block):
        _recompute(block, context_fn=lambda: create_selective_checkpoint_contexts(_CHOICES))  # type: ignore[no-untyped-call]
    else:
        _recompute(block)


def _recompute(block: nn.Module, **options: Any) -> None:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _recomputed_once(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` without its activations, which one recomputation gives to all passes of a split backward.

    torch's `checkpoint` recomputes for each of them, and the pass for weights is one per group of parameters (15 for a block of a
    mixture): ranks with another number of groups then meet in other all-to-alls.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saved = _Recomputed(forward, args, kwargs)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return forward(*args, **kwargs)


class _Recomputed:
    """The tensors that a forward saved, by their number; computed when the first one is asked for, and kept with the graph."""

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._forward = forward
        self._inputs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
        self._count = 0
        self._values: list[Tensor] | None = None

    def pack(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        if self._values is None:
            self._values = self._recompute()
        return self._values[number]

    def _recompute(self) -> list[Tensor]:
        values = list[Tensor]()

        def keep(x: Tensor) -> Tensor:
            values.append(x.detach())
            return x

        args, kwargs = self._inputs
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
            self._forward(*args, **kwargs)
        if len(values) != self._count:
            raise RuntimeError(f"the forward saved {self._count} tensors, its recomputation {len(values)}")
        return values


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}  # counted separately in forward and in recomputation

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = op in _KEPT or op in _CHOICES
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
