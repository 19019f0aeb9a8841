"""What tensor parallelism does with each module of `Decoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_ckpt.trainer.model.latent import latent_rules
from titan_ckpt.trainer.seams.model import Colwise, Head, Region, Rowwise, Rule, Shared, Vocab

if TYPE_CHECKING:
    from titan_ckpt.trainer.model.decoder import ModelConfig


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
