"""A small diffusion transformer: it learns the noise in signals of a class, with the time and the class as two more tokens.

    titan-ckpt train examples/diffusion.toml --module examples/diffusion.py --set mesh.pp=2 --set mesh.dp_shard=2

It is DiT with in-context conditioning (arXiv 2212.09748); the share of the noise follows a cosine of the time.
Shapes: B batch, P patches, N numbers of a patch, S = P + 2 tokens, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.trainer import Colwise, ModelSpec, Region, Rowwise, Shared, Whole


@dataclass(frozen=True, kw_only=True)
class DitConfig:
    """The table `[model]`."""

    num_patches: int = 14
    patch_numbers: int = 48
    dim: int = 64
    n_layers: int = 4
    n_heads: int = 4
    num_classes: int = 10


class Embed(nn.Module):
    """Tokens of the time and the class before those of the patches, with learned positions."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.time, self.patch = nn.Linear(32, config.dim), nn.Linear(config.patch_numbers, config.dim)
        self.kind = nn.Embedding(config.num_classes, config.dim)
        self.positions = nn.Parameter(torch.empty(config.num_patches + 2, config.dim))

    def forward(self, noisy_BPN: Tensor, times_B: Tensor, classes_B: Tensor) -> Tensor:
        angles = times_B[:, None] * 1000.0 ** torch.linspace(0.0, 1.0, 16, device=times_B.device)
        time_BD = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        tokens = [time_BD[:, None], self.kind(classes_B)[:, None], self.patch(noisy_BPN)]
        x_BSD: Tensor = torch.cat(tokens, dim=1) + self.positions
        return x_BSD


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (p(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y_BSD: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return y_BSD


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.norm_1(x_BSD))
        y_BSD: Tensor = x_BSD + self.mlp(self.norm_2(x_BSD))
        return y_BSD


class Predict(nn.Module):
    """The noise of each patch."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(config.dim), nn.Linear(config.dim, config.patch_numbers)

    def forward(self, x_BSD: Tensor) -> Tensor:
        noise_BPN: Tensor = self.linear(self.norm(x_BSD[:, 2:]))
        return noise_BPN


class Dit(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.Sequential(*(Block(config.dim, config.n_heads) for _ in range(config.n_layers)))
        self.predict = Predict(config)

    def forward(self, noisy: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        noise_BPN: Tensor = self.predict(self.blocks(self.embed(noisy, times, classes)))
        return noise_BPN


class SquaredError:
    """Of the noise that was mixed in, the mean over an image."""

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (output - batch["noise"]).square().mean(dim=(1, 2)).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["noise"])


def model(config: DitConfig) -> ModelSpec:
    """How the model is divided over a mesh."""
    heads = Colwise(unit=config.dim // config.n_heads, of="heads")
    return ModelSpec(
        name="DiT", build=lambda: Dit(config), inputs=("noisy", "times", "classes"), loss=SquaredError(),
        first=("embed",), blocks="blocks.*", last=("predict",),
        tensor={
            "embed": Whole(), "blocks.*.norm_[12]": Shared(), "predict": Whole(),
            "blocks.*.attention": Region(), "blocks.*.attention.[qkv]": heads, "blocks.*.attention.out": Rowwise(),
            "blocks.*.mlp": Region(), "blocks.*.mlp.0": Colwise(), "blocks.*.mlp.2": Rowwise(),
        },
    )  # fmt: skip


class Waves:
    """Sample i is a wave of class i modulo the number of classes, with noise that depends on i alone."""

    losses_per_sample = 1

    def __init__(self, config: DitConfig, num_samples: int) -> None:
        self._config, self._num_samples = config, num_samples
        self.fingerprint = f"waves, version 1, {num_samples}, {config}"

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, index: int) -> dict[str, Tensor]:
        """`noisy` and `noise` [P, N], `times` in [0, 1), `classes`."""
        draw, kind, shape = torch.Generator().manual_seed(index), index % self._config.num_classes, self._config
        places = torch.arange(shape.num_patches * shape.patch_numbers).view(shape.num_patches, -1)
        clean, noise = torch.sin(0.02 * (kind + 1) * places), torch.randn(places.shape, generator=draw)
        time = torch.rand((), generator=draw)
        noisy = (time * math.pi / 2).cos() * clean + (time * math.pi / 2).sin() * noise
        return {"noisy": noisy, "times": time, "classes": torch.tensor(kind), "noise": noise}


def data(config: Any) -> Waves:
    """The waves; `validation.fraction` holds some of them out."""
    return Waves(config.model, num_samples=4096)
