"""GPT-2 for the trainer: learned positions, LayerNorm, biases, and a head tied to the embedding.

    titan-ckpt train examples/gpt2.toml --module examples/gpt2.py --set mesh.dp_shard=2 --set mesh.tp=2

The model is plain PyTorch; `model` says how it is divided.

Shapes: B batch, S sequence, D model dim, H heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.trainer import (
    Attend,
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
    Whole,
)


@dataclass(frozen=True, kw_only=True)
class Gpt2Config:
    """The table `[model]`."""

    vocab_size: int = 50257
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    max_seq_len: int = 1024


class Embed(nn.Module):
    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.max_seq_len, config.dim)

    def forward(self, ids_BS: Tensor, positions_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.wte(ids_BS) + self.wpe(positions_BS)
        return x_BSD


class Attention(nn.Module):
    """The number of heads follows from the projections' width: under tensor parallelism a rank has some of them."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.q_proj = nn.Linear(config.dim, config.dim)
        self.k_proj = nn.Linear(config.dim, config.dim)
        self.v_proj = nn.Linear(config.dim, config.dim)
        self.o_proj = nn.Linear(config.dim, config.dim)
        self.attend: Attend = SdpaAttend()  # replaced under context parallelism

    def forward(self, x_BSD: Tensor, mask: object) -> Tensor:
        q, k, v = (p(x_BSD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out_BSD: Tensor = self.o_proj(self.attend(q, k, v, mask).flatten(-2))
        return out_BSD


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
        return y_BSD


class Block(nn.Module):
    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attn, self.mlp = Attention(config), Mlp(config.dim)

    def forward(self, x_BSD: Tensor, mask: object) -> Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), mask)
        y_BSD: Tensor = x_BSD + self.mlp(self.ln_2(x_BSD))
        return y_BSD


class Gpt2(nn.Module):
    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.lm_head = LmHead(config.dim, config.vocab_size)
        self.lm_head.weight = self.embed.wte.weight

    def forward(self, x: Tensor, *, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        h_BSD = self.embed(x, positions)
        attention = next(block.attn for block in self.h if isinstance(block, Block))
        mask = attention.attend.plan(positions, None)
        for block in self.h:
            h_BSD = block(h_BSD, mask)
        out: Tensor = self.lm_head(self.ln_f(h_BSD), labels)
        return out


def model(config: Gpt2Config) -> ModelSpec:
    """How GPT-2 is divided over a mesh."""
    return ModelSpec(
        name="GPT-2",
        build=lambda: Gpt2(config),
        inputs=("tokens", "labels", "positions"),
        blocks="h.*",
        first=("embed",),
        last=("ln_f", "lm_head"),
        loss=LossInModel(),  # LmHead computes it, chunk by chunk and over a divided vocabulary
        tensor={
            "embed.wte": Vocab(),
            "embed.wpe": Whole(),
            "h.*.attn": Region(),
            "h.*.attn.[qkv]_proj": Colwise(unit=config.dim // config.n_heads, of="heads"),
            "h.*.attn.o_proj": Rowwise(),
            "h.*.mlp": Region(),
            "h.*.mlp.up": Colwise(),
            "h.*.mlp.down": Rowwise(),
            "h.*.ln_[12]": Shared(),
            "ln_f": Shared(),
            "lm_head": Head(),
        },
        attention="h.*.attn",
        sequence=("tokens", "labels"),
        tied={"lm_head.weight": "embed.wte.weight"},
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
    )
