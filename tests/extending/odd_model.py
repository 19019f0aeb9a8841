"""A model with the rules that no example has: a Whole module inside a block, and a Head that is an nn.Linear with a bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.trainer import Colwise, Head, ModelSpec, Region, Rowwise, Shared, Vocab, Whole


class Mix(nn.Module):
    """Mixes each token with the mean of those up to it, so that it needs all of them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        counts_S1 = torch.arange(1, x_BSD.shape[1] + 1, device=x_BSD.device)[:, None]
        y_BSD: Tensor = self.proj(self.norm(x_BSD).cumsum(dim=1) / counts_S1)
        return y_BSD


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inside = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.down(F.gelu(self.up(self.inside(x_BSD))))
        return y_BSD


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix, self.mlp, self.scale = Mix(dim), Mlp(dim), nn.RMSNorm(dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.mix(x_BSD)
        y_BSD: Tensor = self.scale(x_BSD + self.mlp(x_BSD))
        return y_BSD


class Odd(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.layers = nn.ModuleDict({f"layer{i}": Block(dim) for i in range(4)})
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor) -> Tensor:
        h_BSD = self.embed(x)
        for layer in self.layers.values():
            h_BSD = layer(h_BSD)
        logits_BSV: Tensor = self.head(h_BSD)
        return logits_BSV


def odd(dim: int) -> ModelSpec:
    """Its spec; the norm inside the region sees all features of all tokens, yet its gradient is a part of a sum."""
    return ModelSpec(
        name="odd", build=lambda: Odd(dim), inputs=("tokens",), blocks="layers.*", first=("embed",), last=("head",),
        tensor={
            "embed": Vocab(), "layers.*.mix": Whole(), "layers.*.mlp": Region(), "layers.*.mlp.inside": Shared(),
            "layers.*.mlp.up": Colwise(), "layers.*.mlp.down": Rowwise(), "layers.*.scale": Shared(), "head": Head(),
        },
    )  # fmt: skip
