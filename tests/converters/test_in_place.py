"""A Hugging Face folder works as a checkpoint without an import: load, inspect, re-export and train from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.hf_models import config, raw, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf, import_hf, open_hf
from titan_ckpt.errors import LoadContractError, NotCommittedError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_folder_loads_into_a_state_dict(tmp_path: Path, num_files: int, is_tied: bool) -> None:
    of = config(tie_word_embeddings=is_tied)
    content = tensors(of, dtype=torch.bfloat16)
    stored = content | {"lm_head.weight": content["model.embed_tokens.weight"]} if is_tied else content
    checkpoint = open_checkpoint(str(write_model(tmp_path / "in", of, stored, num_files=num_files)))
    assert (checkpoint.step, checkpoint.manifest.kind) == (0, "model")
    state = {"model": {name: torch.zeros(tensor.shape) for name, tensor in content.items()}}
    report = load(checkpoint, state, policy=LoadPolicy(cast="allow"))
    assert len(report.loaded) == len(content)
    assert all(torch.equal(tensor, content[name].float()) for name, tensor in state["model"].items())


def test_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    content = tensors(config())
    checkpoint = open_checkpoint(str(write_model(tmp_path / "in", config(), content)), step=0)
    assert torch.equal(
        checkpoint.read("model.lm_head.weight", Box((3, 1), (2, 5))), content["lm_head.weight"][3:5, 1:6]
    )
    assert json.loads(checkpoint.asset("config.json")) == config()


def test_folder_is_exported_again_in_another_dtype(tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(
        tmp_path / "in", config(), content, extra={"tokenizer.json": "{}", "tokenizer_config.json": "{}"}
    )
    export_hf(str(model), str(tmp_path / "out"), dtype="float16")
    again = open_checkpoint(str(tmp_path / "out"))
    assert all(raw(again.read("model." + name)) == raw(tensor.half()) for name, tensor in content.items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_folder_is_resharded_as_it_lies(tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content)
    run_plan(plan_reshard(open_checkpoint(str(model)), MeshSpec.parse("dp_shard=3,tp=2")), str(tmp_path / "run"))
    found = open_checkpoint(str(tmp_path / "run"))
    assert str(found.manifest.mesh) == "dp_shard=3,tp=2"
    assert all(torch.equal(found.read("model." + name), tensor) for name, tensor in content.items())


def test_prefix_and_hub_cache_open_as_well(store_url: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    export_hf(str(model), store_url + "/out")
    assert len(open_checkpoint(store_url + "/out").manifest.tensors) == len(tensors(config()))
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    found = open_checkpoint(str(tmp_path / "models--a--b"))
    assert open_checkpoint(found.url, step=found.step).manifest.by_fqn == found.manifest.by_fqn


def test_contradiction_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    content = tensors(config())
    content.pop("model.norm.weight")
    with pytest.raises(LoadContractError, match=r"missing model\.norm\.weight"):
        open_checkpoint(str(write_model(tmp_path / "in", config(), content)))


def test_empty_folder_is_still_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_pair_of_which_one_is_damaged_is_refused(tmp_path: Path, name: str) -> None:
    """Also beside digests that prove that the two were equal."""
    of = config(tie_word_embeddings=True)
    content = tensors(of)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    stored = open_hf(str(tmp_path / "out")).tensors[name]
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(stored.offset + 5)
        file.write(b"\x7f")
    with pytest.raises(LoadContractError, match="ties the head to the embedding"):
        open_checkpoint(str(tmp_path / "out"))
