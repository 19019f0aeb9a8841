"""The layers of transformers' own modelling code, under the trainer's parallelism and with its attention.

    pip install 'titan-ckpt[hf]'
    titan-ckpt train examples/gpt2.toml --module examples/transformers_llama.py --set mesh.cp=2 --set model.n_layers=4

Weights have Hugging Face's names. The loop over the layers is written out, because transformers' own builds masks and caches
that training does not need; the layers, norms and rotary embeddings are theirs, unchanged.

Shapes: B batch, S sequence, D model dim, H heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

from titan_ckpt.trainer import (
    Colwise,
    Head,
    LmHead,
    LossInModel,
    ModelSpec,
    Region,
    Rowwise,
    SdpaAttend,
    Shared,
    Vocab,
)

ATTENTION = "titan_ckpt"


def _attend(module: Any, q_BHSK: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    """transformers calls this in every attention layer."""
    return module.attend(*(x.transpose(1, 2) for x in (q_BHSK, k, v)), attention_mask), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The table `[model]`."""

    vocab_size: int = 320
    dim: int = 64
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    max_seq_len: int = 256

    def for_transformers(self) -> LlamaConfig:
        """The config of transformers."""
        made: Any = LlamaConfig
        config: LlamaConfig = made(
            vocab_size=self.vocab_size, hidden_size=self.dim, num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads, num_key_value_heads=self.n_kv_heads, intermediate_size=4 * self.dim,
            max_position_embeddings=self.max_seq_len, attn_implementation=ATTENTION,
        )  # fmt: skip
        return config


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model: Any = LlamaModel(config)
        self.lm_head = LmHead(config.hidden_size, config.vocab_size)
        layers: Any = self.model.layers
        for layer in layers:
            layer.self_attn.attend = SdpaAttend()

    def forward(self, x: Tensor, *, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        h_BSD = self.model.embed_tokens(x)
        rotary = self.model.rotary_emb(h_BSD, position_ids=positions)
        attention = next(layer.self_attn for layer in self.model.layers if hasattr(layer, "self_attn"))
        mask = attention.attend.plan(positions, None)
        for layer in self.model.layers:
            h_BSD = layer(h_BSD, attention_mask=mask, position_embeddings=rotary)
        out: Tensor = self.lm_head(self.model.norm(h_BSD), labels)
        return out


def fill_rotary(model: nn.Module) -> None:
    """The frequencies of rotary embeddings, which transformers keeps in buffers."""
    for module in model.modules():
        if isinstance(module, LlamaRotaryEmbedding):
            made = LlamaRotaryEmbedding(module.config)
            module.inv_freq.copy_(made.inv_freq)
            module.original_inv_freq.copy_(made.original_inv_freq)


def model(shape: LlamaShape) -> ModelSpec:
    """How transformers' Llama is divided over a mesh."""
    config = shape.for_transformers()
    layer, size, groups = "model.layers.*", shape.dim // shape.n_heads, shape.n_heads // shape.n_kv_heads
    return ModelSpec(
        name="transformers' Llama",
        build=lambda: Llama(config),
        inputs=("tokens", "labels", "positions"),
        blocks=layer,
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        loss=LossInModel(),
        tensor={
            "model.embed_tokens": Vocab(),
            f"{layer}.self_attn": Region(),
            f"{layer}.self_attn.q_proj": Colwise(unit=size * groups, of="key/value heads"),
            f"{layer}.self_attn.[kv]_proj": Colwise(unit=size, of="key/value heads"),
            f"{layer}.self_attn.o_proj": Rowwise(unit=size * groups, of="key/value heads"),
            f"{layer}.mlp": Region(),
            f"{layer}.mlp.gate_proj": Colwise(),
            f"{layer}.mlp.up_proj": Colwise(),
            f"{layer}.mlp.down_proj": Rowwise(),
            f"{layer}.*layernorm": Shared(),
            "model.norm": Shared(),
            "lm_head": Head(),
        },
        attention=f"{layer}.self_attn",
        sequence=("tokens", "labels"),
        fill_buffers=fill_rotary,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.max_seq_len,
    )
