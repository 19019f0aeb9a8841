"""The model spec: what besides the weights decides a decoder's logits. Fields are those of a training config's `[model]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in every layer: a router picks `per_token` of `number` experts, each `ffn_dim` wide.

    The other fields are those of `[model.experts]` that no family here can express; their defaults mean none of it.
    """

    number: int
    per_token: int
    ffn_dim: int
    norm_topk_prob: bool = True
    scores: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    shared: int = 0
    dense_layers: int = 0


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
    experts: Experts | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension sizes by the letters of the tensor tables in `families`."""
        return {
            "V": self.vocab_size,
            "D": self.dim,
            "F": self.ffn_dim,
            "Q": self.n_heads * self.head_dim,
            "K": self.n_kv_heads * self.head_dim,
            "H": self.head_dim,
        } | ({} if self.experts is None else {"E": self.experts.number, "M": self.experts.ffn_dim})


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
        experts = values.get("experts")
        values["experts"] = None if experts is None else Experts(**_known(Experts, experts))
        values["head_dim"] = values.get("head_dim") or values["dim"] // values["n_heads"]
        return ModelSpec(**values)
    except (TypeError, KeyError) as error:
        raise PlanError(f"{where}: the [model] section of its config is incomplete: {error}") from error


def _known(kind: type[ModelSpec | SpecRopeScaling | Experts], section: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in section.items() if name in names}


def spec_to_config(spec: ModelSpec) -> dict[str, Any]:
    """The `model` section of a training config for `spec`; a derived head size is 0, and a dense model has no `experts`."""
    is_derived = spec.head_dim * spec.n_heads == spec.dim
    section = dataclasses.asdict(spec) | ({"head_dim": 0} if is_derived else {})
    return section if spec.experts else {key: value for key, value in section.items() if key != "experts"}
