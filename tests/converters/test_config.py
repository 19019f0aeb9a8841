"""Conversion of config.json to the model spec and back."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import pytest

from tests.support.hf_models import DENSE, config
from titan_ckpt.converters.hf.config import hf_config, parse_config, spec_from_hf
from titan_ckpt.converters.models.families import FAMILIES, expected_tensors
from titan_ckpt.converters.models.spec import ModelSpec, spec_of, spec_to_config
from titan_ckpt.converters.models.tensor_names import LAYOUTS, TORCHTITAN, find_layout, name_in
from titan_ckpt.errors import DamagedError, PlanError

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}


def _spec(**changes: Any) -> ModelSpec:
    return dataclasses.replace(spec_from_hf(config(), "test"), **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"type": "linear", "factor": 2.0}])
def test_spec_survives_a_new_config_and_the_trainers_config(family: str, scaling: dict[str, Any] | None) -> None:
    spec = spec_from_hf(config(family, rope_scaling=scaling), "test")
    written = json.loads(json.dumps(hf_config(spec, base=None, dtype="bfloat16")))
    assert spec_from_hf(written, "test") == spec
    assert spec_of(json.loads(json.dumps({"model": spec_to_config(spec)})), "test") == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_config_that_came_from_hugging_face_goes_back_as_it_came(family: str) -> None:
    base = config(family)
    assert hf_config(spec_from_hf(base, "test"), base=base, dtype="float32") == base


def test_new_and_old_spelling_of_rotary_positions_mean_the_same() -> None:
    old = config(rope_scaling=LLAMA3)
    new = config(rope_theta=None, rope_parameters={"rope_theta": 5000.0, **LLAMA3})
    both = config(rope_scaling=LLAMA3, rope_parameters={"rope_theta": 5000.0, **LLAMA3})
    assert spec_from_hf(old, "old") == spec_from_hf(new, "new") == spec_from_hf(both, "both")


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("vocab_size", 128, "vocab_size"),
        ("norm_eps", 1e-3, "rms_norm_eps"),
        ("max_seq_len", 4096, "max_position_embeddings"),
        ("rope_theta", 1e6, "rope_theta"),
        ("tied_embeddings", True, "tie_word_embeddings"),
    ],
)
def test_what_training_changed_is_changed_in_the_kept_config(field: str, value: Any, key: str) -> None:
    base = config(rope_theta=None, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    written = hf_config(_spec(**{field: value}), base=base, dtype="float32")
    assert written[key] == value
    assert written["a_key_of_the_future"] == {"kept": True}
    assert getattr(spec_from_hf(written, "test"), field) == value


def test_longer_window_replaces_the_layer_list() -> None:
    base = config("qwen2", layer_types=["full_attention"] * 2)
    spec = dataclasses.replace(spec_from_hf(base, "test"), sliding_window=32)
    assert spec_from_hf(hf_config(spec, base=base, dtype="float32"), "test").sliding_window == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "all layers must turn positions alike"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "which of the two",
        ),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 77}, "original_max_position_embeddings = 77"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "multiple"),
    ],
)
def test_config_we_cannot_express_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spec_from_hf(config(**changes), "the/config.json")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("num_attention_heads", 0, "at least 1"),
        ("num_key_value_heads", "two", "at least 1"),
        ("num_hidden_layers", -1, "at least 1"),
        ("num_hidden_layers", 10**9, "more than 10000 layers"),
        ("hidden_size", 32.5, "at least 1"),
        ("head_dim", True, "at least 1"),
        ("rope_theta", "big", "a positive number"),
        ("rms_norm_eps", float("nan"), "a positive number"),
        ("tie_word_embeddings", "no", "true or false"),
        ("layer_types", "full", "a list of names"),
    ],
)
def test_value_that_is_not_of_its_keys_kind_is_refused_by_key(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(PlanError, match=rf"the/config.json: {key} = .*{wanted}"):
        spec_from_hf(config(**{key: value}), "the/config.json")


def test_scaling_with_a_word_for_a_number_is_refused() -> None:
    with pytest.raises(PlanError, match=r"factor = 'x': expected a positive number"):
        spec_from_hf(config(rope_scaling={"rope_type": "llama3", "factor": "x"}), "test")
    with pytest.raises(PlanError, match="rope types are default"):
        spec_from_hf(config(rope_scaling={"rope_type": ["llama3"], "factor": 2.0}), "test")


def test_what_is_not_supported_is_refused_by_name_with_what_is() -> None:
    with pytest.raises(PlanError) as caught:
        spec_from_hf(config(architectures=["BambaForCausalLM"], model_type="bamba"), "test")
    assert str(caught.value).startswith("test: BambaForCausalLM (model_type 'bamba') is not supported; supported are ")
    assert all(family.architecture in str(caught.value) for family in FAMILIES.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_layers_that_attend_differently_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="all layers must attend alike"):
        spec_from_hf(config("qwen2", **changes), "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"num_key_value_heads": 3}, "n_heads = 4 is not a multiple of n_kv_heads = 3"),
    ],
)
def test_heads_that_cannot_be_are_refused_by_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"the/config.json: {message}"):
        spec_from_hf(config(**changes), "the/config.json")


def test_config_without_an_end_of_brackets_is_refused() -> None:
    with pytest.raises(DamagedError, match=r"the/config\.json: not JSON"):
        parse_config(b"[" * 100_000, "the/config.json")


def test_values_that_change_nothing_are_read() -> None:
    plain = spec_from_hf(config(), "test")
    assert spec_from_hf(config(hidden_act="swish", mlp_bias=False, partial_rotary_factor=1), "test") == plain
    assert spec_from_hf(config() | {"mlp_bias": None, "quantization_config": None}, "test") == plain


def test_omitted_keys_take_the_familys_defaults() -> None:
    bare = config(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, rope_theta=None, tie_word_embeddings=None)
    spec = spec_from_hf(bare, "test")
    assert (spec.n_kv_heads, spec.head_dim, spec.norm_eps, spec.rope_theta) == (4, 8, 1e-6, 10000.0)
    assert not spec.tied_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("llama", {"qkv_bias": True}, "attention_bias"),
        ("llama", {"sliding_window": 8}, "sliding window"),
        ("qwen2", {}, "qkv_bias = False"),
        ("qwen3", {}, "qk_norm = false"),
        ("mistral", {"o_bias": True}, "biases"),
        ("bert", {}, "supported are llama, qwen2, qwen3, mistral, mixtral, qwen3_moe"),
        ("mixtral", {}, "must have experts"),
    ],
)
def test_spec_that_the_family_cannot_express_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        hf_config(_spec(family=family, **changes), base=None, dtype="float32")


def test_trainers_own_reading_of_every_family_agrees() -> None:
    families = importlib.import_module("tools.training.hf_shapes")
    for family in DENSE:
        for scaling in (None, LLAMA3, YARN):
            of = config(family, rope_scaling=scaling)
            trainers = spec_of({"model": dataclasses.asdict(families.from_hf(of))}, "trainer")
            ours = spec_from_hf(of, "ours")
            assert trainers == ours
            assert spec_from_hf(families.to_hf(families.from_hf(of)), "back") == ours


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "titan"])
def test_torchtitan_names_are_unique_and_found_again(family: str, layout: str) -> None:
    spec = spec_from_hf(config(family), "test")
    names = [name_in(LAYOUTS[layout], name, spec).ours for name in expected_tensors(spec)]
    assert len(set(names)) == len(names)
    assert find_layout(names, "test") == LAYOUTS[layout]


def test_torchtitan_has_no_place_for_biases() -> None:
    spec = spec_from_hf(config(attention_bias=True), "test")
    with pytest.raises(PlanError, match=r"q_proj.bias"):
        name_in(LAYOUTS[TORCHTITAN], "model.layers.0.self_attn.q_proj.bias", spec)
