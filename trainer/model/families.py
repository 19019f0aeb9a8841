"""Families of decoders: which options of `[model]` each can have, and what tensor parallelism does with each module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.ahead import check_ahead
from titan_ckpt.trainer.model.experts import check_experts
from titan_ckpt.trainer.model.latent import check_latent, latent_rules
from titan_ckpt.trainer.seams.model import Colwise, Head, Region, Rowwise, Rule, Shared, Vocab

if TYPE_CHECKING:
    from titan_ckpt.trainer.model.decoder import ModelConfig

Family: TypeAlias = Literal[
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"
]

LATENT: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3")
MIXTURES: tuple[Family, ...] = ("mixtral", "qwen3_moe", *LATENT, "gpt_oss")


def check_attention(config: ModelConfig) -> None:
    """ConfigError for options of attention that contradict each other or the family."""
    latent, every = config.latent, config.full_attention_every
    if (latent is not None) != (config.family in LATENT):
        which = "must have" if latent is None else "cannot have"
        raise ConfigError(
            f"model: family {config.family} {which} the table [model.latent]; it is for {', '.join(LATENT)}"
        )
    if latent is not None:
        check_latent(latent)
        options = ("qkv_bias", "o_bias", "qk_norm", "sliding_window", "sinks", "head_dim")
        if given := [name for name in options if getattr(config, name)]:
            raise ConfigError(
                f"model.{given[0]} = {getattr(config, given[0])}: latent attention has none; leave it out"
            )
        if config.n_kv_heads != config.n_heads:
            raise ConfigError(f"model: latent attention has as many key/value heads as n_heads = {config.n_heads}")
    if config.sinks and config.family != "gpt_oss":
        raise ConfigError(f"model.sinks: family {config.family} has none; gpt_oss has")
    if every and (every < 2 or config.sliding_window is None):
        raise ConfigError(
            f"model.full_attention_every = {every}: must be 0, or at least 2 with model.sliding_window set"
        )


def check_mixture(config: ModelConfig) -> None:
    """ConfigError for experts that contradict each other or the family."""
    experts, is_mixture = config.experts, config.family in MIXTURES
    if config.ahead is not None:
        check_ahead(config.ahead)
        if config.family != "deepseek_v3":
            raise ConfigError(
                f"model.ahead: family {config.family} predicts no more than the next token; deepseek_v3 does"
            )
    if experts is None:
        if is_mixture:
            raise ConfigError(f"model: family {config.family} is a mixture of experts: give the table [model.experts]")
        return
    check_experts(experts)
    if not is_mixture:
        raise ConfigError(
            f"model.experts: family {config.family} has none; families with experts: {', '.join(MIXTURES)}"
        )
    if config.family == "mixtral" and config.ffn_dim != experts.ffn_dim:
        raise ConfigError(
            f"model.ffn_dim = {config.ffn_dim}, model.experts.ffn_dim = {experts.ffn_dim}: family mixtral has one width for both"
        )
    if (experts.limit is not None) != (config.family == "gpt_oss"):
        raise ConfigError(
            "model.experts.limit, of the clamped SwiGLU with biases, is what family gpt_oss has and no other"
        )
    if experts.dense_layers >= config.n_layers:
        raise ConfigError(
            f"model.experts.dense_layers = {experts.dense_layers} leaves no layer of {config.n_layers} for experts"
        )


def tensor_rules(config: ModelConfig) -> dict[str, Rule]:
    """q, k and v are cut between heads: a rank has the query heads of its key/value heads. Experts are whole."""
    rules: dict[str, Rule] = {"model.embed_tokens": Vocab(), "model.norm": Shared(), "lm_head": Head()}
    rules |= _layer_rules("model.layers.*", config)
    for dense in range(config.dense_layers if config.experts is not None else 0):
        rules |= _feed_forward_rules(f"model.layers.{dense}.mlp")
    if config.ahead is not None:
        module = "model.ahead.depths.*"
        rules |= {"model.ahead.embed_tokens": Vocab(), f"{module}.*norm": Shared(), f"{module}.eh_proj": Shared()}
        rules |= _layer_rules(f"{module}.layer", config)
    return rules


def _layer_rules(layer: str, config: ModelConfig) -> dict[str, Rule]:
    rules: dict[str, Rule] = {f"{layer}.*layernorm": Shared()} | _attention_rules(f"{layer}.self_attn", config)
    if config.experts is None:
        return rules | _feed_forward_rules(f"{layer}.mlp")
    router = "gate" if config.experts.limit is None else "router"
    rules |= {f"{layer}.mlp.{router}": Shared(), f"{layer}.mlp.experts": Shared()}
    return rules | (_feed_forward_rules(f"{layer}.mlp.shared_experts") if config.experts.shared else {})


def _attention_rules(module: str, config: ModelConfig) -> dict[str, Rule]:
    if config.latent is not None:
        return {module: Region()} | latent_rules(module, config.latent)
    size, groups = config.head_size, config.n_heads // config.n_kv_heads
    rules: dict[str, Rule] = {
        module: Region(divided=("sinks",) if config.sinks else ()),
        f"{module}.[kv]_proj": Colwise(unit=size, of="key/value heads"),
        f"{module}.q_proj": Colwise(unit=size * groups, of="key/value heads"),
        f"{module}.o_proj": Rowwise(unit=size * groups, of="key/value heads"),
    }
    return rules | ({f"{module}.[qk]_norm": Shared()} if config.qk_norm else {})


def _feed_forward_rules(module: str) -> dict[str, Rule]:
    return {
        module: Region(),
        f"{module}.gate_proj": Colwise(of="ffn_dim"),
        f"{module}.up_proj": Colwise(of="ffn_dim"),
        f"{module}.down_proj": Rowwise(of="ffn_dim"),
    }
