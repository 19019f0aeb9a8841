"""A DeepSeek-V3 in Hugging Face's files is trained with its modules that predict further tokens, and exported with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import config, tensors, write_model
from tests.support.training_runs import read_losses
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.model_from import fill_from
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig

AHEAD = "model.model.ahead.depths.0."
EMBEDDING, COPY = "model.embed_tokens.weight", "model.layers.2.embed_tokens.weight"
HEAD, HEAD_COPY = "lm_head.weight", "model.layers.2.shared_head.head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and one module, and a text beside them."""
    made = tmp_path_factory.mktemp("deepseek")
    of = config("deepseek_v3", num_nextn_predict_layers=1, vocab_size=320)
    content = tensors(of)
    content |= {COPY: content[EMBEDDING].clone(), HEAD_COPY: content[HEAD].clone()}
    write_model(made / "model", of, content)
    (made / "text.txt").write_text("a text that a model may learn. " * 400)
    return made


def settings(folder: Path, run: Path, ahead: str = "", **train: Any) -> Path:
    """A config of `run` that names no shape."""
    steps = {"steps": 2, "global_batch_size": 4, "microbatch_size": 2, "device": '"cpu"'} | train
    lines = [
        f'[model]\nfrom = "{folder}/model"\n{ahead}',
        f'[data]\nsource = "{folder}/text.txt"\ncache = "{folder}/cache"\ntokenizer = "bytes"\nseq_len = 16',
        "[train]\n" + "\n".join(f"{key} = {value}" for key, value in steps.items()),
        f'[save]\nurl = "{run}"\nevery = 2\n[log]\ntensorboard = false\n[validation]\nfraction = 0.0\nevery = 0',
    ]
    path = run.parent / f"{run.name}.toml"
    path.write_text("\n".join(lines))
    return path


def test_the_folder_gives_the_modules_with_a_weight_of_ours(folder: Path, tmp_path: Path) -> None:
    def ahead(text: str) -> Any:
        return resolve(TrainConfig, str(settings(folder, tmp_path / "run", text)), (), fill_from).config.model.ahead

    assert (ahead("").depth, ahead("").weight) == (1, 0.3)
    assert (ahead("[model.ahead]\nweight = 0.1").depth, ahead("[model.ahead]\nweight = 0.1").weight) == (1, 0.1)
    assert ahead("[model.ahead]\ndepth = 0") is None
    with pytest.raises(ConfigError, match=r"ahead.*there.*leave these out"):
        ahead("[model.ahead]\ndepth = 2")


@pytest.mark.dist
@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "pp=2"])
def test_they_are_trained_and_exported(folder: Path, tmp_path: Path, mesh: str) -> None:
    path = settings(folder, tmp_path / "run")
    assert main(["train", str(path), "--set", f"mesh.{mesh}"]) == 0
    assert len(read_losses(tmp_path / "run")) == 2
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"]) == 0
    before, after = open_hf(str(folder / "model")), open_hf(str(tmp_path / "out"))
    assert set(before.tensors) == set(after.tensors)
    assert after.config["num_nextn_predict_layers"] == 1
    assert after.left_out_tensors == []  # copies equal what they are copies of, or they were
    old, new = open_checkpoint(str(folder / "model")), open_checkpoint(str(tmp_path / "out"))
    trained = [fqn for fqn in old.manifest.by_fqn if fqn.startswith(AHEAD) and fqn.endswith("_proj.weight")]
    assert trained
    assert not any(torch.equal(old.read(fqn), new.read(fqn)) for fqn in trained)


@pytest.mark.dist
def test_a_run_may_leave_them_out_and_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = settings(folder, tmp_path / "run", "[model.ahead]\ndepth = 0")
    with caplog.at_level(logging.WARNING):
        assert main(["train", str(path)]) == 0
    captured = capfd.readouterr()
    assert (
        "modules that predict further tokens ([model.ahead]) are left out" in caplog.text + captured.err + captured.out
    )
    assert not any(fqn.startswith(AHEAD) for fqn in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn)
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    out = open_hf(str(tmp_path / "out"))
    assert out.config["num_nextn_predict_layers"] == 0
    assert out.left_out_tensors == []


def copied(folder: Path, to: Path, change: str) -> Path:
    """An export of the model with one bit of `change` flipped."""
    assert main(["convert", "to-hf", str(folder / "model"), str(to)]) == 0
    place = open_hf(str(to)).tensors[change].offset
    data = bytearray((to / "model.safetensors").read_bytes())
    data[place] ^= 1
    (to / "model.safetensors").write_bytes(data)
    return to


@pytest.mark.parametrize("name", [COPY, HEAD_COPY])
def test_a_damaged_copy_is_called_damaged(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """By the record of the export it was equal: it is no other weight, for which the modules would be left out."""
    model = copied(folder, tmp_path / "out", name)
    assert main(["convert", "from-hf", str(model), str(tmp_path / "run")]) == 3
    assert f"{name}: the" in capsys.readouterr().err
    assert main(["verify", "--data", str(model)]) == 1
    assert f"{name}: bytes" in capsys.readouterr().out
    assert "are left out" not in caplog.text
    assert open_hf(str(model)).left_out_tensors == []


def test_config_does_not_name_modules_that_are_left_out(tmp_path: Path) -> None:
    of = config("deepseek_v3", num_nextn_predict_layers=1, vocab_size=320)
    content = tensors(of)
    write_model(tmp_path / "model", of, content | {COPY: content[EMBEDDING] + 1})
    assert main(["convert", "from-hf", str(tmp_path / "model"), str(tmp_path / "run")]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert open_hf(str(tmp_path / "out")).config["num_nextn_predict_layers"] == 0
