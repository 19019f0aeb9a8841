"""Muon: momentum made orthogonal by Newton-Schulz iterations, for the matrices of the blocks. Formulas as in torch.optim.Muon.

The weights of experts are stacks [E, R, C], one matrix for each expert, which meshes divide between experts: a rank
computes its own. Those that tp cuts are gathered.

Sources: https://kellerjordan.github.io/posts/muon/ and arXiv 2502.16982, whose scale lets it share AdamW's learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.optim.rule import Trained, shard_of, zeros_like
from titan_ckpt.trainer.optim.whole import compute_device, map_whole, over_tp, tp_cut
from titan_ckpt.trainer.seams.patterns import is_below

A, B, C, EPS = 3.4445, -4.7750, 2.0315, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """The rule; each matrix is gathered on one of the ranks that share it, which computes for all of them.

    `stacked`: modules whose weights have one matrix, or vector, for each expert.
    """

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    dtype: torch.dtype = torch.float32  # of the iterations
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    stacked: Collection[str] = ()

    def state(self, fqn: str, weight: Tensor) -> dict[str, Tensor]:
        """`momentum_buffer`, in float32."""
        is_stacked = is_below(fqn, self.stacked)
        if weight.ndim - is_stacked != 2:
            of = "each of its experts has" if is_stacked else "this weight has"
            raise ConfigError(
                f"{fqn}: Muon is for matrices, and {of} {weight.ndim - is_stacked} dimensions; give it to AdamW"
            )
        return {"momentum_buffer": zeros_like(weight, torch.float32)}

    def update(self, weights: Sequence[Trained], *, lr: float, decay: float) -> None:
        """Update matrices in place; collective over the ranks that share them."""
        gradients = [shard_of(each.gradient).float() for each in weights]
        buffers = [shard_of(each.state["momentum_buffer"]) for each in weights]
        torch._foreach_lerp_(buffers, gradients, 1.0 - self.momentum)
        wanted = (
            [g.lerp(b, self.momentum) for g, b in zip(gradients, buffers, strict=True)] if self.nesterov else buffers
        )
        found = self._directions(wanted, [each.weight for each in weights])
        for each, direction in zip(weights, found, strict=True):
            shard = shard_of(each.weight)
            shard.mul_(1.0 - lr * decay)
            shard.add_(direction.to(shard.dtype), alpha=-lr * self._ratio(each.weight.shape[-2:]))

    def _directions(self, wanted: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The parts of `wanted` made orthogonal; collective."""
        matrices = [index for index, weight in enumerate(weights) if weight.ndim == 2]
        parts = map_whole([wanted[k] for k in matrices], [weights[k] for k in matrices], self.orthogonal)
        found = dict(zip(matrices, parts, strict=True))
        return [found[k] if k in found else self._of_each(part, weights[k]) for k, part in enumerate(wanted)]

    def _of_each(self, part_LRC: Tensor, weight: Tensor) -> Tensor:
        """The L experts of this rank, one after another: sums of one order on every mesh. Those that tp cuts are gathered."""
        at, tp = compute_device(part_LRC, weight), tp_cut(weight)
        tp = tp if tp is None else tp._replace(dim=tp.dim - 1)  # of one expert
        out = torch.empty_like(part_LRC)
        for expert, matrix in enumerate(part_LRC):
            out[expert] = over_tp(matrix.to(at), tp, self.orthogonal)
        return out

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """The nearest orthogonal matrix, roughly, by quintic Newton-Schulz iterations; returned in float32."""
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.to(self.dtype)
        x = x.T if is_tall else x
        x = x / x.norm().clamp(min=EPS)
        for _ in range(self.iterations):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
        return (x.T if is_tall else x).float()

    def _ratio(self, shape: torch.Size) -> float:
        if self.scale == "original":
            return math.sqrt(max(1.0, shape[0] / shape[1]))
        return 0.2 * math.sqrt(max(shape))
