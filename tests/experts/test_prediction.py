"""Modules that predict further tokens: layers after the last in Hugging Face's files (README_WEIGHTS.md of DeepSeek-V3)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_models import config, contents, raw, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.models.families import copies
from titan_ckpt.errors import LoadContractError

Content = dict[str, Tensor]


def predicting(depth: int = 1, **changes: Any) -> dict[str, Any]:
    """config.json of a DeepSeek-V3 with two layers, and `depth` modules more."""
    return config("deepseek_v3", num_nextn_predict_layers=depth, **changes)


def whole(of: dict[str, Any]) -> Content:
    """Its weights, with the copies of embedding and head that published files have."""
    content = tensors(of)
    found = copies(spec_from_hf(of, "test"))
    return content | {name: content[original].clone() for name, original in found.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_copies", [True, False])
def test_they_come_back_as_they_went(tmp_path: Path, depth: int, tied: bool, has_copies: bool) -> None:
    of = predicting(depth, tie_word_embeddings=tied)
    content = whole(of) if has_copies else tensors(of)
    model = write_model(tmp_path / "in", of, content)
    assert open_hf(str(model)).left_out_tensors == []
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert contents(tmp_path / "out")["model.safetensors"] == contents(model)["model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == of


def test_ours_are_modules_with_stacked_experts(tmp_path: Path) -> None:
    of = predicting(2)
    content = whole(of)
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    found = {fqn for fqn in checkpoint.manifest.by_fqn if fqn.startswith("model.model.ahead.depths.1.")}
    assert {fqn.removeprefix("model.model.ahead.depths.1.") for fqn in found} >= {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight", "layer.input_layernorm.weight",
        "layer.self_attn.kv_b_proj.weight", "layer.mlp.gate.weight", "layer.mlp.gate.e_score_correction_bias",
        "layer.mlp.experts.gate_up_proj", "layer.mlp.experts.down_proj", "layer.mlp.shared_experts.up_proj.weight",
    }  # fmt: skip
    assert not any("embed_tokens" in fqn for fqn in found)
    name = "model.model.ahead.depths.1.layer.mlp.experts.down_proj"
    stored = [
        content[f"model.layers.3.mlp.experts.{number}.down_proj.weight"] for number in range(of["n_routed_experts"])
    ]
    assert raw(checkpoint.read(name)) == raw(torch.stack(stored))
    assert checkpoint.manifest.config["model"]["ahead"] == {"depth": 2}


def test_a_folder_is_read_in_place_with_them(tmp_path: Path) -> None:
    of = predicting()
    content = whole(of)
    checkpoint = open_checkpoint(str(write_model(tmp_path / "in", of, content)))
    name = "model.model.ahead.depths.0.eh_proj.weight"
    assert raw(checkpoint.read(name)) == raw(content["model.layers.2.eh_proj.weight"])
    assert main(["verify", str(tmp_path / "in"), "--data"]) in (0, 1)


def test_files_without_them_keep_their_config(tmp_path: Path) -> None:
    """transformers drops the layers when it saves a model, and keeps the key."""
    of = predicting()
    model = write_model(tmp_path / "in", of, tensors(config("deepseek_v3")))
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert contents(tmp_path / "out")["model.safetensors"] == contents(model)["model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_modules_with_ends_of_their_own_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    of = predicting()
    content = whole(of)
    content["model.layers.2.shared_head.head.weight"] += 1.0
    model = write_model(tmp_path / "in", of, content)
    with caplog.at_level(logging.WARNING):
        assert main(["convert", "from-hf", str(model), str(tmp_path / "run")]) == 0
    assert "model.layers.2.shared_head.head.weight differs from lm_head.weight" in caplog.text
    out = capsys.readouterr().out
    assert "left out, since they predict further tokens (MTP): model.layers.2." in out
    assert not any(".ahead." in fqn for fqn in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn)


@pytest.mark.parametrize("name", ["eh_proj.weight", "shared_head.norm.weight", "mlp.experts.1.up_proj.weight"])
def test_a_module_that_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    of = predicting()
    content = whole(of)
    del content[f"model.layers.2.{name}"]
    with pytest.raises(
        LoadContractError, match=rf"missing model\.layers\.2\.{name}".replace("experts.1", r"experts\.1")
    ):
        import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))


def test_layers_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    content = whole(predicting())
    with pytest.raises(LoadContractError, match=r"not part of a deepseek_v3 model.*layers\.2\."):
        import_hf(str(write_model(tmp_path / "in", config("deepseek_v3"), content)), str(tmp_path / "run"))


def test_a_cast_and_a_new_split_of_files_take_them_along(tmp_path: Path) -> None:
    of = predicting()
    content = whole(of)
    import_hf(str(write_model(tmp_path / "in", of, content, num_files=3)), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"), dtype="bfloat16", max_shard_bytes=20_000)
    model = open_hf(str(tmp_path / "out"))
    assert set(model.tensors) == set(content)
    assert model.tensors["model.layers.2.embed_tokens.weight"].dtype == "bfloat16"
    assert model.tensors["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == "float32"
