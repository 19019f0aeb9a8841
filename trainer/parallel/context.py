"""Context parallelism: each rank has a part of every sequence; attention covers the whole sequence.

Load balance: causal attention costs more for later queries, so a sequence is split into 2 x cp chunks and rank r takes chunk r
and chunk 2 cp - 1 - r: a head and a tail. Two methods:

    all_gather   every rank gathers all keys and values, the gradient is a reduce-scatter; simple, memory grows with S; with
                 FlexAttention the blocks that documents or a window hide are skipped
    ring         keys and values circulate while each rank computes on those it has; partial results are merged by their
                 log-sum-exp (Ring Attention, arXiv 2310.01889); backward circulates once more, with the gradients

Shapes: B batch, S queries of this rank, T keys of one rank, W the whole sequence, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_ckpt.trainer.model.attention import FlexAttend, sdpa, visibility_mask
from titan_ckpt.trainer.model.attention_blocks import (
    QueryKeyBlock,
    add_sinks,
    block_backward,
    block_forward,
    sinks_gradient,
)


def head_tail_positions(seq_len: int, degree: int, rank: int, device: torch.device | None = None) -> Tensor:
    """The positions of a rank's chunks, ascending; all of them at degree 1.

    >>> head_tail_positions(8, 2, 0).tolist(), head_tail_positions(8, 2, 1).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    positions = torch.arange(seq_len, device=device)
    if degree == 1:
        return positions
    chunks = positions.view(2 * degree, -1)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]])


def _all_positions(seq_len: int, degree: int, device: torch.device) -> Tensor:
    """positions_RT: the positions of every rank."""
    return torch.stack([head_tail_positions(seq_len, degree, rank, device) for rank in range(degree)])


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """The permutation that sorts gathered keys, and the masks of this rank's head and tail queries."""

    order_W: Tensor
    lengths: tuple[int, int]
    visible_B1ST: tuple[Tensor, Tensor]


class AllGatherAttend:
    """Gathers keys and values; the head chunk attends to a shorter prefix than the tail chunk."""

    def __init__(self, group: dist.ProcessGroup, window: int | None = None, scale: float | None = None) -> None:
        self.group, self.window, self.scale = group, window, scale
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> GatherPlan:
        """Masks and key order; `positions_BS` are this rank's, `documents_BS` the whole sequence's."""
        chunk = positions_BS.shape[1] // 2
        ends = ((self.rank + 1) * chunk, (2 * self.degree - self.rank) * chunk)
        keys_1W = torch.arange(2 * chunk * self.degree, device=positions_BS.device)[None]
        masks = []
        for end in ends:
            rows = slice(end - chunk, end)
            theirs, ours = (None, None) if documents_BS is None else (documents_BS[:, :end], documents_BS[:, rows])
            masks.append(visibility_mask(keys_1W[:, rows], keys_1W[:, :end], ours, theirs, self.window))
        order_W = key_order(keys_1W.shape[1], self.degree, positions_BS.device)
        return GatherPlan(order_W=order_W, lengths=ends, visible_B1ST=(masks[0], masks[1]))

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: GatherPlan, sinks_H: Tensor | None = None
    ) -> Tensor:
        k_BWGK, v_BWGK = gathered(k_BTGK, v_BTGK, mask.order_W, self.group)
        halves = [
            sdpa(q_BSGK, k_BWGK[:, :end], v_BWGK[:, :end], seen, is_causal=False, scale=self.scale, sinks_H=sinks_H)
            for q_BSGK, end, seen in zip(q_BSHK.chunk(2, dim=1), mask.lengths, mask.visible_B1ST, strict=True)
        ]
        return torch.cat(halves, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPlan:
    """The permutation that sorts gathered keys, and the mask of this rank's queries."""

    order_W: Tensor
    mask: BlockMask


class FlexGatherAttend:
    """Gathers keys and values; FlexAttention over them."""

    def __init__(self, group: dist.ProcessGroup, window: int | None = None, scale: float | None = None) -> None:
        self.flex = FlexAttend(window, scale)
        self.group, self.rank, self.degree = group, dist.get_rank(group), dist.get_world_size(group)

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> FlexPlan:
        """`positions_BS` are this rank's, `documents_BS` the whole sequence's."""
        batch, keys, device = len(positions_BS), positions_BS.shape[1] * self.degree, positions_BS.device
        at_S = head_tail_positions(keys, self.degree, self.rank, device)
        mask = self.flex.block_mask(batch, keys, documents_BS, device, at_S)
        return FlexPlan(order_W=key_order(keys, self.degree, device), mask=mask)

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: FlexPlan, sinks_H: Tensor | None = None
    ) -> Tensor:
        k_BWGK, v_BWGK = gathered(k_BTGK, v_BTGK, mask.order_W, self.group)
        return self.flex(q_BSHK, k_BWGK, v_BWGK, mask.mask, sinks_H)


def key_order(seq_len: int, degree: int, device: torch.device) -> Tensor:
    """order_W: where each key of the sequence is among those of all ranks, one after another."""
    return _all_positions(seq_len, degree, device).flatten().argsort()


def gathered(k_BTGK: Tensor, v_BTGK: Tensor, order_W: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, in order; differentiable."""
    kv: Tensor = _GatherSequence.apply(torch.cat([k_BTGK, v_BTGK], dim=-1), group)  # type: ignore[no-untyped-call]
    k_BWGK, v_BWGK = kv[:, order_W].chunk(2, dim=-1)
    return k_BWGK, v_BWGK


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x_BT) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x_BT.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        pieces = [piece.contiguous() for piece in grads[0].chunk(dist.get_world_size(ctx.group), dim=1)]
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces, group=ctx.group)
        return mine, None


class RingAttend:
    """Ring attention; `is_eager` inside of compiled blocks, which cannot hold sends and receives that are recorded."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        window: int | None = None,
        scale: float | None = None,
        *,
        is_eager: bool = False,
    ) -> None:
        self.group, self.window, self.scale = group, window, scale
        self._around = torch.compiler.disable(_Ring.apply) if is_eager else _Ring.apply  # type: ignore[no-untyped-call]
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> list[QueryKeyBlock]:
        """The block to compute at each step of the ring; at step i this rank has the keys of rank (this - i)."""
        sources = [(self.rank - step) % self.degree for step in range(self.degree)]
        if documents_BS is None and self.window is None:
            return [self._causal_block(source, positions_BS.shape[1] // 2) for source in sources]
        held_RT = _all_positions(positions_BS.shape[1] * self.degree, self.degree, positions_BS.device)
        mine_S = held_RT[self.rank]
        blocks = []
        for source in sources:
            theirs_T = held_RT[source]
            ours, theirs = (
                (None, None) if documents_BS is None else (documents_BS[:, mine_S], documents_BS[:, theirs_T])
            )
            seen = visibility_mask(mine_S[None], theirs_T[None], ours, theirs, self.window)
            blocks.append(QueryKeyBlock(visible_B1ST=seen, scale=self.scale))
        return blocks

    def _causal_block(self, source: int, chunk: int) -> QueryKeyBlock:
        if source == self.rank:
            return QueryKeyBlock(is_causal=True, scale=self.scale)
        if source < self.rank:  # their head is before all of ours, their tail after
            return QueryKeyBlock(keys=slice(0, chunk), scale=self.scale)
        return QueryKeyBlock(
            queries=slice(chunk, None), scale=self.scale
        )  # all of theirs is before our tail, after our head

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: list[QueryKeyBlock], sinks_H: Tensor | None = None
    ) -> Tensor:
        q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2).contiguous() for x in (q_BSHK, k_BTGK, v_BTGK))
        o_BHSK: Tensor = self._around(q_BHSK, k_BGTK, v_BGTK, sinks_H, mask, self.group)
        return o_BHSK.transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        sinks_H: Tensor | None,
        blocks: list[QueryKeyBlock],
        group: dist.ProcessGroup,
    ) -> Tensor:
        kv = torch.stack([k_BGTK, v_BGTK])
        out_BHSK = torch.zeros_like(q_BHSK, dtype=torch.float32)
        lse_BHS = q_BHSK.new_full(q_BHSK.shape[:3], -torch.inf, dtype=torch.float32)
        for step, block in enumerate(blocks):
            arriving = _pass_on(kv, group) if step + 1 < len(blocks) else None
            rows = block.queries
            o, lse = block_forward(q_BHSK[:, :, rows], kv[0][:, :, block.keys], kv[1][:, :, block.keys], block)
            _merge(out_BHSK[:, :, rows], lse_BHS[:, :, rows], o, lse)
            if arriving is not None:
                kv = arriving.wait()
        if sinks_H is not None:
            lse_BHS = add_sinks(out_BHSK, lse_BHS, sinks_H)
        out_BHSK = out_BHSK.to(q_BHSK.dtype)
        ctx.save_for_backward(q_BHSK, k_BGTK, v_BGTK, sinks_H, out_BHSK, lse_BHS)
        ctx.blocks, ctx.group = blocks, group
        return out_BHSK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q_BHSK, k_BGTK, v_BGTK, sinks_H, out_BHSK, lse_BHS = ctx.saved_tensors
        grad_BHSK = grads[0].contiguous()
        kv = torch.stack([k_BGTK, v_BGTK])
        grad_q = torch.zeros_like(q_BHSK, dtype=torch.float32)
        grad_kv = torch.zeros_like(kv, dtype=torch.float32)  # circulates with its keys
        for step, block in enumerate(ctx.blocks):
            arriving = _pass_on(kv, ctx.group) if step + 1 < len(ctx.blocks) else None
            rows, keys = block.queries, block.keys
            dq, dk, dv = block_backward(
                grad_BHSK[:, :, rows],
                q_BHSK[:, :, rows],
                kv[0][:, :, keys],
                kv[1][:, :, keys],
                out_BHSK[:, :, rows],
                lse_BHS[:, :, rows],
                block,
            )
            grad_q[:, :, rows] += dq
            grad_kv[0][:, :, keys] += dk
            grad_kv[1][:, :, keys] += dv
            grad_kv = _pass_on(grad_kv, ctx.group).wait()
            if arriving is not None:
                kv = arriving.wait()
        grad_sinks = None if sinks_H is None else sinks_gradient(grad_BHSK, out_BHSK, lse_BHS, sinks_H)
        return grad_q.to(q_BHSK.dtype), grad_kv[0].to(k_BGTK.dtype), grad_kv[1].to(v_BGTK.dtype), grad_sinks, None, None


def _merge(out_BHSK: Tensor, lse_BHS: Tensor, new_BHSK: Tensor, new_lse_BHS: Tensor) -> None:
    """Merge a block's result into the running one, in place; rows without visible keys in the block stay unchanged."""
    total_BHS = torch.logaddexp(lse_BHS, new_lse_BHS)
    out_BHSK.mul_((lse_BHS - total_BHS).exp()[..., None])
    out_BHSK.add_(new_BHSK * (new_lse_BHS - total_BHS).exp()[..., None])
    lse_BHS.copy_(total_BHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arriving:
    buffer: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.buffer


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> _Arriving:
    """Start sending to the next rank of the ring and receiving from the previous one."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    buffer = torch.empty_like(tensor)
    to, source = (dist.get_global_rank(group, (rank + offset) % degree) for offset in (1, -1))
    send = dist.P2POp(dist.isend, tensor, to, group)
    receive = dist.P2POp(dist.irecv, buffer, source, group)
    return _Arriving(buffer=buffer, works=dist.batch_isend_irecv([send, receive]))
