"""What a rule of the optimizer is: the state of a weight, and the update of some weights on this rank's shards.

A state is a DTensor placed like its weight, so checkpoints save and reshard it by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A weight with its gradient and state, each as this rank holds it; `step` counts this update too."""

    fqn: str
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    step: Tensor  # shape (), float32


class Rule(Protocol):
    """How weights are updated. `state` is called once per weight, before anything is loaded; `update` once per step and group."""

    def state(self, fqn: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors to keep for a weight, at their first values; ConfigError if the mesh cuts it as the rule cannot."""

    def update(self, weights: Sequence[Trained], *, lr: float, decay: float) -> None:
        """Change the weights in place. `lr` and the decoupled `decay` are those of their group."""


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def zeros_like(weight: Tensor, dtype: torch.dtype, *, columns: tuple[int, int] | None = None) -> Tensor:
    """Zeros placed like `weight`; `columns` (of the whole, of this rank's shard) replace the size of the last dimension."""
    local = shard_of(weight)
    here = (*local.shape[:-1], columns[1]) if columns else tuple(local.shape)
    zeros = torch.zeros(here, dtype=dtype, device=local.device)
    if not isinstance(weight, DTensor):
        return zeros
    shape = torch.Size((*weight.shape[:-1], columns[0]) if columns else weight.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride)
