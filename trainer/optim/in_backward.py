"""Updates in the backward: each weight as soon as its gradient is whole, which is then dropped.

So the gradients of a whole model never exist at once. What needs all of them, clipping above all, cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from titan_ckpt.errors import TitanError
from titan_ckpt.trainer.optim.rule import shard_of


class EarlyUpdates:
    """Calls `update(fqn)` when the gradient of a weight is whole.

    `copies` says how many ranks have a weight's shard. `squares` is this rank's share of the squared norm of the gradients that
    are gone, shape (), float64.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        *,
        update: Callable[[str], None],
        copies: Callable[[nn.Parameter], int],
    ) -> None:
        self._update = update
        self.updated: set[str] = set()
        self.squares = torch.zeros((), dtype=torch.float64)
        for fqn, weight in weights.items():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(partial(self._whole, fqn, copies(weight)))  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Before the backward of a step."""
        self.updated.clear()
        self.squares = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def _whole(self, fqn: str, copies: int, weight: Tensor) -> None:
        if fqn in self.updated:
            raise TitanError(f"{fqn}: a second gradient came in one step; unset optimizer.in_backward")
        assert weight.grad is not None
        norm = torch.linalg.vector_norm(shard_of(weight.grad))
        self.squares = self.squares.to(norm.device) + norm.double().square() / copies
        self._update(fqn)
        weight.grad = None
        self.updated.add(fqn)
