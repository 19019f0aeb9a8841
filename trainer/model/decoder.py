"""One decoder for Llama 3.x, SmolLM2, Qwen2/2.5, Qwen3, Mistral, Mixtral and Qwen3-MoE, with Hugging Face's parameter names.

There is no parallelism in it: that attaches from outside, by the `ModelSpec` at the end, which uses nothing that a user's model
cannot. The kernels `SelfAttention.attend` and `LmHead.loss` are replaceable, and so is the way to `Experts`.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, K head dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear, RMSNorm

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.attention import Attend, Mask, SdpaAttend
from titan_ckpt.trainer.model.experts import ExpertsConfig, MixtureOfExperts, check_experts
from titan_ckpt.trainer.model.head import LmHead
from titan_ckpt.trainer.model.rope import RopeConfig, RopeScaling, Rotation, rotate, rotation
from titan_ckpt.trainer.seams.loss import LossInModel
from titan_ckpt.trainer.seams.model import (
    Colwise,
    Constant,
    Head,
    Initial,
    ModelSpec,
    Normal,
    Region,
    Rowwise,
    Rule,
    Shared,
    Vocab,
)

Family: TypeAlias = Literal["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"]

MIXTURES: tuple[Family, ...] = ("mixtral", "qwen3_moe")


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
    experts: ExpertsConfig | None = None  # a mixture of experts as feed-forward part; unset: a dense model
    family: Family = "llama"  # architecture in config.json

    @property
    def head_size(self) -> int:
        """Elements per head, given or derived."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope(self) -> RopeConfig:
        """The configuration of rotary embeddings."""
        return RopeConfig(head_dim=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def dense_layers(self) -> int:
        """The first layers, whose feed-forward part is dense; all of a model without experts."""
        return self.n_layers if self.experts is None else self.experts.dense_layers


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
        self.q_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else None
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
    shared = FeedForward(config.dim, experts.shared * experts.ffn_dim) if experts.shared else None
    return MixtureOfExperts(experts, config.dim, shared)


class DecoderLayer(nn.Module):
    """One layer: the unit of FSDP, of activation checkpointing and of compilation."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = SelfAttention(config)
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

    def forward(self, x: Tensor, positions_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
        h_BSD = self.embed_tokens(x)
        turn = rotation(self.rope, positions_BS)
        mask = self.attend.plan(positions_BS, documents_BS)
        for layer in self.layers.values():
            h_BSD = layer(h_BSD, turn, mask)
        out_BSD: Tensor = self.norm(h_BSD)
        return out_BSD

    @property
    def attend(self) -> Attend:
        """The attention that all layers share."""
        attention = next(layer.self_attn for layer in self.layers.values() if isinstance(layer, DecoderLayer))
        return attention.attend


class Decoder(nn.Module):
    """A causal language model.

    `forward` takes token ids, or hidden states on a later pipeline stage. It returns logits, or with `labels` the sum of token
    losses, shape (1,). `documents` numbers the documents of packed sequences: a token sees only its own document.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        self.lm_head = LmHead(config.dim, config.vocab_size)
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        h_BSD: Tensor = self.model(x, positions, documents)
        out: Tensor = self.lm_head(h_BSD, labels)
        return out


INIT_STD = 0.02


def initial(fqn: str, n_layers: int) -> Initial:
    """How a weight is initialised; projections into the residual stream are scaled down by sqrt(2 x layers), as in GPT-2."""
    if fqn.endswith(".bias") or "norm" in fqn:
        return Constant(value=0.0 if fqn.endswith(".bias") else 1.0)
    into_residual = fqn.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return Normal(std=INIT_STD / math.sqrt(2 * n_layers) if into_residual else INIT_STD)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward: 6 per weight in a matrix product; attention takes 12 per layer, head dimension and key.

    Source: PaLM, appendix B. The embedding look-up counts nothing, nor do experts that a token does not use; the causal mask is
    not deducted.
    """
    head, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    attention = model.n_layers * model.dim * (2 * head + 2 * kv)
    dense = model.dense_layers * 3 * model.dim * model.ffn_dim
    weights = attention + dense + model.vocab_size * model.dim
    if model.experts is not None:
        active = model.experts.per_token + model.experts.shared
        mixture = model.dim * (3 * active * model.experts.ffn_dim + model.experts.number)
        weights += (model.n_layers - model.dense_layers) * mixture
    return 6.0 * weights + 12.0 * model.n_layers * head * seq_len


def decoder(config: ModelConfig) -> ModelSpec:
    """The spec of `Decoder`; ConfigError for heads that do not divide."""
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(
            f"model: {config.n_heads} query heads are not a multiple of {config.n_kv_heads} key/value heads"
        )
    if not config.head_dim and config.dim % config.n_heads:
        raise ConfigError(f"model: dim {config.dim} / {config.n_heads} heads is not whole; give head_dim")
    _check_mixture(config)
    return ModelSpec(
        name=f"the decoder of family {config.family}",
        build=lambda: Decoder(config),
        inputs=("tokens", "labels", "positions", "documents"),
        blocks="model.layers.*",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        loss=LossInModel(),
        tensor=_tensor_rules(config),
        attention="model.layers.*.self_attn",
        experts="" if config.experts is None else "model.layers.*.mlp.experts",
        sequence=("tokens", "labels"),
        tied={"lm_head.weight": "model.embed_tokens.weight"} if config.tied_embeddings else {},
        initial=lambda fqn: initial(fqn, config.n_layers),
        config=config,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
        flops_per_token=lambda seq_len: flops_per_token(config, seq_len),
    )


def _check_mixture(config: ModelConfig) -> None:
    """ConfigError for experts that contradict each other or the family."""
    experts, is_mixture = config.experts, config.family in MIXTURES
    if experts is None:
        if is_mixture:
            raise ConfigError(f"model: family {config.family} is a mixture of experts: give the table [model.experts]")
        return
    check_experts(experts)
    if not is_mixture:
        raise ConfigError(
            f"model.experts: family {config.family} has none; families with experts: {', '.join(MIXTURES)}"
        )
    if config.family == "mixtral" and config.ffn_dim != experts.ffn_dim:
        raise ConfigError(
            f"model.ffn_dim = {config.ffn_dim}, model.experts.ffn_dim = {experts.ffn_dim}: family mixtral has one width for both"
        )
    if experts.dense_layers >= config.n_layers:
        raise ConfigError(
            f"model.experts.dense_layers = {experts.dense_layers} leaves no layer of {config.n_layers} for experts"
        )


def _tensor_rules(config: ModelConfig) -> dict[str, Rule]:
    """q, k and v are cut between heads: a rank has the query heads of its key/value heads. Experts are whole."""
    layer, size, groups = "model.layers.*", config.head_size, config.n_heads // config.n_kv_heads
    rules: dict[str, Rule] = {
        "model.embed_tokens": Vocab(),
        f"{layer}.self_attn": Region(),
        f"{layer}.self_attn.[kv]_proj": Colwise(unit=size, of="key/value heads"),
        f"{layer}.self_attn.q_proj": Colwise(unit=size * groups, of="key/value heads"),
        f"{layer}.self_attn.o_proj": Rowwise(unit=size * groups, of="key/value heads"),
        f"{layer}.*layernorm": Shared(),
        "model.norm": Shared(),
        "lm_head": Head(),
    }
    rules |= {f"{layer}.self_attn.[qk]_norm": Shared()} if config.qk_norm else {}
    if config.experts is None:
        return rules | _feed_forward_rules(f"{layer}.mlp")
    rules |= {f"{layer}.mlp.gate": Shared(), f"{layer}.mlp.experts": Shared()}
    for dense in range(config.dense_layers):
        rules |= _feed_forward_rules(f"model.layers.{dense}.mlp")
    return rules | (_feed_forward_rules(f"{layer}.mlp.shared_experts") if config.experts.shared else {})


def _feed_forward_rules(module: str) -> dict[str, Rule]:
    return {
        module: Region(),
        f"{module}.gate_proj": Colwise(of="ffn_dim"),
        f"{module}.up_proj": Colwise(of="ffn_dim"),
        f"{module}.down_proj": Rowwise(of="ffn_dim"),
    }
