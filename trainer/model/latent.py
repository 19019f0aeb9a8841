"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one narrow latent vector.

Positions turn only a part of each query and key; that part of the keys is the same for all heads. Under tensor parallelism a rank
has some heads: the projections to latents are whole on every rank, those from latents are cut between heads.

Shapes: B batch, S sequence, D model dim, H heads, C latent of keys and values, N part of a head that has no position, R part that
has, V value of a head, K = N + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.attention import Attend, Mask, SdpaAttend
from titan_ckpt.trainer.model.linear import Linear
from titan_ckpt.trainer.model.rope import Rotation, from_pairs, rotate
from titan_ckpt.trainer.seams.model import Colwise, Rowwise, Rule, Shared

NORM_EPS = 1e-6  # of the latents' norms, whatever the model's norm_eps: so in DeepSeek's own code and in transformers
_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: `[model.latent]`. Heads have `nope_dim` + `rope_dim` elements, values `value_dim`."""

    kv_rank: int  # size of the latent that keys and values are made from
    q_rank: int | None = None  # size of the latent that queries are made from; unset: they are projected directly
    nope_dim: int = 128  # elements of a head's query and key without a position
    rope_dim: int = 64  # elements that positions turn; those of the key are shared by all heads
    value_dim: int = 128  # elements of a head's value; at most nope_dim + rope_dim

    @property
    def head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim


def check_latent(config: LatentConfig) -> None:
    """ConfigError for sizes that contradict each other."""
    sizes = {"kv_rank": config.kv_rank, "nope_dim": config.nope_dim, "rope_dim": config.rope_dim}
    sizes |= {"value_dim": config.value_dim, "q_rank": 1 if config.q_rank is None else config.q_rank}
    for name, value in sizes.items():
        if not 1 <= value <= _MAX:
            raise ConfigError(f"model.latent.{name} = {value}: must be from 1 to {_MAX}")
    if config.rope_dim % 2:
        raise ConfigError(f"model.latent.rope_dim = {config.rope_dim} is odd, and positions turn pairs")
    if config.value_dim > config.head_dim:
        raise ConfigError(
            f"model.latent.value_dim = {config.value_dim}: more than nope_dim + rope_dim = {config.head_dim}; kernels of "
            "attention take values as wide as keys"
        )


def latent_weights(config: LatentConfig, dim: int, heads: int) -> int:
    """Elements of a layer's projections."""
    outputs = heads * config.head_dim
    queries = dim * outputs if config.q_rank is None else config.q_rank * (dim + outputs)
    keys = dim * (config.kv_rank + config.rope_dim) + config.kv_rank * heads * (config.nope_dim + config.value_dim)
    return queries + keys + heads * config.value_dim * dim


class LatentAttention(nn.Module):
    """Causal attention over keys and values that are expanded from their latents."""

    def __init__(self, config: LatentConfig, dim: int, heads: int, scale: float) -> None:
        super().__init__()
        self.config = config
        if config.q_rank is None:
            self.q_proj = Linear(dim, heads * config.head_dim, bias=False)
        else:
            self.q_a_proj = Linear(dim, config.q_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_rank, NORM_EPS)
            self.q_b_proj = Linear(config.q_rank, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(dim, config.kv_rank + config.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, NORM_EPS)
        self.kv_b_proj = Linear(config.kv_rank, heads * (config.nope_dim + config.value_dim), bias=False)
        self.o_proj = Linear(heads * config.value_dim, dim, bias=False)
        self.window: int | None = None
        self.attend: Attend = SdpaAttend(None, scale)

    def forward(self, x_BSD: Tensor, turn: Rotation, mask: Mask) -> Tensor:
        config = self.config
        q_BSHK = torch.unflatten(self._queries(x_BSD), -1, (-1, config.head_dim))
        c_BSC, k_rope_BSR = self.kv_a_proj_with_mqa(x_BSD).split([config.kv_rank, config.rope_dim], dim=-1)
        kv_BSHX = self.kv_b_proj(self.kv_a_layernorm(c_BSC)).unflatten(-1, (-1, config.nope_dim + config.value_dim))
        k_nope_BSHN, v_BSHV = kv_BSHX.split([config.nope_dim, config.value_dim], dim=-1)
        q_nope_BSHN, q_rope_BSHR = torch.split(q_BSHK, [config.nope_dim, config.rope_dim], dim=-1)
        q_rope_BSHR = rotate(from_pairs(q_rope_BSHR), turn)
        k_rope_BS1R = rotate(from_pairs(k_rope_BSR[:, :, None]), turn)
        k_rope_BSHR = k_rope_BS1R.expand(-1, -1, k_nope_BSHN.shape[2], -1)
        q_BSHK, k_BSHK = torch.cat([q_nope_BSHN, q_rope_BSHR], -1), torch.cat([k_nope_BSHN, k_rope_BSHR], -1)
        v_BSHK = F.pad(v_BSHV, (0, config.head_dim - config.value_dim))  # kernels take values as wide as keys
        o_BSHV = self.attend(q_BSHK, k_BSHK, v_BSHK, mask)[..., : config.value_dim]
        o_BSD: Tensor = self.o_proj(o_BSHV.flatten(-2))
        return o_BSD

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.config.q_rank is None:
            return self.q_proj(x_BSD)  # type: ignore[no-any-return]
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))  # type: ignore[no-any-return]


def latent_rules(module: str, config: LatentConfig) -> dict[str, Rule]:
    """How tp divides the attention called `module`: projections from latents between heads, those to latents not at all."""
    from_latent = "q_proj" if config.q_rank is None else "q_b_proj"
    rules: dict[str, Rule] = {
        f"{module}.{from_latent}": Colwise(unit=config.head_dim, of="heads"),
        f"{module}.kv_a_proj_with_mqa": Shared(),
        f"{module}.kv_a_layernorm": Shared(),
        f"{module}.kv_b_proj": Colwise(unit=config.nope_dim + config.value_dim, of="heads"),
        f"{module}.o_proj": Rowwise(unit=config.value_dim, of="heads"),
    }
    to_latent = () if config.q_rank is None else ("q_a_proj", "q_a_layernorm")
    return rules | {f"{module}.{name}": Shared() for name in to_latent}
