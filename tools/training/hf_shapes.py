"""Hugging Face configurations to and from `ModelConfig`, for the families that this decoder covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.experts import ExpertsConfig
from titan_ckpt.trainer.model.families import MIXTURES, Family
from titan_ckpt.trainer.model.rope import RopeScaling

ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_HIDDEN_ACTS = ("silu", "swish")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a `config.json`; ConfigError for an unknown family, activation or scaling."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(f"model_type {family!r} is not one of {', '.join(ARCHITECTURES)}")
    if config.get("hidden_act", "silu") not in _HIDDEN_ACTS:
        raise ConfigError(f"hidden_act {config['hidden_act']!r}: this decoder computes silu only")
    if config.get("mlp_bias"):
        raise ConfigError("mlp_bias=true: this decoder's feed-forward has no biases")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    has_bias = bool(config.get("attention_bias", False))
    max_seq_len = config.get("max_position_embeddings", 8192)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        ffn_dim=config["intermediate_size"],
        head_dim=config.get("head_dim") or 0,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        rope_scaling=_scaling_from_hf(rope, max_seq_len),
        max_seq_len=max_seq_len,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or has_bias,
        o_bias=family != "qwen2" and has_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=_experts_from_hf(config, family),
        sliding_window=_window_from_hf(config, family),
        family=family,
    )


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` of this model for transformers; ConfigError if the family lacks an option."""
    _check_expressible(model)
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "intermediate_size": model.ffn_dim,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else _scaling_to_hf(model.rope_scaling),
        "max_position_embeddings": model.max_seq_len,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": model.qkv_bias and model.family != "qwen2",
        "sliding_window": model.sliding_window,
    }
    if model.family in ("qwen2", "qwen3", "qwen3_moe"):
        out |= {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0}
    return out if model.experts is None else out | _experts_to_hf(model.experts, model.family)


def _experts_from_hf(config: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    if family not in MIXTURES:
        return None
    is_mixtral = family == "mixtral"
    return ExpertsConfig(
        number=config.get("num_experts") or config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_dim=config["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        norm_topk_prob=is_mixtral or config["norm_topk_prob"],
    )


def _experts_to_hf(experts: ExpertsConfig, family: Family) -> dict[str, Any]:
    if family == "mixtral":
        return {"num_local_experts": experts.number, "num_experts_per_tok": experts.per_token}
    return {
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn_dim,
        "norm_topk_prob": experts.norm_topk_prob,
    }


def _check_expressible(model: ModelConfig) -> None:
    is_qwen2 = model.family == "qwen2"
    wanted = {
        "qk_norm": (model.qk_norm, model.family in ("qwen3", "qwen3_moe")),
        "o_bias": (model.o_bias, model.qkv_bias and not is_qwen2),
        "qkv_bias": (model.qkv_bias, is_qwen2 or (model.qkv_bias and model.family not in ("mistral", "mixtral"))),
        "sliding_window": (
            model.sliding_window is not None,
            model.sliding_window is not None and model.family != "llama",
        ),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ConfigError(
                f"model.{name}={found}: Hugging Face's {ARCHITECTURES[model.family]} always has {expected}"
            )


def _window_from_hf(config: Mapping[str, Any], family: Family) -> int | None:
    window = config.get("sliding_window")
    if window is None or family == "llama":
        return None
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        if not config.get("use_sliding_window", False):
            return None
        if config.get("max_window_layers", 0):
            raise ConfigError(
                f"max_window_layers={config['max_window_layers']}: layers with and without a window cannot be mixed here"
            )
    return int(window)


def _scaling_from_hf(rope: Mapping[str, Any], max_seq_len: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not one of default, linear, llama3, yarn")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError("rope_scaling.mscale: only attention_factor is supported")
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        original_max_seq_len=int(rope.get("original_max_position_embeddings") or max_seq_len),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return out
    out["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        return out | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    out |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return out if scaling.attention_factor is None else out | {"attention_factor": scaling.attention_factor}


LLAMA3_SCALING = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=8192)
_LLAMA31 = {"vocab_size": 128_256, "rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING, "max_seq_len": 131_072}

# Published shapes by name, for configs and for sizing.
SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        ffn_dim=1536,
        rope_theta=100_000.0,
        tied_embeddings=True,
    ),
    "llama3-8b": ModelConfig(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, **_LLAMA31),  # type: ignore[arg-type]
    "llama3-70b": ModelConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, **_LLAMA31),  # type: ignore[arg-type]
    "llama3-405b": ModelConfig(dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248, **_LLAMA31),  # type: ignore[arg-type]
}
