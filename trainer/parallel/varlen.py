"""Attention over documents of any length, packed one after another, by torch's `varlen_attn` (FlashAttention: CUDA, 16 bits).

Queries are divided into pieces: runs of consecutive positions of one document that this rank has. A piece needs the keys of its
document from the first to the piece's last position. FlashAttention's causal mask stands at the end of queries and keys (its
README, "causal=True": bottom right), which is then each query's own position.

Shapes: B batch, S queries and W keys of a row, P pieces, N all queries or keys, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from titan_ckpt.errors import DataError
from titan_ckpt.trainer.model.attention import check_varlen
from titan_ckpt.trainer.parallel.context import gathered, head_tail_positions, key_order

# torch 2.11 takes fewer key heads without being told so.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Where pieces begin among the queries and among their keys, the longest of each, and which of all B * W keys those are."""

    queries_P1: Tensor
    keys_P1: Tensor
    longest: tuple[int, int]
    wanted_N: Tensor


def pieces_of(at_S: Tensor, documents_BW: Tensor) -> Pieces:
    """The pieces of queries that stand `at_S` in each row.

    >>> found = pieces_of(torch.tensor([0, 1, 6, 7]), torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]))
    >>> found.queries_P1.tolist(), found.keys_P1.tolist(), found.wanted_N.tolist()
    ([0, 2, 4], [0, 2, 5], [0, 1, 5, 6, 7])
    """
    batch, width = documents_BW.shape
    device = documents_BW.device
    edge_B1 = torch.ones(batch, 1, dtype=torch.bool, device=device)
    is_first_BW = torch.cat([edge_B1, documents_BW[:, 1:] != documents_BW[:, :-1]], dim=1)
    _check_runs(is_first_BW, documents_BW)
    begin_BW = torch.where(is_first_BW, torch.arange(width, device=device), 0).cummax(1).values
    begin_BS, document_BS = begin_BW[:, at_S], documents_BW[:, at_S]
    is_cut_S = at_S[1:] != at_S[:-1] + 1
    is_new_BS = torch.cat([edge_B1, is_cut_S | (document_BS[:, 1:] != document_BS[:, :-1])], dim=1)
    row_P, first_P = is_new_BS.nonzero(as_tuple=True)
    queries_P1 = _ends(torch.cat([is_new_BS.flatten().nonzero()[:, 0], row_P.new_tensor([batch * len(at_S)])]).diff())
    begin_P = begin_BS[row_P, first_P]
    count_P = at_S[first_P] + queries_P1.diff() - begin_P
    keys_P1 = _ends(count_P)
    shift_P = row_P * width + begin_P - keys_P1[:-1]
    wanted_N = torch.arange(int(keys_P1[-1]), device=device) + shift_P.repeat_interleave(count_P)
    longest = (int(queries_P1.diff().max()), int(count_P.max()))
    return Pieces(queries_P1=queries_P1, keys_P1=keys_P1, longest=longest, wanted_N=wanted_N)


def _check_runs(is_first_BW: Tensor, documents_BW: Tensor) -> None:
    """DataError for a document in several runs, of which one piece cannot see another, as `sdpa` and `flex` can."""
    row_R, at_R = is_first_BW.nonzero(as_tuple=True)
    runs = torch.stack([row_R, documents_BW[row_R, at_R]], dim=1)
    found, times = torch.unique(runs, dim=0, return_counts=True)
    if len(found) < len(runs):
        document = int(found[times > 1][0, 1])
        raise DataError(
            f"attention=varlen: document {document} of a sample goes on after another one; a document is one run of tokens. "
            "Number its parts differently, or use sdpa or flex, which join them"
        )


def _ends(count_P: Tensor) -> Tensor:
    """Where each piece begins, and where the last one ends, as FlashAttention takes them."""
    return torch.nn.functional.pad(count_P.cumsum(0), (1, 0)).to(torch.int32)


class VarlenAttend:
    """Over this rank's sequences or, with a `group` for context parallelism, over keys and values gathered from it."""

    def __init__(self, group: dist.ProcessGroup | None, window: int | None = None, scale: float | None = None) -> None:
        self.group, self.window, self.scale = group, window, scale
        self.rank, self.degree = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def plan(self, positions_BS: Tensor, documents_BS: Tensor | None) -> Pieces:
        """`positions_BS` are this rank's, `documents_BS` the whole sequence's."""
        width, device = positions_BS.shape[1] * self.degree, positions_BS.device
        if documents_BS is None:
            documents_BS = torch.zeros(len(positions_BS), width, dtype=torch.int64, device=device)
        return pieces_of(head_tail_positions(width, self.degree, self.rank, device), documents_BS)

    def __call__(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Pieces, sinks_H: Tensor | None = None
    ) -> Tensor:
        check_varlen(q_BSHK.shape[-1], has_sinks=sinks_H is not None)
        if self.group is None:  # all keys are wanted, in order
            k_NGK, v_NGK = k_BTGK.flatten(0, 1), v_BTGK.flatten(0, 1)
        else:
            order_W = key_order(k_BTGK.shape[1] * self.degree, self.degree, k_BTGK.device)
            k_NGK, v_NGK = (x.flatten(0, 1)[mask.wanted_N] for x in gathered(k_BTGK, v_BTGK, order_W, self.group))
        reach = (-1 if self.window is None else self.window - 1, 0)
        options: dict[str, Any] = _GROUPED if q_BSHK.shape[2] != k_NGK.shape[1] else {}
        out_NHK = varlen_attn(
            q_BSHK.flatten(0, 1), k_NGK, v_NGK, mask.queries_P1, mask.keys_P1, *mask.longest,
            window_size=reach, scale=self.scale, **options,
        )  # fmt: skip
        assert isinstance(out_NHK, Tensor)
        return out_NHK.view(*q_BSHK.shape[:3], -1)
