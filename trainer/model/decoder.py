"""One decoder for Llama 3.x, SmolLM2, Qwen2/2.5, Qwen3 and Mistral, with Hugging Face's parameter names and no parallelism.

Parallelism attaches from outside, in four places: `Embedding.lookup`, `SelfAttention.attend` and `LmHead.loss` are replaceable
callables, and a weight may be a DTensor, whose local shard a layer computes with (`local_tensor`). The tables at the end define
which weights may be sharded and how each is initialised. A pipeline stage is the same class with fewer layers.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, K head dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_ckpt.trainer.model.attention import Attend, Mask, SdpaAttend
from titan_ckpt.trainer.model.loss import TokenLoss
from titan_ckpt.trainer.model.rope import RopeConfig, RopeScaling, Rotation, rotate, rotation

TIED = "model.embed_tokens.weight"  # name of the tied embedding and head
Family: TypeAlias = Literal["llama", "qwen2", "qwen3", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. `family` names the Hugging Face architecture it is exported as."""

    vocab_size: int  # rows of the embedding
    dim: int  # size of the residual stream
    n_layers: int  # decoder layers
    n_heads: int  # heads of queries
    n_kv_heads: int  # heads of keys and values; must divide n_heads
    ffn_dim: int  # inner size of the feed-forward part
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # how longer contexts are scaled
    max_seq_len: int = 8192  # longest context, as written to config.json
    tied_embeddings: bool = False  # the head uses the embedding's weights
    qkv_bias: bool = False  # biases of the q, k and v projections
    o_bias: bool = False  # bias of the o projection
    qk_norm: bool = False  # RMSNorm of queries and keys per head
    sliding_window: int | None = None  # tokens that attention looks back; unset: all
    family: Family = "llama"  # architecture in config.json

    @property
    def head_size(self) -> int:
        """Elements per head, given or derived."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope(self) -> RopeConfig:
        """The configuration of rotary embeddings."""
        return RopeConfig(head_dim=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [start, end) of a model: the first stage has the embedding too, the last the final norm and the head."""

    start: int
    end: int


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Embedding(nn.Embedding):
    """Token embedding; `lookup(ids, weight)` is replaced if the vocabulary is sharded."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.lookup(ids_BS, local_tensor(self.weight))


class Linear(nn.Linear):
    """A projection; `bias_share` is 1 / tp where each tp rank's output is a partial sum that contains the bias."""

    bias_share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is not None and self.bias_share != 1.0:
            bias = bias * self.bias_share
        return F.linear(x, local_tensor(self.weight), bias)


class LmHead(nn.Linear):
    """Logits, or with labels the sum of token losses, without materialising all logits."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.loss = TokenLoss()

    def forward(self, h_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        if labels_BS is None:
            return F.linear(h_BSD, local_tensor(self.weight))
        return self.loss(h_BSD, local_tensor(self.weight), labels_BS)


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = local_tensor(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention. The number of heads follows from the projections' width, since a rank may have only some."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, H, G, K = config.dim, config.n_heads, config.n_kv_heads, config.head_size
        self.head_dim = K
        self.q_proj = Linear(D, H * K, bias=config.qkv_bias)
        self.k_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.v_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.o_proj = Linear(H * K, D, bias=config.o_bias)
        self.q_norm = Norm(K, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(K, config.norm_eps) if config.qk_norm else None
        self.attend: Attend = SdpaAttend(config.sliding_window)

    def forward(self, x_BSD: Tensor, turn: Rotation, mask: Mask) -> Tensor:
        heads = (-1, self.head_dim)
        q_BSHK = self.q_proj(x_BSD).unflatten(-1, heads)
        k_BSGK = self.k_proj(x_BSD).unflatten(-1, heads)
        v_BSGK = self.v_proj(x_BSD).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        o_BSHK = self.attend(rotate(q_BSHK, turn), rotate(k_BSGK, turn), v_BSGK, mask)
        o_BSD: Tensor = self.o_proj(o_BSHK.flatten(-2))
        return o_BSD


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        y_BSD: Tensor = self.down_proj(h_BSF)
        return y_BSD


class DecoderLayer(nn.Module):
    """One layer: the unit of FSDP, of activation checkpointing and of compilation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.dim, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = Norm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BSD: Tensor, turn: Rotation, mask: Mask) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), turn, mask)
        y_BSD: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return y_BSD


class Backbone(nn.Module):
    """Everything but the head, under Hugging Face's prefix `model.`."""

    def __init__(self, config: ModelConfig, layers: LayerRange) -> None:
        super().__init__()
        is_last = layers.end == config.n_layers
        self.rope = config.rope
        self.embed_tokens = Embedding(config.vocab_size, config.dim) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(layers.start, layers.end)})
        self.norm = Norm(config.dim, config.norm_eps) if is_last else None

    def forward(self, x: Tensor, positions_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
        h_BSD: Tensor = x if self.embed_tokens is None else self.embed_tokens(x)
        turn = rotation(self.rope, positions_BS)
        mask = self.attend.plan(positions_BS, documents_BS)
        for layer in self.layers.values():
            h_BSD = layer(h_BSD, turn, mask)
        return h_BSD if self.norm is None else self.norm(h_BSD)

    @property
    def attend(self) -> Attend:
        """The attention that all layers share."""
        attention = next(iter(self.layers.values())).self_attn
        assert isinstance(attention, SelfAttention)
        return attention.attend


class Decoder(nn.Module):
    """A causal language model, or the pipeline stage with the given `layers` (default: all).

    `forward` takes token ids on the first stage, hidden states on the others. It returns hidden states; on the last stage
    logits, or with `labels_BS` the sum of token losses, shape (1,). `documents_BS` numbers the documents of packed
    sequences: a token sees only its own document.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange | None = None) -> None:
        super().__init__()
        self.layer_range = layers or LayerRange(0, config.n_layers)
        is_last = self.layer_range.end == config.n_layers
        self.model = Backbone(config, self.layer_range)
        self.lm_head = LmHead(config.dim, config.vocab_size) if is_last else None
        self.tied_embeddings = config.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """Tie head and embedding if the config asks for it; needed again after `to_empty`, which unties them."""
        if self.tied_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name; a tied head on another stage than its embedding has the embedding's name."""
        is_copy = self.tied_embeddings and self.model.embed_tokens is None
        for fqn, parameter in self.named_parameters():
            yield TIED if is_copy and fqn == "lm_head.weight" else fqn, parameter

    def forward(
        self,
        x: Tensor,
        labels_BS: Tensor | None = None,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        if positions_BS is None:
            positions_BS = torch.arange(x.shape[1], device=x.device)[None]
        h_BSD: Tensor = self.model(x, positions_BS, documents_BS)
        if self.lm_head is None:
            return h_BSD
        out: Tensor = self.lm_head(h_BSD, labels_BS)
        return out


# What tensor parallelism shards: module name -> dimension of its weight. A projection sharded along 1 outputs partial sums.
TENSOR_CUTS = {
    "embed_tokens": 0,
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "lm_head": 0,
}
# Inside these modules a rank has some of the heads or features; outside, all of them.
TENSOR_REGIONS = ("self_attn", "mlp")
# Norms inside a region see only this rank's heads; under sequence parallelism those outside see only this rank's tokens.
NORMS_INSIDE = ("q_norm", "k_norm")
NORMS_OUTSIDE = ("input_layernorm", "post_attention_layernorm", "norm")

INIT_STD = 0.02


def initial_std(fqn: str, n_layers: int) -> float | None:
    """Initial standard deviation of a weight; None for constants (norms 1, biases 0).

    Projections into the residual stream are scaled down by sqrt(2 x layers), as in GPT-2.
    """
    if fqn.endswith(".bias") or "norm" in fqn:
        return None
    into_residual = fqn.endswith(("o_proj.weight", "down_proj.weight"))
    return INIT_STD / math.sqrt(2 * n_layers) if into_residual else INIT_STD
