"""The sum of token losses directly from hidden states; only one chunk of tokens' logits exists at a time.

The gradient of cross-entropy follows from the logits, so forward already computes the gradients of `h` and of the weight, and
backward only scales them. Under tensor parallelism each rank has the logits of its vocabulary shard; the ranks exchange one
maximum and two sums per token (loss parallel) or, with `gather_logits`, the logits themselves.

Shapes: N tokens, D model dim, V vocabulary (of this rank), W vocabulary (of all ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_ckpt.trainer.model.linear import product, weight_gradient
from titan_ckpt.trainer.seams.loss import IGNORED as IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's shard of the vocabulary under tensor parallelism."""

    group: dist.ProcessGroup
    rank: int
    degree: int
    gather_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Sum of cross-entropies over the labels that are not `IGNORED`, as a tensor of shape (1,)."""

    chunk_tokens: int = 0
    shard: VocabShard | None = None

    def __call__(self, h_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
        chunk = self.chunk_tokens or labels_BS.numel()
        loss: Tensor = _LinearCrossEntropy.apply(h_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), chunk, self.shard)  # type: ignore[no-untyped-call]
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk: int, shard: VocabShard | None
    ) -> Tensor:
        loss = torch.zeros(1, dtype=torch.float32, device=h_ND.device)
        wants_grad = any(ctx.needs_input_grad[:2])
        grad_h_ND = torch.empty_like(h_ND) if wants_grad else None
        grad_weight_VD: Tensor | None = None
        for start in range(0, len(labels_N), chunk):
            tokens = slice(start, start + chunk)
            part, grad_logits_NV = _chunk_loss(product(h_ND[tokens], weight_VD), labels_N[tokens], shard, wants_grad)
            loss += part
            if grad_h_ND is not None and grad_logits_NV is not None:
                grad_h_ND[tokens] = product(grad_logits_NV, weight_VD.T)
                grad = weight_gradient(grad_logits_NV, h_ND[tokens])
                grad_weight_VD = grad if grad_weight_VD is None else grad_weight_VD.add_(grad)
        ctx.grads = grad_h_ND, grad_weight_VD
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h_ND, grad_weight_VD = ctx.grads
        scale = grads[0]
        return grad_h_ND * scale.to(grad_h_ND.dtype), grad_weight_VD * scale.to(grad_weight_VD.dtype), None, None, None


def _chunk_loss(
    logits_NV: Tensor, labels_N: Tensor, shard: VocabShard | None, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(sum of losses, gradient of this rank's logits in their own dtype); may overwrite the logits."""
    if shard is not None and shard.gather_logits:
        loss, grad_NW = _chunk_loss(_gather_vocab(logits_NV, shard), labels_N, None, wants_grad)
        return loss, None if grad_NW is None else grad_NW.chunk(shard.degree, dim=1)[shard.rank]
    dtype, scores_NV = logits_NV.dtype, logits_NV.float()
    highest_N = scores_NV.amax(dim=1)
    if shard is not None:
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, shard.group)
    scores_NV.sub_(highest_N[:, None])
    column_N1, is_mine_N1 = _columns(labels_N, scores_NV.shape[1], shard)
    target_N = scores_NV.gather(1, column_N1).mul_(is_mine_N1).squeeze(1)
    weights_NV = scores_NV.exp_()
    sums_2N = torch.stack([weights_NV.sum(dim=1), target_N])
    if shard is not None:
        dist.all_reduce(sums_2N, group=shard.group)
    counts_N = labels_N != IGNORED
    loss = ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()
    if not wants_grad:
        return loss, None
    weights_NV.mul_((counts_N / sums_2N[0])[:, None])
    weights_NV.scatter_add_(1, column_N1, -(is_mine_N1 & counts_N[:, None]).float())
    return loss, weights_NV.to(dtype)


def _columns(labels_N: Tensor, width: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """(column of each label in this shard, whether it is there); columns of other shards' labels are meaningless."""
    columns_N = labels_N - (0 if shard is None else shard.rank * width)
    is_mine_N = (columns_N >= 0) & (columns_N < width)
    return columns_N.clamp(0, width - 1)[:, None], is_mine_N[:, None]


def _gather_vocab(logits_NV: Tensor, shard: VocabShard) -> Tensor:
    parts = [torch.empty_like(logits_NV) for _ in range(shard.degree)]
    dist.all_gather(parts, logits_NV.contiguous(), group=shard.group)
    return torch.cat(parts, dim=1)
