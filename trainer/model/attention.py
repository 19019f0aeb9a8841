"""Attention on one rank: which keys a query sees, and the two kernels that compute it.

A kernel is an `Attend`: `plan` is called once per forward with the batch's positions and documents, and its result is passed
to the kernel in every layer that has the same window. parallel/context.py adds two kernels.

An attention sink is a learnt score of each head that takes part in the softmax and has no value (arXiv 2309.17453): the head can
attend to nothing. With the log-sum-exp of the other scores it is one more term, merged as a block without values is.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.attention_blocks import QueryKeyBlock, attention_with_sinks

Mask: TypeAlias = Any  # the result of the kernel's own `plan`; None means plain causal


class Attend(Protocol):
    """Causal attention, optionally limited to documents and a sliding window; `sinks_H` are passed if the model has them."""

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> Mask:
        """Compute what depends on the batch but not on the layer."""

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Mask, sinks_H: Tensor | None = None
    ) -> Tensor:
        """The attention output, shaped like `q`."""


def check_on_cpu(attention: str) -> None:
    """ConfigError for a kernel that a CPU has not; `attention` is that of `[mesh]`."""
    if attention != "sdpa":
        why = "FlexAttention has no backward" if attention == "flex" else "varlen_attn has no kernel"
        raise ConfigError(f"mesh.attention={attention} on a CPU: torch's {why} there; use sdpa")


def check_varlen(head_dim: int, *, has_sinks: bool) -> None:
    """ConfigError for what FlashAttention, which `varlen_attn` calls, does not take (torch's flash_api.cpp, `mha_varlen_fwd`)."""
    if has_sinks:  # `varlen_attn` has no gradient of its log-sum-exp
        raise ConfigError("attention=varlen: this model has attention sinks, which it does not support; use flex")
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"attention=varlen: this model's heads have {head_dim} elements; it takes multiples of 8 up to 256; use flex"
        )


class SdpaAttend:
    """torch's scaled_dot_product_attention, with a boolean mask only if documents or a window need one.

    `scale` multiplies the scores: 1 / sqrt(K) unless given.
    """

    def __init__(self, window: int | None = None, scale: float | None = None) -> None:
        self.window, self.scale = window, scale

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> Tensor | None:
        """None (plain causal) or visible_B1ST."""
        seq_len = positions_BS.shape[1]
        if documents_BS is None and (self.window is None or seq_len <= self.window):
            return None
        order_1S = torch.arange(seq_len, device=positions_BS.device)[None]
        return visibility_mask(order_1S, order_1S, documents_BS, documents_BS, self.window)

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None, sinks_H: Tensor | None = None
    ) -> Tensor:
        return sdpa(q_BSHK, k_BTGK, v_BTGK, mask, is_causal=mask is None, scale=self.scale, sinks_H=sinks_H)


class FlexAttend:
    """torch's flex_attention with a block mask: skips the blocks that documents or a window hide."""

    def __init__(self, window: int | None = None, scale: float | None = None) -> None:
        self.window, self.scale = window, scale
        self.kernel: Any = torch.compile(flex_attention)

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> BlockMask:
        """The block mask, shared by all heads."""
        batch, seq_len = positions_BS.shape
        return self.block_mask(batch, seq_len, documents_BS, positions_BS.device)

    def block_mask(
        self, batch: int, keys: int, documents_BT: Tensor | None, device: torch.device, at_S: Tensor | None = None
    ) -> BlockMask:
        """The mask of queries that stand `at_S` among the keys, or one for each key. `documents_BT` are those of the keys."""

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 - the signature is torch's
            at = q if at_S is None else at_S[q]
            seen = at >= k
            if self.window is not None:
                seen = seen & (at - k < self.window)
            return seen if documents_BT is None else seen & (documents_BT[b, at] == documents_BT[b, k])

        return create_block_mask(sees, batch, None, keys if at_S is None else len(at_S), keys, device=device)

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: BlockMask, sinks_H: Tensor | None = None
    ) -> Tensor:
        q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
        options = {"block_mask": mask, "scale": self.scale, "enable_gqa": q_BHSK.shape[1] != k_BGTK.shape[1]}
        if sinks_H is None:
            o_BHSK: Tensor = self.kernel(q_BHSK, k_BGTK, v_BGTK, **options)
        else:
            o_BHSK, lse_BHS = self.kernel(q_BHSK, k_BGTK, v_BGTK, **options, return_lse=True)
            o_BHSK = o_BHSK * (lse_BHS - sinks_H[:, None]).sigmoid()[..., None].to(o_BHSK)
        return o_BHSK.transpose(1, 2)


def sdpa(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    visible_B1ST: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """scaled_dot_product_attention in this package's layout."""
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    if sinks_H is not None:
        block = QueryKeyBlock(is_causal=is_causal, visible_B1ST=visible_B1ST, scale=scale)
        return attention_with_sinks(q_BHSK, k_BGTK, v_BGTK, sinks_H, block).transpose(1, 2)
    enable_gqa = q_BHSK.shape[1] != k_BGTK.shape[1]
    o_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=visible_B1ST, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return o_BHSK.transpose(1, 2)


def visibility_mask(
    q_positions_BS: Tensor,
    k_positions_BT: Tensor,
    q_documents_BS: Tensor | None,
    k_documents_BT: Tensor | None,
    window: int | None,
) -> Tensor:
    """visible_B1ST: whether a query sees a key, which must not be later, outside the window or in another document."""
    distance_BST = q_positions_BS[:, :, None] - k_positions_BT[:, None, :]
    seen_BST = distance_BST >= 0
    if window is not None:
        seen_BST = seen_BST & (distance_BST < window)
    if q_documents_BS is not None and k_documents_BT is not None:
        seen_BST = seen_BST & (q_documents_BS[:, :, None] == k_documents_BT[:, None, :])
    return seen_BST[:, None]
