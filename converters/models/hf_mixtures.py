"""Experts and latent attention in config.json, for every family that has them: to the spec and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from titan_ckpt.converters.models.families import HfFamily
from titan_ckpt.converters.models.spec import Ahead, Experts, Latent, ModelSpec
from titan_ckpt.errors import PlanError
from titan_ckpt.parsing.json_values import show

# Far above every model: a damaged number must not allocate a list of its length.
MAX_EXPERTS = 200_000
_LATENT_KEYS = {
    "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip
PREDICTION_KEY = "num_nextn_predict_layers"
MAX_PREDICTION_LAYERS = 16
_GROUPED = "group_limited_greedy"  # DeepSeek-V2's method that chooses groups first


def refuse(where: str, key: str, found: object, text: str) -> NoReturn:
    """PlanError for a value of config.json that cannot be converted."""
    raise PlanError(f"{where}: {key} = {show(found)} cannot be converted: {text}")


def read_experts(config: Mapping[str, Any], values: Mapping[str, Any], family: HfFamily, where: str) -> Experts:
    """Reads both spellings of the number of experts: transformers 5 writes num_local_experts for every family."""
    number_key, per_token_key, width_key = family.expert_keys
    names = dict.fromkeys(("num_experts", "num_local_experts", number_key))
    given = {key: config[key] for key in names if config.get(key) is not None}
    if len(set(given.values())) > 1:
        refuse(where, number_key, given, "which of the two is it?")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        found = {key: config.get(key) for key in ("mlp_only_layers", "decoder_sparse_step")}
        refuse(where, "mlp_only_layers", found, "every layer must be a mixture of experts")
    number = int(next(iter(given.values()), values[number_key]))
    if values.get(per_token_key) is None:
        raise PlanError(f"{where}: {per_token_key} missing")
    if number * values["num_hidden_layers"] > MAX_EXPERTS or values[per_token_key] > number:
        refuse(
            where, number_key, number, f"with {values[per_token_key]} per token, at most {MAX_EXPERTS} in all layers"
        )
    sizes: dict[str, Any] = {
        "number": number, "per_token": int(values[per_token_key]), "ffn_dim": int(values[width_key]),
    }  # fmt: skip
    if family.name in ("deepseek_v2", "deepseek_v3"):
        return _deepseek(values, sizes, is_v3=family.name == "deepseek_v3", where=where)
    if family.name == "gpt_oss":
        return Experts(**sizes, limit=float(values["swiglu_limit"]), alpha=float(values["swiglu_alpha"]))
    return Experts(**sizes, norm_topk_prob=family.name == "mixtral" or values["norm_topk_prob"])


def _deepseek(values: Mapping[str, Any], sizes: Mapping[str, Any], *, is_v3: bool, where: str) -> Experts:
    scores = "sigmoid" if is_v3 else "softmax"
    supported: dict[str, Any] = {"scoring_func": scores, "moe_layer_freq": 1}
    methods = ("noaux_tc",) if is_v3 else ("greedy", _GROUPED)
    for key, only in supported.items():
        if values.get(key, only) != only:
            refuse(where, key, values[key], f"supported: {only}")
    if (method := values["topk_method"]) not in methods:
        refuse(where, "topk_method", method, f"supported: {', '.join(methods)}")
    dense = int(values["first_k_dense_replace"])
    if dense >= values["num_hidden_layers"]:
        refuse(where, "first_k_dense_replace", dense, f"no layer of {values['num_hidden_layers']} is left for experts")
    is_grouped = is_v3 or method == _GROUPED
    groups = int(values.get("n_group") or 1) if is_grouped else 1
    per_token = int(values.get("topk_group") or 1) if is_grouped else 1
    best = 2 if is_v3 or groups == 1 else 1
    if sizes["number"] % groups or per_token > groups or (groups > 1 and sizes["number"] // groups < best):
        found = {"n_group": groups, "topk_group": per_token}
        refuse(where, "n_group", found, f"{sizes['number']} experts do not divide into such groups")
    return Experts(
        **sizes,
        norm_topk_prob=bool(values["norm_topk_prob"]),
        scores=scores,
        correction_bias=is_v3,
        groups=groups,
        groups_per_token=per_token,
        group_best=best,
        scale=float(values["routed_scaling_factor"]),
        shared=int(values.get("n_shared_experts") or 0),
        dense_layers=dense,
    )


def expert_keys(spec: ModelSpec, family: HfFamily) -> dict[str, Any]:
    """The keys of config.json for the experts of `spec`."""
    experts = spec.experts
    if experts is None:
        return {}
    values = (experts.number, experts.per_token, experts.ffn_dim)
    keys: dict[str, Any] = dict(zip(family.expert_keys, values, strict=True))
    if family.name == "gpt_oss":
        return keys | {"swiglu_limit": experts.limit, "swiglu_alpha": experts.alpha}
    if family.name == "mixtral":
        return keys
    keys["norm_topk_prob"] = experts.norm_topk_prob
    if spec.latent is None:
        return keys
    is_v3 = family.name == "deepseek_v3"
    return keys | {
        "scoring_func": experts.scores,
        "topk_method": "noaux_tc" if is_v3 else _GROUPED if experts.groups > 1 else "greedy",
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.dense_layers,
        "moe_layer_freq": 1,
    }


def read_latent(config: Mapping[str, Any], values: Mapping[str, Any], where: str) -> Latent:
    """Sizes of latent attention; a q_lora_rank of null means that queries have no latent."""
    given = dict(values) | ({"q_lora_rank": None} if config.get("q_lora_rank", 0) is None else {})
    if values["num_key_value_heads"] != values["num_attention_heads"]:
        refuse(where, "num_key_value_heads", values["num_key_value_heads"], "latent attention has a key for every head")
    if values.get("attention_bias"):
        refuse(where, "attention_bias", True, "latent attention with biases is not supported")
    latent = Latent(**{field: given[key] for field, key in _LATENT_KEYS.items()})
    if latent.rope_dim % 2:
        refuse(where, "qk_rope_head_dim", latent.rope_dim, "rotary positions turn pairs")
    if latent.value_dim > latent.nope_dim + latent.rope_dim:
        refuse(where, "v_head_dim", latent.value_dim, "values wider than keys are not supported")
    return latent


def latent_keys(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json for latent attention."""
    if spec.latent is None:
        return {}
    keys = {key: getattr(spec.latent, field) for field, key in _LATENT_KEYS.items()}
    return keys | ({"rope_interleave": True} if spec.family == "deepseek_v3" else {})


def read_ahead(config: Mapping[str, Any], where: str) -> Ahead | None:
    """The modules that predict further tokens, by config.json; the files may lack them, as those that transformers saves do."""
    depth = config.get(PREDICTION_KEY)
    if depth in (None, 0):
        return None
    if type(depth) is not int or not 0 < depth <= MAX_PREDICTION_LAYERS:
        refuse(where, PREDICTION_KEY, depth, f"expected a whole number up to {MAX_PREDICTION_LAYERS}")
    return Ahead(depth=depth)


def is_of_prediction_layer(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a layer after the last, which predicts further tokens (multi-token prediction)."""
    layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
    more = config.get(PREDICTION_KEY)
    if layer is None or type(more) is not int:
        return False
    first: int = config["num_hidden_layers"]
    return first <= int(layer.group(1)) < first + more
