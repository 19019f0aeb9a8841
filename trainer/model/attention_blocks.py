"""Attention of a block of queries over a block of keys, forward and backward, for results that are merged later.

Forward returns the log-sum-exp with the values; backward takes the *merged* values and log-sum-exp, with which each block's
gradient is exact and the blocks' gradients add up. torch's fused kernels are used without a mask, on CPU and in half precision on
CUDA; otherwise the arithmetic is written out.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryKeyBlock:
    """Slices of one rank's queries and another's keys that are computed together, and their mask."""

    queries: slice = field(default_factory=lambda: slice(None))
    keys: slice = field(default_factory=lambda: slice(None))
    is_causal: bool = False
    visible_B1ST: Tensor | None = None
    scale: float | None = None  # of the scores; None: 1 / sqrt(K)


def block_forward(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, block: QueryKeyBlock) -> tuple[Tensor, Tensor]:
    """(values, log-sum-exp_BHS); -inf where a query sees no key of the block."""
    k_BHTK, v_BHTK = (_spread(x, q_BHSK.shape[1]) for x in (k_BGTK, v_BGTK))
    if block.visible_B1ST is None and q_BHSK.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSK, k_BHTK, v_BHTK, 0.0, block.is_causal, scale=block.scale
        )
        return o, lse
    if block.visible_B1ST is None and q_BHSK.dtype != torch.float32:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHSK, k_BHTK, v_BHTK, 0.0, block.is_causal, scale=block.scale
        )[:2]
        return o, lse
    scores_BHST = _scores(q_BHSK, k_BHTK, block)
    lse_BHS = scores_BHST.logsumexp(dim=-1)
    weights_BHST = (scores_BHST - lse_BHS[..., None]).exp().nan_to_num(0.0)
    return weights_BHST @ v_BHTK.float(), lse_BHS


def block_backward(
    grad_BHSK: Tensor,
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out_BHSK: Tensor,
    lse_BHS: Tensor,
    block: QueryKeyBlock,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` are the merged ones."""
    groups = k_BGTK.shape[1]
    k_BHTK, v_BHTK = (_spread(x, q_BHSK.shape[1]) for x in (k_BGTK, v_BGTK))
    if block.visible_B1ST is None and q_BHSK.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHSK, q_BHSK, k_BHTK, v_BHTK, out_BHSK, lse_BHS, 0.0, block.is_causal, scale=block.scale
        )
    elif block.visible_B1ST is None and q_BHSK.dtype != torch.float32:
        dq, dk, dv = _flash_backward(grad_BHSK, q_BHSK, k_BHTK, v_BHTK, out_BHSK, lse_BHS, block)
    else:
        dq, dk, dv = _written_out_backward(grad_BHSK, q_BHSK, k_BHTK, v_BHTK, out_BHSK, lse_BHS, block)
    return dq, _gather_heads(dk, groups), _gather_heads(dv, groups)


def add_sinks(out_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Merge a score without a value into `out`, in place; returns the new log-sum-exp."""
    total_BHS = torch.logaddexp(lse_BHS, sinks_H[:, None].to(lse_BHS))
    out_BHSK.mul_((lse_BHS - total_BHS).exp()[..., None])
    return total_BHS


def sinks_gradient(grad_BHSK: Tensor, out_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient of the sinks from the merged values and log-sum-exp."""
    pull_BHS = (grad_BHSK.float() * out_BHSK.float()).sum(dim=-1)
    weights_BHS = (sinks_H[:, None].float() - lse_BHS.float()).exp()
    return -(weights_BHS * pull_BHS).sum(dim=(0, 2)).to(sinks_H.dtype)


def attention_with_sinks(
    q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sinks_H: Tensor, block: QueryKeyBlock
) -> Tensor:
    """Attention in which each head has a sink, differentiable."""
    out_BHSK: Tensor = _WithSinks.apply(q_BHSK, k_BGTK, v_BGTK, sinks_H, block)  # type: ignore[no-untyped-call]
    return out_BHSK


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, sinks_H: Tensor, block: QueryKeyBlock
    ) -> Tensor:
        out_BHSK, lse_BHS = block_forward(q_BHSK, k_BGTK, v_BGTK, block)
        total_BHS = add_sinks(out_BHSK, lse_BHS, sinks_H)
        out_BHSK = out_BHSK.to(q_BHSK.dtype)
        ctx.save_for_backward(q_BHSK, k_BGTK, v_BGTK, sinks_H, out_BHSK, total_BHS)
        ctx.block = block
        return out_BHSK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q_BHSK, k_BGTK, v_BGTK, sinks_H, out_BHSK, lse_BHS = ctx.saved_tensors
        grad_BHSK = grads[0].contiguous()
        dq, dk, dv = block_backward(grad_BHSK, q_BHSK, k_BGTK, v_BGTK, out_BHSK, lse_BHS, ctx.block)
        ds_H = sinks_gradient(grad_BHSK, out_BHSK, lse_BHS, sinks_H)
        return dq.to(q_BHSK.dtype), dk.to(k_BGTK.dtype), dv.to(v_BGTK.dtype), ds_H, None


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: QueryKeyBlock
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state, unused without dropout
    q_len, k_len = q.shape[2], k.shape[2]
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q_len, k_len, 0.0, block.is_causal, unused, unused,
        scale=block.scale,
    )  # fmt: skip
    return grads


def _written_out_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: QueryKeyBlock
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.float()
    weights_BHST = (_scores(q, k, block) - lse[..., None]).exp()
    pull_BHS1 = (grad * out.float()).sum(dim=-1, keepdim=True)
    grad_scores_BHST = weights_BHST * (grad @ v.float().mT - pull_BHS1) * _scale(q, block)
    return grad_scores_BHST @ k.float(), grad_scores_BHST.mT @ q.float(), weights_BHST.mT @ grad


def _scores(q_BHSK: Tensor, k_BHTK: Tensor, block: QueryKeyBlock) -> Tensor:
    scores_BHST = (q_BHSK.float() @ k_BHTK.float().mT) * _scale(q_BHSK, block)
    seen = block.visible_B1ST
    if block.is_causal:
        seen = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=q_BHSK.device).tril()
    return scores_BHST if seen is None else scores_BHST.masked_fill(~seen, -torch.inf)


def _scale(q_BHSK: Tensor, block: QueryKeyBlock) -> float:
    return block.scale if block.scale is not None else 1.0 / math.sqrt(q_BHSK.shape[-1])


def _spread(x_BGTK: Tensor, heads: int) -> Tensor:
    groups = x_BGTK.shape[1]
    return x_BGTK if groups == heads else x_BGTK.repeat_interleave(heads // groups, dim=1)


def _gather_heads(grad_BHTK: Tensor, groups: int) -> Tensor:
    return grad_BHTK if grad_BHTK.shape[1] == groups else torch.unflatten(grad_BHTK, 1, (groups, -1)).sum(dim=2)
