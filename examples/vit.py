"""A vision transformer that classifies images, with a data source of its own.

    titan-ckpt train examples/vit.toml --module examples/vit.py --set mesh.pp=2 --set mesh.dp_shard=2

`Images` are smooth patterns, one per class, moved and covered with noise, made from their number alone.

Shapes: B batch, C channels, P patches, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.trainer import Accuracy, Colwise, ModelSpec, Region, Rowwise, Shared, Whole


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """The table `[model]`."""

    channels: int = 3
    image_size: int = 32
    patch_size: int = 8
    dim: int = 64
    n_layers: int = 4
    n_heads: int = 4
    num_classes: int = 10


class Embed(nn.Module):
    """Patches as tokens, with learned positions."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(config.channels, config.dim, size := config.patch_size, stride=size)
        self.positions = nn.Parameter(torch.empty((config.image_size // size) ** 2, config.dim))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BPD: Tensor = self.patches(images_BCHW).flatten(2).transpose(1, 2) + self.positions
        return x_BPD


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_BPD: Tensor) -> Tensor:
        q, k, v = (p(x_BPD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y_BPD: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return y_BPD


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_BPD: Tensor) -> Tensor:
        x_BPD = x_BPD + self.attention(self.norm_1(x_BPD))
        y_BPD: Tensor = x_BPD + self.mlp(self.norm_2(x_BPD))
        return y_BPD


class Classify(nn.Module):
    """The mean over the patches, to one number per class."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x_BPD: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(x_BPD).mean(dim=1))
        return scores


class Vit(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.Sequential(*(Block(config.dim, config.n_heads) for _ in range(config.n_layers)))
        self.classify = Classify(config.dim, config.num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.blocks(self.embed(images_BCHW)))
        return scores


def model(config: VitConfig) -> ModelSpec:
    """How the model is divided over a mesh; its loss is the default, cross-entropy with `labels`."""
    return ModelSpec(
        name="ViT",
        build=lambda: Vit(config),
        inputs=("images",),
        first=("embed",),
        blocks="blocks.*",
        last=("classify",),
        tensor={
            "embed": Whole(),
            "blocks.*.attention": Region(),
            "blocks.*.attention.[qkv]": Colwise(unit=config.dim // config.n_heads, of="heads"),
            "blocks.*.attention.out": Rowwise(),
            "blocks.*.mlp": Region(),
            "blocks.*.mlp.0": Colwise(),
            "blocks.*.mlp.2": Rowwise(),
            "blocks.*.norm_[12]": Shared(),
            "classify": Whole(),
        },
    )


class Images:
    """Image i shows class i modulo the number of classes."""

    losses_per_sample = 1

    def __init__(self, config: VitConfig, num_samples: int) -> None:
        self._config, self._num_samples = config, num_samples
        self.fingerprint = f"generated images, version 1, {num_samples}, {config}"
        axis = torch.linspace(0.0, 6.283, config.image_size)
        self._y_HW, self._x_HW = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, index: int) -> dict[str, Tensor]:
        """`images` [C, H, W] and `labels`, a number."""
        draw = torch.Generator().manual_seed(index)
        label = index % self._config.num_classes
        dx, dy = 0.5 * torch.randn(2, generator=draw)
        waves = (torch.sin((1 + label % 5) * (self._x_HW + dx) + c + label // 5 * (self._y_HW + dy)) for c in range(3))
        image = torch.stack(list(waves))
        return {"images": image + 0.3 * torch.randn(image.shape, generator=draw), "labels": torch.tensor(label)}


metrics = {"accuracy": Accuracy()}


def data(config: Any) -> Images:
    """The images; `validation.fraction` holds some of them out."""
    return Images(config.model, num_samples=4096)
