"""One decoder for dense models (Llama 3.x, SmolLM2, Qwen2/2.5, Qwen3, Mistral) and mixtures of experts (Mixtral, Qwen3-MoE,
DeepSeek-V2 and V3, GPT-OSS), with Hugging Face's parameter names.

There is no parallelism in it: that attaches from outside, by the `ModelSpec` at the end, which uses nothing that a user's model
cannot. The kernels `SelfAttention.attend` and `LmHead.loss` are replaceable, and so is the way to `Experts`.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, K head dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.ahead import (
    AHEAD_LABELS,
    AHEAD_TOKENS,
    Ahead,
    AheadConfig,
    Predictor,
    ahead_fields,
)
from titan_ckpt.trainer.model.attention import Attend, Mask, SdpaAttend
from titan_ckpt.trainer.model.experts import ClampedMixture, ExpertsConfig, MixtureOfExperts
from titan_ckpt.trainer.model.families import Family, check_attention, check_mixture, tensor_rules
from titan_ckpt.trainer.model.head import LmHead
from titan_ckpt.trainer.model.latent import LatentAttention, LatentConfig, latent_weights
from titan_ckpt.trainer.model.linear import Linear
from titan_ckpt.trainer.model.rope import RopeConfig, RopeScaling, Rotation, rotate, rotation, score_amplitude
from titan_ckpt.trainer.seams.loss import LossInModel
from titan_ckpt.trainer.seams.model import Constant, Initial, ModelSpec, Normal


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
    full_attention_every: int = 0  # with sliding_window: every n-th layer looks back over all tokens; 0: none
    sinks: bool = False  # a learnt score of each head, to which it attends instead of tokens
    latent: LatentConfig | None = None  # multi-head latent attention; unset: grouped-query attention
    experts: ExpertsConfig | None = None  # a mixture of experts as feed-forward part; unset: a dense model
    ahead: AheadConfig | None = None  # prediction of more tokens than the next; unset: none
    family: Family = "llama"  # architecture in config.json

    @property
    def head_size(self) -> int:
        """Elements per head's query and key, given or derived."""
        if self.latent is not None:
            return self.latent.head_dim
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope(self) -> RopeConfig:
        """The configuration of rotary embeddings."""
        turned = self.head_size if self.latent is None else self.latent.rope_dim
        return RopeConfig(head_dim=turned, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def attention_weights(self) -> int:
        """Elements of the attention matrices of a layer."""
        if self.latent is not None:
            return latent_weights(self.latent, self.dim, self.n_heads)
        return 2 * self.dim * self.head_size * (self.n_heads + self.n_kv_heads)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer looks back; None: all."""
        is_full = self.full_attention_every and (layer + 1) % self.full_attention_every == 0
        return None if is_full else self.sliding_window

    @property
    def dense_layers(self) -> int:
        """The first layers, whose feed-forward part is dense; all of a model without experts."""
        return self.n_layers if self.experts is None else self.experts.dense_layers


class SelfAttention(nn.Module):
    """Grouped-query attention. The number of heads follows from the projections' width, since a rank may have only some."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, H, G, K = config.dim, config.n_heads, config.n_kv_heads, config.head_size
        self.head_dim = K
        self.q_proj = Linear(D, H * K, bias=config.qkv_bias)
        self.k_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.v_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.o_proj = Linear(H * K, D, bias=config.o_bias)
        self.q_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(H)) if config.sinks else None
        self.window = config.window_of(layer)
        self.attend: Attend = SdpaAttend(self.window)

    def forward(self, x_BSD: Tensor, turn: Rotation, mask: Mask) -> Tensor:
        heads = (-1, self.head_dim)
        q_BSHK = self.q_proj(x_BSD).unflatten(-1, heads)
        k_BSGK = self.k_proj(x_BSD).unflatten(-1, heads)
        v_BSGK = self.v_proj(x_BSD).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        sinks = () if self.sinks is None else (self.sinks,)
        o_BSHK = self.attend(rotate(q_BSHK, turn), rotate(k_BSGK, turn), v_BSGK, mask, *sinks)
        o_BSD: Tensor = self.o_proj(o_BSHK.flatten(-2))
        return o_BSD


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, ffn_dim, bias=False)
        self.up_proj = Linear(dim, ffn_dim, bias=False)
        self.down_proj = Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        y_BSD: Tensor = self.down_proj(h_BSF)
        return y_BSD


def feed_forward(config: ModelConfig, layer: int) -> nn.Module:
    """The feed-forward part of a layer: dense, or a mixture of experts."""
    experts = config.experts
    if experts is None or layer < experts.dense_layers:
        return FeedForward(config.dim, config.ffn_dim)
    if experts.limit is not None:
        return ClampedMixture(experts, config.dim)
    shared = FeedForward(config.dim, experts.shared * experts.ffn_dim) if experts.shared else None
    return MixtureOfExperts(experts, config.dim, shared)


def attention(config: ModelConfig, layer: int) -> SelfAttention | LatentAttention:
    """The attention of a layer."""
    if config.latent is None:
        return SelfAttention(config, layer)
    scale = config.latent.head_dim**-0.5 * score_amplitude(config.rope_scaling)
    return LatentAttention(config.latent, config.dim, config.n_heads, scale)


class DecoderLayer(nn.Module):
    """One layer: the unit of FSDP, of activation checkpointing and of compilation."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = feed_forward(config, layer)

    def forward(self, x_BSD: Tensor, turn: Rotation, mask: Mask) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), turn, mask)
        y_BSD: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return y_BSD


class Backbone(nn.Module):
    """Everything but the head, under Hugging Face's prefix `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope = config.rope
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if config.ahead is not None:
            layers = [DecoderLayer(config, config.n_layers) for _ in range(config.ahead.depth)]
            modules = [Predictor(config.dim, config.norm_eps, layer) for layer in layers]
            self.ahead = Ahead(self.embed_tokens, modules)

    def forward(
        self, x: Tensor, positions_BS: Tensor, documents_BS: Tensor | None, ahead_BSM: Tensor | None = None
    ) -> Tensor:
        """Normalised hidden states; with the tokens of `Ahead` also those of its modules, along the batch."""
        h_BSD = self.embed_tokens(x)
        turn = rotation(self.rope, positions_BS)
        masks: dict[int | None, Mask] = {}  # one for all layers with the same window

        def mask_of(layer: nn.Module) -> Mask:
            if not isinstance(layer, DecoderLayer):
                return None  # one of another pipeline stage
            window = layer.self_attn.window
            if window not in masks:
                masks[window] = layer.self_attn.attend.plan(positions_BS, documents_BS)
            return masks[window]

        for layer in self.layers.values():
            h_BSD = layer(h_BSD, turn, mask_of(layer))
        out_BSD: Tensor = self.norm(h_BSD)
        return out_BSD if ahead_BSM is None else self.ahead(out_BSD, ahead_BSM, turn, mask_of)


class Decoder(nn.Module):
    """A causal language model.

    `forward` takes token ids, or hidden states on a later pipeline stage. It returns logits, or with `labels` the sum of token
    losses, shape (1,). `documents` numbers the documents of packed sequences: a token sees only its own document.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        self.lm_head = LmHead(config.dim, config.vocab_size)
        self.share = 0.0 if config.ahead is None else config.ahead.weight / config.ahead.depth
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_labels: Tensor | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        if not torch.is_grad_enabled():
            ahead_tokens = ahead_labels = None  # they count while training alone
        h_BSD: Tensor = self.model(x, positions, documents, ahead_tokens)
        first = None if labels is None else len(labels)
        if labels is not None and ahead_labels is not None:
            labels = torch.cat([labels, *ahead_labels.unbind(-1)])
        out: Tensor = self.lm_head(h_BSD, labels, first=first, share=self.share)
        return out


INIT_STD = 0.02


def initial(fqn: str, n_layers: int) -> Initial:
    """How a weight is initialised; projections into the residual stream are scaled down by sqrt(2 x layers), as in GPT-2."""
    if fqn.endswith("bias") or "norm" in fqn:
        return Constant(value=0.0 if fqn.endswith("bias") else 1.0)
    into_residual = fqn.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return Normal(std=INIT_STD / math.sqrt(2 * n_layers) if into_residual else INIT_STD)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward: 6 per weight in a matrix product; attention takes 12 per layer, head dimension and key.

    Source: PaLM, appendix B. The embedding look-up counts nothing, nor do experts that a token does not use; the causal mask is
    not deducted.
    """
    head = model.n_heads * model.head_size
    dense = model.dense_layers * 3 * model.dim * model.ffn_dim
    weights = model.n_layers * model.attention_weights + dense + model.vocab_size * model.dim
    if model.experts is not None:
        active = model.experts.per_token + model.experts.shared
        mixture = model.dim * (3 * active * model.experts.ffn_dim + model.experts.number)
        weights += (model.n_layers - model.dense_layers) * mixture
        if model.ahead is not None:
            module = mixture + model.attention_weights + 2 * model.dim**2 + model.vocab_size * model.dim
            weights += model.ahead.depth * module
    return 6.0 * weights + 12.0 * model.n_layers * head * seq_len


def decoder(config: ModelConfig) -> ModelSpec:
    """The spec of `Decoder`; ConfigError for heads that do not divide."""
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(
            f"model: {config.n_heads} query heads are not a multiple of {config.n_kv_heads} key/value heads"
        )
    if config.latent is None and not config.head_dim and config.dim % config.n_heads:
        raise ConfigError(f"model: dim {config.dim} / {config.n_heads} heads is not whole; give head_dim")
    if config.latent is None and config.head_size % 2:
        raise ConfigError(
            f"model: heads of {config.head_size} elements are odd, and positions turn pairs; change dim or head_dim"
        )
    check_attention(config)
    check_mixture(config)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_embeddings else {}
    more: dict[str, Any] = {}
    if config.ahead is not None:
        tied["model.ahead.embed_tokens.weight"] = "model.embed_tokens.weight"
        more = {"units": "model.ahead.depths.*", "derived": partial(ahead_fields, depth=config.ahead.depth)}
    fields = () if config.ahead is None else (AHEAD_TOKENS, AHEAD_LABELS)
    return ModelSpec(
        name=f"the decoder of family {config.family}",
        build=lambda: Decoder(config),
        inputs=("tokens", "labels", "positions", "documents", *fields),
        blocks="model.layers.*",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head", *(("model.ahead",) if config.ahead is not None else ())),
        loss=LossInModel(),
        tensor=tensor_rules(config),
        attention="model.**.self_attn",
        experts="" if config.experts is None else "model.**.mlp.experts",
        sequence=("tokens", "labels", *fields),
        tied=tied,
        initial=lambda fqn: initial(fqn, config.n_layers),
        config=config,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
        flops_per_token=lambda seq_len: flops_per_token(config, seq_len),
        **more,
    )
