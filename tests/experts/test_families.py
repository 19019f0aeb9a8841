"""DeepSeek-V2, DeepSeek-V3 and GPT-OSS: logits and choices of transformers, gradients of sinks, refusals."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.errors import ConfigError
from titan_ckpt.resharding.placement_rules import tensor_parallel
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.trainer.config.toml_records import as_dict, build_record
from titan_ckpt.trainer.model.attention import SdpaAttend, visibility_mask
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig, decoder
from titan_ckpt.trainer.model.experts import Router
from titan_ckpt.trainer.model.latent import latent_weights
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.seams.model import Region
from tools.training.curves import DEEPSEEK, GPT_OSS

YARN = {
    "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK_KEYS = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "moe_intermediate_size": 24, "max_position_embeddings": 512, "first_k_dense_replace": 1,
    "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK_KEYS | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_scaling": YARN},
    "deepseek_v3 without groups": DEEPSEEK_KEYS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "deepseek_v2": DEEPSEEK_KEYS
    | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2 lite": DEEPSEEK_KEYS | {"q_lora_rank": None, "topk_method": "greedy"},
    "gpt_oss": {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20,
        "max_position_embeddings": 512,
    },
}  # fmt: skip


def without_none(section: dict[str, Any]) -> dict[str, Any]:
    plain = {key: without_none(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in plain.items() if value is not None}


def random_transformers_model(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(name.split(" ")[0], **MODELS[name])
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(3)
    for fqn, tensor in made.state_dict().items():
        tensor.copy_(0.15 * torch.randn(tensor.shape, generator=generator) + float("norm" in fqn))
    return made


def choices_of(model: nn.Module, kind: type[nn.Module], tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the sorted experts of every token in every layer."""
    chosen: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, out: Any) -> None:
        chosen.append(out[-1].sort(dim=-1).values)

    hooks = [module.register_forward_hook(keep) for module in model.modules() if isinstance(module, kind)]
    out = model(tokens_BS)
    for hook in hooks:
        hook.remove()
    return getattr(out, "logits", out), chosen


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_experts_are_those_of_transformers(name: str) -> None:
    theirs = random_transformers_model(name)
    of = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    of["num_nextn_predict_layers"] = 0  # their class has no such modules, whatever its config says
    section = spec_to_config(spec_from_hf(of, "test"))
    ours = Decoder(build_record(ModelConfig, without_none(section), {}))
    ours.load_state_dict(theirs.state_dict())
    tokens_BS = torch.randint(0, 96, (1, 512), generator=torch.Generator().manual_seed(1))
    router = next(type(module) for module in theirs.modules() if type(module).__name__.lower().endswith("topkrouter"))
    their_logits, their_choices = choices_of(theirs, router, tokens_BS)
    our_logits, our_choices = choices_of(ours, Router, tokens_BS)
    assert len(our_choices) == len(their_choices) > 0
    assert all(torch.equal(a, b) for a, b in zip(our_choices, their_choices, strict=True))
    assert float((our_logits - their_logits).abs().max()) <= 1e-3


@pytest.mark.parametrize("window", [None, 5])
def test_attention_with_sinks_is_a_softmax_with_one_more_score(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q_BSHK, k_BTGK, v_BTGK = (
        torch.randn(2, 12, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    sinks_H = torch.randn(4, generator=generator, requires_grad=True)
    kernel = SdpaAttend(window, scale=0.3)
    positions_BS = torch.arange(12).expand(2, -1)
    found = kernel(q_BSHK, k_BTGK, v_BTGK, kernel.plan(positions_BS, None), sinks_H)

    k_BTHK, v_BTHK = (x.repeat_interleave(2, dim=2) for x in (k_BTGK, v_BTGK))
    scores_BHST = 0.3 * torch.einsum("bshk,bthk->bhst", q_BSHK, k_BTHK)
    seen_B1ST = visibility_mask(positions_BS, positions_BS, None, None, window)
    scores_BHST = scores_BHST.masked_fill(~seen_B1ST, -torch.inf)
    with_sink = torch.cat([scores_BHST, sinks_H[None, :, None, None].expand(2, -1, 12, 1)], dim=-1)
    reference = torch.einsum("bhst,bthk->bshk", with_sink.softmax(-1)[..., :-1], v_BTHK)

    leaves = (q_BSHK, k_BTGK, v_BTGK, sinks_H)
    pull = torch.randn(found.shape, generator=generator)
    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, pull), torch.autograd.grad(reference, leaves, pull), rtol=1e-4, atol=1e-5
    )


def test_the_estimate_counts_the_weights_of_latent_attention() -> None:
    assert DEEPSEEK.latent is not None
    for latent in (DEEPSEEK.latent, replace(DEEPSEEK.latent, q_rank=None)):
        plan = plan_of(decoder(replace(DEEPSEEK, latent=latent)))
        found = {fqn: weight.numel() for fqn, weight in plan.parameters.items() if ".1.self_attn." in fqn}
        matrices = sum(size for fqn, size in found.items() if "norm" not in fqn)
        assert matrices == latent_weights(latent, DEEPSEEK.dim, DEEPSEEK.n_heads)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (DEEPSEEK, {"latent": None}, r"family deepseek_v3 must have the table \[model.latent\]"),
        (GPT_OSS, {"latent": DEEPSEEK.latent}, r"family gpt_oss cannot have the table \[model.latent\]"),
        (DEEPSEEK, {"sliding_window": 8}, r"model.sliding_window = 8: latent attention has none"),
        (DEEPSEEK, {"n_kv_heads": 2}, r"as many key/value heads as n_heads = 4"),
        (GPT_OSS, {"full_attention_every": 1}, r"full_attention_every = 1: must be 0, or at least 2"),
        (GPT_OSS, {"sliding_window": None}, r"full_attention_every = 2: must be 0, or at least 2 with"),
        (GPT_OSS, {"family": "qwen3_moe"}, r"model.sinks: family qwen3_moe has none"),
        (GPT_OSS, {"experts": DEEPSEEK.experts}, r"model.experts.limit, of the clamped SwiGLU"),
    ],
)
def test_options_that_contradict_the_family_are_refused(
    model: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(replace(model, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_dim": 7}, r"rope_dim = 7 is odd"),
        ({"value_dim": 99}, r"value_dim = 99: more than nope_dim \+ rope_dim = 20"),
        ({"kv_rank": 0}, r"kv_rank = 0: must be from 1"),
    ],
)
def test_sizes_of_latents_are_checked(changes: dict[str, Any], message: str) -> None:
    assert DEEPSEEK.latent is not None
    with pytest.raises(ConfigError, match=message):
        decoder(replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, **changes)))


def test_heads_that_tp_does_not_divide_are_named() -> None:
    parallel = ParallelConfig(tp=8)
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.q_b_proj.weight: heads 4 / tp 8"):
        check_fits(decoder(DEEPSEEK), parallel, mesh_spec(parallel, 8), seq_len=48, microbatch_size=8)


def test_a_config_of_every_family_comes_back_from_its_table() -> None:
    for model in (DEEPSEEK, GPT_OSS):
        assert build_record(ModelConfig, as_dict(model), {}) == model


@pytest.mark.parametrize("model", [DEEPSEEK, GPT_OSS], ids=lambda model: model.family)
def test_offline_resharding_cuts_as_the_trainer_does(model: ModelConfig) -> None:
    plan = plan_of(decoder(model))
    for fqn in plan.parameters:
        module, _, name = fqn.rpartition(".")
        rule = plan.rules.get(module)
        cut = plan.cut(module)
        if isinstance(rule, Region) and name in rule.divided:
            cut = 0
        if module in plan.experts:
            expected = {"ep": Shard(0)}
        else:
            is_bias_of_rowwise = cut == 1 and name == "bias"
            expected = {} if cut is None or is_bias_of_rowwise else {"tp": Shard(cut)}
        assert tensor_parallel(f"model.{fqn}") == expected, fqn
