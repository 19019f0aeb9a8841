"""Rotary embeddings: the frequencies of every scaling rule, and the rotation (half-split, as Hugging Face stores q and k).

Shapes: B batch, S sequence, H heads, K head dim, P = K / 2 rotated pairs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

RopeKind: TypeAlias = Literal["linear", "llama3", "yarn"]
Rotation: TypeAlias = tuple[Tensor, Tensor]  # cos_BS1K, sin_BS1K in fp32, the sines of the first half negated


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How positions beyond `original_max_seq_len` are scaled; fields that a kind does not use are ignored."""

    kind: RopeKind  # the method, named as in Hugging Face
    factor: float  # how many times longer the context becomes
    original_max_seq_len: int = 8192  # tokens that the model was trained on before scaling
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_max_seq_len / this are scaled in full
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_max_seq_len / this stay
    beta_fast: float = 32.0  # yarn: rotations above which a dimension stays
    beta_slow: float = 1.0  # yarn: rotations below which it is scaled in full
    attention_factor: float | None = None  # yarn: multiplies cosine and sine; unset: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the limits to whole dimensions
    mscale: float | None = None  # yarn: with mscale_all_dim, cosine and sine have the ratio of the two amplitudes
    mscale_all_dim: float | None = None  # of latent attention: its amplitude, squared, multiplies all scores


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary parameters of a model."""

    head_dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None


def rotation(config: RopeConfig, positions_BS: Tensor) -> Rotation:
    """Cosines and signed sines for these positions, computed once per forward and shared by all layers."""
    frequencies_P = _frequencies(config, positions_BS.device)
    angles_BS1P = (positions_BS[..., None].float() * frequencies_P)[:, :, None, :]
    amplitude = _amplitude(config.scaling)
    cos_BS1P, sin_BS1P = angles_BS1P.cos() * amplitude, angles_BS1P.sin() * amplitude
    return torch.cat([cos_BS1P, cos_BS1P], dim=-1), torch.cat([-sin_BS1P, sin_BS1P], dim=-1)


def from_pairs(x_BSHK: Tensor) -> Tensor:
    """Adjacent elements that turn together, as DeepSeek's weights give them, in half-split order."""
    return torch.unflatten(x_BSHK, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rotate(x_BSHK: Tensor, by: Rotation) -> Tensor:
    """Rotate `x` in fp32; returns its own dtype."""
    y_BSHK: Tensor = _Rotate.apply(x_BSHK, *by)  # type: ignore[no-untyped-call]
    return y_BSHK


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); the gradient is the inverse rotation. Halves the memory passes of autograd."""

    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BS1K, sin_BS1K)
        return _turn(x_BSHK, cos_BS1K, sin_BS1K, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_BS1K, sin_BS1K = ctx.saved_tensors
        return _turn(grads[0], cos_BS1K, sin_BS1K, -1.0), None, None


def _turn(x_BSHK: Tensor, cos_BS1K: Tensor, sin_BS1K: Tensor, direction: float) -> Tensor:
    wide_BSHK = x_BSHK.float()
    turned_BSHK = wide_BSHK * cos_BS1K
    pairs = wide_BSHK.shape[-1] // 2
    first, second = slice(None, pairs), slice(pairs, None)
    for here, there in ((first, second), (second, first)):  # in place: swapping the halves would be one more pass
        turned_BSHK[..., here].addcmul_(wide_BSHK[..., there], sin_BS1K[..., here], value=direction)
    return turned_BSHK.type_as(x_BSHK)


@functools.lru_cache(maxsize=8)
def _frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    exponents_P = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    plain_P = 1.0 / (config.theta**exponents_P)
    match config.scaling:
        case None:
            return plain_P
        case RopeScaling(kind="linear", factor=factor):
            return plain_P / factor
        case RopeScaling(kind="llama3"):
            return _llama3(plain_P, config.scaling)
        case _:
            return _yarn(plain_P, config, config.scaling)


def _llama3(plain_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1 model card)."""
    turns_P = scaling.original_max_seq_len * plain_P / (2 * math.pi)
    kept = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_P = kept.clamp(0.0, 1.0)
    return plain_P * kept_P + plain_P / scaling.factor * (1.0 - kept_P)


def _yarn(plain_P: Tensor, config: RopeConfig, scaling: RopeScaling) -> Tensor:
    """A linear ramp over the dimensions between `beta_fast` and `beta_slow` turns (YaRN, arXiv 2309.00071, section 3.2)."""

    def dimension_of(turns: float) -> float:
        waves = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return config.head_dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    pairs_P = torch.arange(len(plain_P), dtype=torch.float32, device=plain_P.device)
    slowed_P = ((pairs_P - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain_P * (1.0 - slowed_P) + plain_P / scaling.factor * slowed_P


def score_amplitude(scaling: RopeScaling | None) -> float:
    """What `mscale_all_dim` multiplies the scores of latent attention by."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _yarn_amplitude(scaling.factor, scaling.mscale_all_dim) ** 2


def _amplitude(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        of_all = _yarn_amplitude(scaling.factor, scaling.mscale_all_dim)
        return _yarn_amplitude(scaling.factor, scaling.mscale) / of_all
    return _yarn_amplitude(scaling.factor, 1.0)


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
