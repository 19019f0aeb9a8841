"""What families with experts can express: the checks of their specs, and the tensors of their layers."""

from __future__ import annotations

from collections.abc import Collection

from titan_ckpt.converters.models.spec import Experts, ModelSpec

CORRECTION = "mlp.gate.e_score_correction_bias"
_PLAIN = Experts(number=1, per_token=1, ffn_dim=1)


def mixtral_problem(spec: ModelSpec) -> str | None:
    """What of `spec` MixtralForCausalLM lacks."""
    if spec.experts is not None and not spec.experts.norm_topk_prob:
        return "norm_topk_prob = false (it always divides by the sum)"
    if spec.experts is not None and spec.experts.ffn_dim != spec.ffn_dim:
        return f"two widths, ffn_dim = {spec.ffn_dim} and experts.ffn_dim = {spec.experts.ffn_dim} (intermediate_size is both)"
    return other_than(spec, ("norm_topk_prob",))


def qwen3_moe_problem(spec: ModelSpec) -> str | None:
    """What of `spec` Qwen3MoeForCausalLM lacks."""
    return other_than(spec, ("norm_topk_prob",))


def deepseek_v2_problem(spec: ModelSpec) -> str | None:
    """What of `spec` DeepseekV2ForCausalLM lacks."""
    experts = spec.experts
    if experts is not None and experts.norm_topk_prob:
        return "norm_topk_prob = true (transformers' class never divides by the sum)"
    if experts is not None and experts.groups > 1 and experts.group_best != 1:
        return f"experts.group_best = {experts.group_best} (it takes the best expert of a group)"
    return _deepseek_problem(spec) or other_than(
        spec, ("norm_topk_prob", "groups", "groups_per_token", "group_best", "scale", "shared", "dense_layers")
    )


def deepseek_v3_problem(spec: ModelSpec) -> str | None:
    """What of `spec` DeepseekV3ForCausalLM lacks."""
    experts = spec.experts
    if experts is not None and (experts.scores, experts.correction_bias) != ("sigmoid", True):
        return f"experts.scores = {experts.scores} with correction_bias = {experts.correction_bias} (it has sigmoid and a bias)"
    known = (
        "norm_topk_prob",
        "scores",
        "correction_bias",
        "groups",
        "groups_per_token",
        "scale",
        "shared",
        "dense_layers",
    )
    return _deepseek_problem(spec) or other_than(spec, known)


def gpt_oss_problem(spec: ModelSpec) -> str | None:
    """What of `spec` GptOssForCausalLM lacks."""
    experts = spec.experts
    if not spec.sinks or spec.qkv_bias != spec.o_bias or spec.qk_norm:
        return f"sinks = {spec.sinks} with qkv_bias = {spec.qkv_bias}, o_bias = {spec.o_bias}, qk_norm = {spec.qk_norm}"
    if spec.sliding_window is not None and spec.full_attention_every != 2:
        return f"full_attention_every = {spec.full_attention_every} (every second layer looks back over all tokens)"
    if experts is None:
        return None
    if experts.limit is None or not experts.norm_topk_prob:
        return f"experts.limit = {experts.limit} with norm_topk_prob = {experts.norm_topk_prob}"
    if experts.ffn_dim != spec.ffn_dim:
        return (
            f"two widths, ffn_dim = {spec.ffn_dim} and experts.ffn_dim = {experts.ffn_dim} (intermediate_size is both)"
        )
    return other_than(spec, ("limit", "alpha"))


def _deepseek_problem(spec: ModelSpec) -> str | None:
    if spec.latent is None:
        return "grouped-query attention (model.latent is missing)"
    if spec.qkv_bias or spec.o_bias or spec.qk_norm or spec.sliding_window:
        return "biases, norms of heads or windows of attention"
    if spec.experts is not None and spec.experts.shared < 1:
        return "experts.shared = 0 (it always has shared experts)"
    return None


def other_than(spec: ModelSpec, known: Collection[str]) -> str | None:
    """A field of the experts that is set and not among the `known` ones."""
    for name in Experts.__slots__:
        if name in ("number", "per_token", "ffn_dim", *known) or spec.experts is None:
            continue
        if (value := getattr(spec.experts, name)) != getattr(_PLAIN, name):
            return f"experts.{name} = {value}"
    return None


# Rows of (name below a layer, shape in the letters of `ModelSpec.sizes`).
LATENT_FROM_QUERIES = (("self_attn.q_proj.weight", "QD"),)
LATENT_FROM_LATENT = (
    ("self_attn.q_a_proj.weight", "AD"),
    ("self_attn.q_a_layernorm.weight", "A"),
    ("self_attn.q_b_proj.weight", "QA"),
)
LATENT = (
    ("self_attn.kv_a_proj_with_mqa.weight", "PD"),
    ("self_attn.kv_a_layernorm.weight", "C"),
    ("self_attn.kv_b_proj.weight", "XC"),
    ("self_attn.o_proj.weight", "DY"),
)
SHARED = (
    ("mlp.shared_experts.gate_proj.weight", "SD"),
    ("mlp.shared_experts.up_proj.weight", "SD"),
    ("mlp.shared_experts.down_proj.weight", "DS"),
)
GPT_OSS = (
    ("mlp.router.weight", "ED"),
    ("mlp.router.bias", "E"),
    ("mlp.experts.gate_up_proj", "EDW"),
    ("mlp.experts.gate_up_proj_bias", "EW"),
    ("mlp.experts.down_proj", "EMD"),
    ("mlp.experts.down_proj_bias", "ED"),
)


def latent_rows(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Names and shapes of a layer's latent attention."""
    assert spec.latent is not None
    return (*(LATENT_FROM_QUERIES if spec.latent.q_rank is None else LATENT_FROM_LATENT), *LATENT)


def mixture_rows(spec: ModelSpec, router: str, experts: tuple[str, str, str] | None) -> list[tuple[str, str]]:
    """Names and shapes of a layer's mixture. `experts`: patterns of gate, up and down of one; None if they are stacked."""
    assert spec.experts is not None
    if experts is None:
        return list(GPT_OSS)
    rows = [(router, "ED")]
    rows += [(CORRECTION, "E")] if spec.experts.correction_bias else []
    for number in range(spec.experts.number):
        rows += zip((name.format(number) for name in experts), ("MD", "MD", "DM"), strict=True)
    return rows + (list(SHARED) if spec.experts.shared else [])
