"""Mixtures of experts: files hold one tensor per expert, checkpoints one tensor for all experts of a layer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import MIXTURES, STACKED, config, contents, raw, tensors, write_model
from titan_ckpt.check.diff import diff
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.export_plan import plan_export
from titan_ckpt.converters.models.families import FAMILIES
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.errors import LoadContractError, PlanError
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard

OF_LAYER_1 = "model.model.layers.1.mlp."


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("family", STACKED)
def test_experts_are_stacked_as_transformers_modules_hold_them(tmp_path: Path, family: str) -> None:
    of = config(family)
    content = tensors(of)
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    gate, up, down = (
        torch.stack([content[f"model.layers.1.{name.format(number)}"] for number in range(4)])
        for name in FAMILIES[family].experts
    )
    assert torch.equal(checkpoint.read(OF_LAYER_1 + "experts.gate_up_proj"), torch.cat([gate, up], 1))
    assert torch.equal(checkpoint.read(OF_LAYER_1 + "experts.down_proj"), down)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_mesh_exports_the_files_that_were_imported(tmp_path: Path, family: str) -> None:
    of = config(family)
    source = write_model(tmp_path / "in", of, tensors(of, dtype=torch.bfloat16), num_files=3)
    import_hf(str(source), str(tmp_path / "run"))
    for dim in (0, 1, 2):
        cut = PlacementRule("*.mlp.experts.*_proj", {"dp_shard": Shard(dim)})
        rules = (cut, PlacementRule("*", {"dp_shard": Shard(0)}))
        mesh = MeshSpec.parse("dp_shard=3")
        run_plan(plan_reshard(open_checkpoint(str(tmp_path / "run")), mesh, rules=rules), str(tmp_path / f"by{dim}"))
        export_hf(str(tmp_path / f"by{dim}"), str(tmp_path / f"out{dim}"))
        assert not diff(open_checkpoint(str(source)), open_checkpoint(str(tmp_path / f"out{dim}")), values=True)
    exports = [contents(tmp_path / f"out{dim}") for dim in (0, 1, 2)]
    assert len({export["model.safetensors"] for export in exports}) == 1


@pytest.mark.parametrize("family", MIXTURES)
def test_folder_opened_in_place_has_the_same_stacks(tmp_path: Path, family: str) -> None:
    of = config(family)
    source = write_model(tmp_path / "in", of, tensors(of), num_files=2)
    import_hf(str(source), str(tmp_path / "run"))
    assert not diff(open_checkpoint(str(source)), open_checkpoint(str(tmp_path / "run")), values=True)


@pytest.mark.parametrize("family", STACKED)
def test_cast_of_experts_is_torchs_bit_for_bit(tmp_path: Path, family: str) -> None:
    of = config(family)
    content = tensors(of)
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float16")
    exported = open_checkpoint(str(tmp_path / "out"))
    down = torch.stack([content[f"model.layers.1.{FAMILIES[family].experts[2].format(n)}"] for n in range(4)])
    assert raw(exported.read("model.model.layers.1.mlp.experts.down_proj")) == raw(down.half())


@pytest.mark.hf
@pytest.mark.parametrize("family", MIXTURES)
def test_transformers_model_comes_back_byte_equal(tmp_path: Path, family: str) -> None:
    transformers = importlib.import_module("transformers")
    made = _transformers_model(family)
    made.save_pretrained(str(tmp_path / "in"))
    import_hf(str(tmp_path / "in"), str(tmp_path / "run"))
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"]) == 0
    before, after = contents(tmp_path / "in"), contents(tmp_path / "out")
    assert after["model.safetensors"] == before["model.safetensors"]
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), dtype=torch.float32).eval()
    tokens = torch.arange(96)[None]
    with torch.no_grad():
        assert torch.equal(made(tokens).logits, loaded(tokens).logits)


@pytest.mark.hf
@pytest.mark.parametrize("family", MIXTURES)
def test_transformers_state_dict_is_exported_with_a_new_config(tmp_path: Path, family: str) -> None:
    made = _transformers_model(family)
    spec = spec_from_hf(made.config.to_dict(), "test")
    save(str(tmp_path / "run"), {"model": made.state_dict()}, step=7, config={"model": spec_to_config(spec)})
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"]) == 0
    made.save_pretrained(str(tmp_path / "theirs"))
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def _transformers_model(family: str) -> Any:
    transformers = importlib.import_module("transformers")
    of = config(family, torch_dtype=None)
    kind = of.pop("model_type")
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **of)).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "every layer must be a mixture"),
        ({"decoder_sparse_step": 2}, "every layer must be a mixture"),
        ({"num_local_experts": 8}, "which of the two"),
        ({"num_experts": 10**9}, "at most 200000"),
        ({"num_experts_per_tok": 5}, "with 5 per token"),
        ({"num_experts": 0}, "at least 1"),
        ({"norm_topk_prob": "yes"}, "true or false"),
    ],
)
def test_experts_we_cannot_express_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spec_from_hf(config("qwen3_moe", **changes), "test")


def test_both_spellings_of_the_number_of_experts_mean_the_same() -> None:
    of = config("qwen3_moe")
    assert spec_from_hf(of, "a") == spec_from_hf(
        {key: value for key, value in of.items() if key != "num_experts"} | {"num_local_experts": 4}, "b"
    )


def test_missing_and_transposed_experts_are_named(tmp_path: Path) -> None:
    of = config("mixtral")
    content = tensors(of)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    transposed = content | {name: content[name].T.contiguous()}
    with pytest.raises(LoadContractError, match=r"experts\.2\.w2\.weight has shape .*transposed"):
        import_hf(str(write_model(tmp_path / "turned", of, transposed)), str(tmp_path / "run"))
    del content[name]
    with pytest.raises(LoadContractError, match=r"missing model\.layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight"):
        import_hf(str(write_model(tmp_path / "less", of, content)), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_stack_of_another_shape_is_named(tmp_path: Path) -> None:
    of = config("mixtral")
    import_hf(str(write_model(tmp_path / "in", of, tensors(of))), str(tmp_path / "run"))
    with pytest.raises(
        LoadContractError, match=r"gate_up_proj has shape \(4, 48, 32\), the config wants .*\(8, 48, 32\)"
    ):
        plan_export(open_checkpoint(str(tmp_path / "run")), dtype=None, config=config("mixtral", num_local_experts=8))


def test_experts_of_mixed_dtypes_stack_only_with_a_dtype_given(tmp_path: Path) -> None:
    of = config("qwen3_moe")
    content = tensors(of)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    content[name] = content[name].bfloat16()
    source = write_model(tmp_path / "in", of, content)
    with pytest.raises(LoadContractError, match=r"layers\.0\.mlp\.experts\.gate_up_proj are .*give --dtype"):
        import_hf(str(source), str(tmp_path / "run"))
    import_hf(str(source), str(tmp_path / "run"), dtype="float32")


def test_torchtitans_layouts_refuse_mixtures_by_name(tmp_path: Path) -> None:
    of = config("qwen3_moe")
    source = write_model(tmp_path / "in", of, tensors(of))
    with pytest.raises(PlanError, match="in a qwen3_moe model; its families are llama, qwen3"):
        import_hf(str(source), str(tmp_path / "run"), layout="torchtitan")
