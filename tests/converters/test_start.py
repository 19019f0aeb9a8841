"""Training from a Hugging Face folder: any spelling of the same model is accepted, a different model is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support.hf_models import DENSE, config, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import import_hf
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.job.resume import check_model
from tools.training.hf_shapes import from_hf

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("head_dim", [0, 8])
def test_trainer_takes_the_same_model_however_it_is_spelled(
    tmp_path: Path, family: str, scaling: dict[str, object] | None, head_dim: int
) -> None:
    of = config(family, rope_scaling=scaling)
    model = dataclasses.replace(from_hf(of), head_dim=head_dim)
    folder = write_model(tmp_path / "in", of, tensors(of))
    check_model(open_checkpoint(str(folder)), model)
    check_model(import_hf(str(folder), str(tmp_path / "run")).checkpoint, model)


def test_trainer_refuses_another_head_size_and_another_scaling(tmp_path: Path) -> None:
    of = config(rope_scaling=YARN)
    checkpoint = open_checkpoint(str(write_model(tmp_path / "in", of, tensors(of))))
    with pytest.raises(ConfigError, match="head_dim: checkpoint 8, config 16"):
        check_model(checkpoint, dataclasses.replace(from_hf(of), head_dim=16))
    with pytest.raises(ConfigError, match="rope_scaling"):
        check_model(checkpoint, from_hf(config(rope_scaling=YARN | {"factor": 2.0})))


def test_trainer_refuses_a_mixture_of_experts(tmp_path: Path) -> None:
    of = config("mixtral")
    checkpoint = open_checkpoint(str(write_model(tmp_path / "in", of, tensors(of))))
    with pytest.raises(ConfigError, match="experts"):
        check_model(checkpoint, from_hf(config("mistral")))


def test_ls_recognises_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "in", config("qwen3"), tensors(config("qwen3")), num_files=2)
    assert main(["ls", str(model)]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:5] == ["0", "hugging", "face", "qwen3", "model"]
    assert main(["ls", str(model), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["family"], facts["kind"]) == ("hugging face", "qwen3", "model")
    assert facts["size_bytes"] == sum(path.stat().st_size for path in model.glob("*.safetensors"))


def test_ls_of_an_unsupported_model_names_the_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / "config.json").write_text(json.dumps(config() | {"architectures": ["GPT2LMHeadModel"]}))
    assert main(["ls", str(model)]) == 2
    error = capsys.readouterr().err
    assert "GPT2LMHeadModel" in error
    assert "LlamaForCausalLM" in error
