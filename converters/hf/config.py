"""Convert config.json to `ModelSpec` and back: every field that changes logits. Unknown keys are kept, unsupported ones refused.

Both spellings of rotary positions are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (5). A new
config.json uses the older one, which both versions read; an imported one keeps its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from titan_ckpt.converters.models.families import FAMILIES, PREDICTING, HfFamily, check_spec
from titan_ckpt.converters.models.hf_mixtures import (
    PREDICTION_KEY,
    expert_keys,
    latent_keys,
    read_ahead,
    read_experts,
    read_latent,
    refuse,
)
from titan_ckpt.converters.models.spec import ModelSpec, SpecRopeScaling
from titan_ckpt.converters.models.transforms import FLOATS
from titan_ckpt.errors import PlanError
from titan_ckpt.parsing.json_values import JsonValue, parse_json, show

Config = dict[str, Any]

# field of the spec -> key of config.json, where the value is the same
_PLAIN_KEYS = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings", "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ORIGINAL = "original_max_position_embeddings"
_SCALING_KEYS = {
    "factor": "factor", "original_max_seq_len": _ORIGINAL, "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor", "truncate": "truncate", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
_SCALING_USES = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale",
             "mscale_all_dim"),
}  # fmt: skip
_LATENT = ("deepseek_v2", "deepseek_v3")
# Families whose attention_bias sets the biases of all four projections.
_SWITCHED_BIAS = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
# Keys that change logits but have no field in the spec, with their supported values; null is always supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleave": (True,),
    **dict.fromkeys(("quantization_config", "compression_config", "quantization", "quant_config", "quant_method"), ()),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"), (False,)),
}
# Files beside the weights that only quantised models have.
QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")

# Far above every model: a damaged number must not allocate a list of its length.
MAX_LAYERS = 10_000
MAX_NUMBER = 1 << 40
# (keys, check of a value, what is expected)
_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
         "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts",
         "n_shared_experts", "n_group", "topk_group", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
         "v_head_dim"),
        lambda value: type(value) is int and 1 <= value <= MAX_NUMBER,
        f"a whole number of at least 1 (and at most {MAX_NUMBER})",
    ),
    (
        ("sliding_window", "max_window_layers", "first_k_dense_replace"),
        lambda value: type(value) is int and 0 <= value <= MAX_NUMBER,
        "a whole number",
    ),
    (
        ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
         "attention_factor", "swiglu_limit", "swiglu_alpha", "routed_scaling_factor"),
        lambda value: type(value) in (int, float) and 0 < value < 1e300,
        "a positive number",
    ),
    (("mscale", "mscale_all_dim"), lambda value: type(value) in (int, float) and 0 <= value < 1e30, "a number from 0 on"),
    (
        ("tie_word_embeddings", "attention_bias", "use_sliding_window", "truncate", "norm_topk_prob"),
        lambda value: type(value) is bool,
        "true or false",
    ),
    (("layer_types",), lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of names"),
)  # fmt: skip


def parse_config(text: bytes, where: str) -> Config:
    """Parse a config.json."""
    return JsonValue(parse_json(text, where), where).free()


def encode_config(config: Mapping[str, Any]) -> bytes:
    """Encode a config.json as Hugging Face does: two spaces, sorted keys, a final newline."""
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def spec_from_hf(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that `config` describes. PlanError names the key that cannot be expressed."""
    family = _family(config, where)
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise PlanError(f"{where}: {', '.join(missing)} missing")
    _check_values(config, where)
    for key, only in _ONLY.items():
        if config.get(key) is not None and config[key] not in only:
            supported = " or ".join(map(repr, only)) or "none"
            refuse(where, key, config[key], f"supported: {supported}")
    values = dict(family.defaults) | {key: value for key, value in config.items() if value is not None}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if config.get("num_key_value_heads", 0) is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("tie_word_embeddings", False)
    is_latent = family.name in _LATENT
    if is_latent:  # its heads have sizes of their own
        values["head_dim"] = max(2, values["hidden_size"] // values["num_attention_heads"])
    plain = {field: values[key] for field, key in _PLAIN_KEYS.items()}
    theta, scaling = _read_rope(config, values, family, where)
    has_bias = bool(values.get("attention_bias", False))
    spec = ModelSpec(
        family=family.name,
        **plain,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family.name == "qwen2" or (has_bias and family.name in _SWITCHED_BIAS),
        o_bias=has_bias and family.name in _SWITCHED_BIAS,
        qk_norm=family.name in ("qwen3", "qwen3_moe"),
        sliding_window=_read_window(config, values, family, where),
        full_attention_every=2 if family.name == "gpt_oss" else 0,
        sinks=family.name == "gpt_oss",
        latent=read_latent(config, values, where) if is_latent else None,
        experts=read_experts(config, values, family, where) if family.router else None,
        ahead=read_ahead(config, where) if family.name in PREDICTING else None,
    )
    try:
        check_spec(spec)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    return spec


def declared_dtype(config: Mapping[str, Any], where: str) -> str | None:
    """The dtype that `config` gives its weights, under either of its names; None if it names none or one for each part.

    PlanError if the two names disagree, or for a dtype that is not floating-point.
    """
    given = {key: config[key] for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)}
    found = {value.removeprefix("torch.") for value in given.values()} - {"auto"}
    if len(found) > 1:
        refuse(where, "dtype", given, "which of the two is it?")
    for dtype in found:
        if dtype not in FLOATS:
            refuse(where, next(iter(given)), dtype, f"a model's dtype is one of {', '.join(FLOATS)}")
    return next(iter(found), None)


def _family(config: Mapping[str, Any], where: str) -> HfFamily:
    architectures = config.get("architectures")
    kind = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        found = [family for family in FAMILIES.values() if family.architecture in architectures]
        shown = ", ".join(name[:80] if isinstance(name, str) else show(name) for name in architectures[:4])
    else:
        found = [FAMILIES[kind]] if isinstance(kind, str) and kind in FAMILIES else []
        shown = f"model_type {show(kind)}"
    if not found or kind not in (None, found[0].name):
        supported = ", ".join(family.architecture for family in FAMILIES.values())
        raise PlanError(f"{where}: {shown} (model_type {show(kind)}) is not supported; supported are {supported}")
    return found[0]


def _check_values(config: Mapping[str, Any], where: str) -> None:
    """PlanError for a value of the wrong type or range, before anything computes with it."""
    rope = [value for key in ("rope_parameters", "rope_scaling") if isinstance(value := config.get(key), Mapping)]
    for record in (config, *rope):
        for keys, is_right, wanted in _KINDS:
            for key in keys:
                value = record.get(key)
                if value is not None and not is_right(value):
                    raise PlanError(f"{where}: {key} = {show(value)}: expected {wanted}")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise PlanError(f"{where}: num_hidden_layers = {config['num_hidden_layers']}: more than {MAX_LAYERS} layers")


def _rope_record(config: Mapping[str, Any], family: HfFamily, where: str) -> Mapping[str, Any]:
    """The table of rotary positions under either name; the family's, or an empty one, if there is none.

    PlanError for two that differ, for one table per kind of layer, and for partial rotation.
    """
    found = [value for key in ("rope_parameters", "rope_scaling") if isinstance(value := config.get(key), Mapping)]
    record: Mapping[str, Any] = found[0] if found else family.defaults.get("rope_scaling", {})
    if len(found) == 2 and _rope_meaning(found[0]) != _rope_meaning(found[1]):
        refuse(
            where,
            "rope_parameters",
            record,
            f"rope_scaling = {show(found[1])} contradicts it; which of the two is it?",
        )
    if any(isinstance(value, Mapping) for value in record.values()):
        refuse(where, "rope_parameters", record, "all layers must turn positions alike")
    if record.get("partial_rotary_factor") not in (None, *_ONLY["partial_rotary_factor"]):
        refuse(where, "rope_parameters", record, "a partial_rotary_factor is not supported")
    is_known = family.name in _LATENT and _rope_type(record) == "yarn"
    if not is_known and (extra := {"mscale", "mscale_all_dim"} & set(record)):
        refuse(where, "rope_scaling", record, f"{', '.join(sorted(extra))} is not supported")
    return record


def _rope_type(record: Mapping[str, Any]) -> Any:
    return record.get("rope_type", record.get("type", "default"))


def _rope_meaning(record: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in record.items() if key not in ("rope_theta", "type")}
    return rest | {"rope_type": _rope_type(record)}


def _read_rope(
    config: Mapping[str, Any], values: Mapping[str, Any], family: HfFamily, where: str
) -> tuple[float, SpecRopeScaling | None]:
    record = _rope_record(config, family, where)
    theta = float(record.get("rope_theta", values["rope_theta"]))
    kind = _rope_type(record)
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _SCALING_USES:
        refuse(where, "rope_scaling", record, f"rope types are default, {', '.join(_SCALING_USES)}")
    fields = {field: record[key] for field, key in _SCALING_KEYS.items() if record.get(key) is not None}
    if "factor" not in fields:
        refuse(where, "rope_scaling", record, "it has no factor")
    original = fields.setdefault("original_max_seq_len", values["max_position_embeddings"])
    # Readers differ in which of the two they use.
    if "original_max_seq_len" in _SCALING_USES[kind] and values.get(_ORIGINAL, original) != original:
        refuse(
            where,
            _ORIGINAL,
            values[_ORIGINAL],
            f"the table of rotary positions means {original}; which of the two is it?",
        )
    used = {field: value for field, value in fields.items() if field in _SCALING_USES[kind]}
    return theta, SpecRopeScaling(kind=kind, **used)


def _read_window(config: Mapping[str, Any], values: Mapping[str, Any], family: HfFamily, where: str) -> int | None:
    if family.name in ("llama", *_LATENT):
        return None
    window = config.get("sliding_window", family.defaults["sliding_window"])
    if family.name in ("mistral", "mixtral"):
        return int(window) if window else None
    if family.name == "gpt_oss":
        return _read_alternating_window(window, values, where)
    if family.name == "qwen3_moe":
        return int(window) if window and values.get("use_sliding_window", False) else None
    kinds = set(values.get("layer_types", ()))
    if len(kinds) > 1:
        refuse(where, "layer_types", sorted(kinds), "all layers must attend alike")
    if not values.get("use_sliding_window", False) or not window or kinds == {"full_attention"}:
        return None
    first = int(values["max_window_layers"])
    if not kinds and first >= int(values["num_hidden_layers"]):
        return None
    if not kinds and first > 0:
        refuse(where, "max_window_layers", first, "all layers must attend alike")
    return int(window)


def _read_alternating_window(window: Any, values: Mapping[str, Any], where: str) -> int:
    expected = _layer_types(values["num_hidden_layers"])
    if values.get("layer_types", expected) != expected:
        refuse(where, "layer_types", values["layer_types"], "layers must alternate, from sliding_attention on")
    if not window:
        refuse(where, "sliding_window", window, "every second layer has one")
    return int(window)


def _layer_types(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]


def hf_config(spec: ModelSpec, *, base: Mapping[str, Any] | None, dtype: str | None) -> Config:
    """config.json for `spec`. `base` is the model's original one: its keys stay, except those whose meaning changed.

    `dtype` is recorded; None keeps that of `base`, which may differ from the dtype of its files.
    """
    family = check_spec(spec)
    if base is None:
        return _new_config(spec, family, dtype)
    before = spec_from_hf(base, "the config.json in the checkpoint")
    config = dict(base)
    for field, key in _plain_keys(spec).items():
        if getattr(before, field) != getattr(spec, field):
            config[key] = getattr(spec, field)
    if (before.rope_theta, before.rope_scaling) != (spec.rope_theta, spec.rope_scaling):
        config = {
            key: value
            for key, value in config.items()
            if key not in ("rope_parameters", "rope_scaling", "rope_theta", _ORIGINAL)
        }
        config |= _rope_keys(spec, family)
    if (before.sliding_window, before.n_layers) != (spec.sliding_window, spec.n_layers):
        config = {key: value for key, value in config.items() if key != "layer_types"} | _window_keys(spec)
    if (before.family, before.qkv_bias, before.o_bias) != (spec.family, spec.qkv_bias, spec.o_bias):
        config |= _family_keys(spec, family)
    if before.experts != spec.experts:
        config = {key: value for key, value in config.items() if key != "num_local_experts"}
        config |= expert_keys(spec, family)
    if before.latent != spec.latent:
        config |= latent_keys(spec)
    if before.ahead != spec.ahead:
        config[PREDICTION_KEY] = spec.ahead.depth if spec.ahead else 0
    if dtype is None:
        return config
    config.pop("dtype" if "torch_dtype" in config else "torch_dtype", None)
    return config | {"dtype" if "dtype" in config else "torch_dtype": dtype}


def _new_config(spec: ModelSpec, family: HfFamily, dtype: str | None) -> Config:
    config = {key: getattr(spec, field) for field, key in _plain_keys(spec).items()}
    config |= {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "torch_dtype": dtype}
    config |= _family_keys(spec, family) | _rope_keys(spec, family) | _window_keys(spec)
    if spec.ahead is not None:
        config[PREDICTION_KEY] = spec.ahead.depth
    return config | expert_keys(spec, family) | latent_keys(spec)


def _plain_keys(spec: ModelSpec) -> dict[str, str]:
    """`_PLAIN_KEYS` of the spec's family; the heads of latent attention have sizes of their own."""
    return {field: key for field, key in _PLAIN_KEYS.items() if field != "head_dim" or spec.latent is None}


def _family_keys(spec: ModelSpec, family: HfFamily) -> Config:
    keys: Config = {"architectures": [family.architecture], "model_type": family.name}
    if family.name in _SWITCHED_BIAS:
        keys["attention_bias"] = spec.qkv_bias
    return keys | ({"mlp_bias": False} if family.name == "llama" else {})


def _rope_keys(spec: ModelSpec, family: HfFamily) -> Config:
    if spec.rope_scaling is None:
        plain = {"rope_type": "default"} if "rope_scaling" in family.defaults else None  # null would mean the family's
        return {"rope_theta": spec.rope_theta, "rope_scaling": plain}
    scaling = spec.rope_scaling
    used = {_SCALING_KEYS[field]: getattr(scaling, field) for field in _SCALING_USES[scaling.kind]}
    record = {"rope_type": scaling.kind} | {key: value for key, value in used.items() if value is not None}
    return {"rope_theta": spec.rope_theta, "rope_scaling": record}


def _window_keys(spec: ModelSpec) -> Config:
    if spec.family in ("llama", *_LATENT):
        return {}
    if spec.family == "gpt_oss":
        return {"sliding_window": spec.sliding_window, "layer_types": _layer_types(spec.n_layers)}
    if spec.family in ("mistral", "mixtral"):
        return {"sliding_window": spec.sliding_window}
    if spec.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {"use_sliding_window": True, "sliding_window": spec.sliding_window, "max_window_layers": 0}
