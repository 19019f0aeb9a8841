"""Computation on this rank's shards: a module whose weights are DTensors runs `forward` on their local tensors.

So a layer is written as for one process, and torch's own and other people's layers can be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHARES = "shares"  # attribute: 1 / tp by name of a whole bias that all ranks of tp add, since their outputs are summed


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_local_weights(
    root: nn.Module, forward: Callable[..., Any], *, below: Iterable[nn.Module] = ()
) -> Callable[..., Any]:
    """`forward` of `root`, during which its divided weights are their local tensors; those of the modules `below`, too.

    Around a compiled `forward`: torch 2.13 cannot recompute inside a compiled region with DTensors (it would save their mesh as
    if it were a tensor), and plain tensors need no unwrapping at each call.
    """
    owners = [(module, name, share) for module in (root, *below) for name, share in _divided(module)]
    if not owners:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [module._parameters[name] for module, name, _ in owners]
        for (module, name, share), weight in zip(owners, before, strict=True):
            assert weight is not None
            local = local_tensor(weight)
            module._parameters[name] = local if share == 1.0 else local * share  # type: ignore[assignment]
        try:
            return forward(*args, **kwargs)
        finally:
            for (module, name, _), weight in zip(owners, before, strict=True):
                module._parameters[name] = weight

    return run


def _divided(module: nn.Module) -> list[tuple[str, float]]:
    """The weights of a module that are not used as they are, and the share of them that counts."""
    shares = getattr(module, SHARES, {})
    found = []
    for name, weight in module.named_parameters(recurse=False):
        part = shares.get(name, 1.0)
        if isinstance(weight, DTensor) or part != 1.0:
            found.append((name, part))
    return found
