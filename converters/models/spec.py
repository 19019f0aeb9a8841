"""The model spec: what besides the weights decides a decoder's logits. Fields are those of a training config's `[model]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from titan_ckpt.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRopeScaling:
    """Scaling of rotary positions; fields that a kind (linear, llama3, yarn) does not use are ignored."""

    kind: str
    factor: float
    original_max_seq_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: a router picks `per_token` of `number` experts, each `ffn_dim` wide.

    The fields are those of `[model.experts]`; each family can express some of them, and the defaults of the others.
    """

    number: int
    per_token: int
    ffn_dim: int
    norm_topk_prob: bool = True
    scores: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 2
    scale: float = 1.0
    shared: int = 0
    dense_layers: int = 0
    limit: float | None = None
    alpha: float = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: sizes of the latents, of a head's query and key without and with a position, of its value."""

    kv_rank: int
    q_rank: int | None = None
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Modules after the last layer that predict the tokens after the next one: `depth` of them, as in DeepSeek-V3."""

    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder. `rope_scaling` is None for plain rotary positions, `experts` for a dense feed-forward."""

    family: str
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: SpecRopeScaling | None = None
    max_seq_len: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_attention_every: int = 0
    sinks: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    ahead: Ahead | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension sizes by the letters of the tensor tables in `families`."""
        heads, latent, experts = self.n_heads, self.latent, self.experts
        sizes = {
            "V": self.vocab_size,
            "D": self.dim,
            "F": self.ffn_dim,
            "Q": heads * self.head_dim,
            "K": self.n_kv_heads * self.head_dim,
            "H": self.head_dim,
            "N": heads,
            "T": 2 * self.dim,
        }
        if latent is not None:
            sizes |= {
                "Q": heads * (latent.nope_dim + latent.rope_dim), "A": latent.q_rank or 0, "C": latent.kv_rank,
                "P": latent.kv_rank + latent.rope_dim, "X": heads * (latent.nope_dim + latent.value_dim),
                "Y": heads * latent.value_dim,
            }  # fmt: skip
        if experts is not None:
            width = experts.ffn_dim
            sizes |= {"E": experts.number, "M": width, "W": 2 * width, "S": experts.shared * width}
        return sizes


def spec_of(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec in a training config's `model` section."""
    section = config.get("model")
    if not isinstance(section, Mapping):
        raise PlanError(
            f"{where} has no model in its config ([model] is missing); pass --config with a Hugging Face config.json"
        )
    try:
        values = _known(ModelSpec, section)
        scaling = values.get("rope_scaling")
        values["rope_scaling"] = None if scaling is None else SpecRopeScaling(**_known(SpecRopeScaling, scaling))
        for name, kind in (("experts", Experts), ("latent", Latent), ("ahead", Ahead)):
            record = values.get(name)
            values[name] = None if record is None else kind(**_known(kind, record))
        values["head_dim"] = values.get("head_dim") or values["dim"] // values["n_heads"]
        return ModelSpec(**values)
    except (TypeError, KeyError) as error:
        lacks = sorted({field.name for field in fields(ModelSpec) if _is_needed(field)} - set(section))
        if lacks:
            raise PlanError(
                f"{where}: the [model] section of its config lacks {', '.join(lacks)}: it is not the trainer's own decoder, "
                "the only model with a Hugging Face layout here (`convert to-torch` writes any model)"
            ) from error
        raise PlanError(f"{where}: the [model] section of its config is incomplete: {error}") from error


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _known(
    kind: type[ModelSpec | SpecRopeScaling | Experts | Latent | Ahead], section: Mapping[str, Any]
) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in section.items() if name in names}


# Keys that a model without them leaves out, as configs did before there were such models.
_LEFT_OUT = {"experts": None, "latent": None, "ahead": None, "sinks": False, "full_attention_every": 0}


def spec_to_config(spec: ModelSpec) -> dict[str, Any]:
    """The `model` section of a training config for `spec`; a derived head size is 0."""
    is_derived = spec.latent is not None or spec.head_dim * spec.n_heads == spec.dim
    section = dataclasses.asdict(spec) | ({"head_dim": 0} if is_derived else {})
    return {key: value for key, value in section.items() if key not in _LEFT_OUT or value != _LEFT_OUT[key]}
