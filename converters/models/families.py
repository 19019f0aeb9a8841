"""Model families of Hugging Face as tables: their tensors, shapes and config.json keys.

A family is a table. A tensor's shape is in the letters of `ModelSpec.sizes`: V vocabulary, D model width, T twice that,
F feed-forward width, Q all query heads, K all key (or value) heads, H one head, N number of heads; E all experts, M one expert's
width, W twice that, S all shared experts' width; of latent attention A the queries' latent, C that of keys and values, P with the
part that turns, X keys without that part and values, Y values. Our checkpoints use Hugging Face's own names, so a new dense
family is one more table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.converters.models.mixtures import (
    deepseek_v2_problem,
    deepseek_v3_problem,
    gpt_oss_problem,
    latent_rows,
    mixtral_problem,
    mixture_rows,
    qwen3_moe_problem,
)
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.errors import PlanError
from titan_ckpt.sharding.placement import Shape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PREDICTING = ("deepseek_v3",)  # families with modules that predict further tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """`defaults`: values of keys that config.json omits. `check` returns what of a spec the family cannot express, or None.

    For a mixture: names of its `router` and its `experts` (gate, up, down; the second `{}` is the expert), and `expert_keys`,
    config.json's keys for the number of experts, the number per token and an expert's width.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    check: Callable[[ModelSpec], str | None]
    router: str = ""
    experts: tuple[str, str, str] = ("", "", "")
    expert_keys: tuple[str, str, str] = ("", "", "")


def _llama_problem(spec: ModelSpec) -> str | None:
    if spec.qk_norm:
        return "qk_norm = true (that is the qwen3 family)"
    if spec.qkv_bias != spec.o_bias:
        return f"qkv_bias = {spec.qkv_bias} with o_bias = {spec.o_bias} (one switch, attention_bias, sets both)"
    return "a sliding window (that is the mistral family)" if spec.sliding_window else None


def _qwen2_problem(spec: ModelSpec) -> str | None:
    if spec.qk_norm:
        return "qk_norm = true (that is the qwen3 family)"
    if not spec.qkv_bias or spec.o_bias:
        return f"qkv_bias = {spec.qkv_bias}, o_bias = {spec.o_bias} (it always has the first and never the second)"
    return None


def _qwen3_problem(spec: ModelSpec) -> str | None:
    if not spec.qk_norm:
        return "qk_norm = false"
    if spec.qkv_bias != spec.o_bias:
        return f"qkv_bias = {spec.qkv_bias} with o_bias = {spec.o_bias} (one switch, attention_bias, sets both)"
    return None


def _mistral_problem(spec: ModelSpec) -> str | None:
    if spec.qk_norm:
        return "qk_norm = true (that is the qwen3 family)"
    return "attention biases" if spec.qkv_bias or spec.o_bias else None


def _mixtral_problem(spec: ModelSpec) -> str | None:
    return mixtral_problem(spec) or _mistral_problem(spec)


def _qwen3_moe_problem(spec: ModelSpec) -> str | None:
    return _qwen3_problem(spec) or qwen3_moe_problem(spec)


_SWIGLU = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight", "mlp.experts.{}.down_proj.weight")


def _deepseek(
    name: str, architecture: str, check: Callable[[ModelSpec], str | None], defaults: Mapping[str, Any]
) -> HfFamily:
    """A family of DeepSeek's, with the `defaults` that are its own."""
    attention = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return HfFamily(
        name=name,
        architecture=architecture,
        defaults={**attention, **defaults},
        check=check,
        router="mlp.gate.weight",
        experts=_SWIGLU,
        expert_keys=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    )


FAMILIES = {
    "llama": HfFamily(
        name="llama",
        architecture="LlamaForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048},
        check=_llama_problem,
    ),
    "qwen2": HfFamily(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        check=_qwen2_problem,
    ),
    "qwen3": HfFamily(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "head_dim": 128,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        check=_qwen3_problem,
    ),
    "mistral": HfFamily(
        name="mistral",
        architecture="MistralForCausalLM",
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        check=_mistral_problem,
    ),
    "mixtral": HfFamily(
        name="mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        check=_mixtral_problem,
        router="block_sparse_moe.gate.weight",
        experts=(
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
            "block_sparse_moe.experts.{}.w2.weight",
        ),
        expert_keys=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    ),
    "qwen3_moe": HfFamily(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        check=_qwen3_moe_problem,
        router="mlp.gate.weight",
        experts=_SWIGLU,
        expert_keys=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "deepseek_v2": _deepseek(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        deepseek_v2_problem,
        {
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        },
    ),
    "deepseek_v3": _deepseek(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        deepseek_v3_problem,
        {
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "gpt_oss": HfFamily(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        check=gpt_oss_problem,
        router="mlp.router.weight",
        expert_keys=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    ),
}

# (name below a layer, shape, the spec's switch that adds it; empty: always present)
_ATTENTION: tuple[tuple[str, str, str], ...] = (
    ("self_attn.q_proj.weight", "QD", ""),
    ("self_attn.q_proj.bias", "Q", "qkv_bias"),
    ("self_attn.k_proj.weight", "KD", ""),
    ("self_attn.k_proj.bias", "K", "qkv_bias"),
    ("self_attn.v_proj.weight", "KD", ""),
    ("self_attn.v_proj.bias", "K", "qkv_bias"),
    ("self_attn.q_norm.weight", "H", "qk_norm"),
    ("self_attn.k_norm.weight", "H", "qk_norm"),
    ("self_attn.o_proj.weight", "DQ", ""),
    ("self_attn.o_proj.bias", "D", "o_bias"),
    ("self_attn.sinks", "N", "sinks"),
)
# Those of a module that predicts further tokens, beside a layer's.
_PREDICTION = (
    ("enorm.weight", "D"),
    ("hnorm.weight", "D"),
    ("eh_proj.weight", "DT"),
    ("shared_head.norm.weight", "D"),
)
_DENSE = (("mlp.gate_proj.weight", "FD"), ("mlp.up_proj.weight", "FD"), ("mlp.down_proj.weight", "DF"))


def family_named(name: str) -> HfFamily:
    """The family `name`; PlanError that lists the families if there is none."""
    if name not in FAMILIES:
        raise PlanError(f"model family {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def check_spec(spec: ModelSpec) -> HfFamily:
    """The family of `spec`; PlanError if Hugging Face's class cannot express the spec."""
    family = family_named(spec.family)
    problem = family.check(spec)
    if problem is not None:
        raise PlanError(
            f"{family.architecture} has no {problem}: this model cannot be written as a {family.name} model"
        )
    if bool(spec.experts) != bool(family.router):
        raise PlanError(f"a {family.name} model {'must have' if family.router else 'cannot have'} experts")
    if spec.ahead is not None and family.name not in PREDICTING:
        raise PlanError(f"a {family.name} model predicts no more than the next token (model.ahead)")
    if spec.latent is None and spec.head_dim % 2:
        raise PlanError(f"head_dim = {spec.head_dim} is odd, and rotary positions turn pairs")
    if spec.n_heads % spec.n_kv_heads:
        raise PlanError(f"n_heads = {spec.n_heads} is not a multiple of n_kv_heads = {spec.n_kv_heads}")
    return family


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor of the model under Hugging Face's names, in forward order, without a tied head."""
    sizes = spec.sizes

    def shape(letters: str) -> Shape:
        return tuple(sizes[letter] for letter in letters)

    tensors = {EMBEDDING: shape("VD")}
    for layer in range(spec.n_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape(letters) for name, letters in _layer(spec, layer)}
    tensors["model.norm.weight"] = shape("D")
    for layer in prediction_layers(spec):
        rows = (*_PREDICTION, *_layer(spec, layer))
        tensors |= {f"model.layers.{layer}.{name}": shape(letters) for name, letters in rows}
    return tensors if spec.tied_embeddings else tensors | {HEAD: shape("VD")}


def prediction_layers(spec: ModelSpec) -> range:
    """The numbers under which Hugging Face's files have the modules that predict further tokens."""
    return range(spec.n_layers, spec.n_layers + (spec.ahead.depth if spec.ahead else 0))


def copies(spec: ModelSpec) -> dict[str, str]:
    """Tensors that files may have beside the one that they equal: a tied head, and the ends of each module that predicts."""
    head = EMBEDDING if spec.tied_embeddings else HEAD
    found = {HEAD: EMBEDDING} if spec.tied_embeddings else {}
    for layer in prediction_layers(spec):
        found |= {
            f"model.layers.{layer}.embed_tokens.weight": EMBEDDING,
            f"model.layers.{layer}.shared_head.head.weight": head,
        }
    return found


def _layer(spec: ModelSpec, layer: int) -> list[tuple[str, str]]:
    """Names and shapes of a layer's tensors."""
    rows = [("input_layernorm.weight", "D")]
    if spec.latent is not None:
        rows += latent_rows(spec)
    else:
        rows += [(name, letters) for name, letters, switch in _ATTENTION if not switch or getattr(spec, switch)]
    rows.append(("post_attention_layernorm.weight", "D"))
    if spec.experts is None or layer < spec.experts.dense_layers:
        return [*rows, *_DENSE]
    family = FAMILIES[spec.family]
    return rows + mixture_rows(spec, family.router, family.experts if family.experts[0] else None)
