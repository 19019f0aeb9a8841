"""A model of one's own goes on from its checkpoints: its record is compared as it is, whatever its keys are called."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extending.odd_model import odd
from tests.support.training_runs import read_losses
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer import ModelConfig, ModelSpec, decoder, run
from tools.paths import EXAMPLES, ROOT


@dataclass(frozen=True, kw_only=True)
class Like:
    """Keys of the decoder's table, but not all of those it needs."""

    vocab_size: int = 64
    dim: int = 32
    n_layers: int = 2
    max_seq_len: int = 64
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Other:
    width: int = 32


def like(config: Like) -> ModelSpec:
    return odd(config.dim)


def wrapped(config: Other) -> ModelSpec:
    shape = ModelConfig(vocab_size=64, dim=config.width, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=64)
    return decoder(shape)


def ready(config: Any = None) -> ModelSpec:
    return dataclasses.replace(odd(32), config=config)


class Numbers:
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 32

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def _run(folder: Path, model: Any, *sets: str) -> dict[int, float]:
    tables: dict[str, Any] = {"model": {}, "data": {"seq_len": 16}, "train": {"global_batch_size": 4, "device": "cpu"}}
    tables |= {"log": {"tensorboard": False, "progress": False}, "debug": {"recorder": False}}
    run(tables, sets=(f"save.url={folder}", "save.every=3", *sets), model=model, data=lambda _: Numbers())
    return read_losses(folder)


def cut_off(whole: Path, run: Path) -> None:
    """A run as it was after step 3."""
    shutil.copytree(whole, run, ignore=lambda _, names: {*names} & {"step-00000006", "logs"})


MODELS = {"like the decoder": like, "around the decoder": wrapped, "ready": ready(), "ready with": ready(Like())}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def test_a_model_of_ones_own_goes_on_bit_equal(tmp_path: Path, model: Any) -> None:
    whole = _run(tmp_path / "whole", model, "train.steps=6")
    cut_off(tmp_path / "whole", tmp_path / "run")
    assert _run(tmp_path / "run", model, "train.steps=6") == {step: whole[step] for step in (4, 5, 6)}


def test_another_record_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    _run(tmp_path / "run", like, "train.steps=1")
    for key in ("note", "max_seq_len"):
        with pytest.raises(ConfigError, match=f"is of another model: {key}: checkpoint"):
            _run(tmp_path / "run", like, f"model.{key}=128" if key == "max_seq_len" else f"model.{key}=other")
    _run(tmp_path / "ready", ready(Like()), "train.steps=1")
    with pytest.raises(ConfigError, match="note: checkpoint , config other"):
        _run(tmp_path / "ready", ready(Like(note="other")))
    _run(tmp_path / "around", wrapped, "train.steps=1")
    with pytest.raises(ConfigError, match="dim: checkpoint 32, config 64"):
        _run(tmp_path / "around", wrapped, "model.width=64")


def test_a_decoder_refuses_weights_of_a_model_like_it(tmp_path: Path) -> None:
    _run(tmp_path / "run", like, "train.steps=1")
    shape = ("model.vocab_size=64", "model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1")
    with pytest.raises(ConfigError, match="n_heads: checkpoint None, config 2"):
        _run(tmp_path / "run", decoder, *shape, "model.ffn_dim=64")


def test_a_record_that_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "run", like, "train.steps=1")
    _run(tmp_path / "run", ready(), "train.steps=2")
    assert (
        "only names and shapes are compared, since this run's model has no ModelSpec.config" in capsys.readouterr().err
    )
    assert open_checkpoint(str(tmp_path / "run")).step == 2


def test_a_ready_model_with_a_record_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "run", ready(Like()), "train.steps=1", "validation.fraction=0.2", "validation.every=1")
    source = "from tests.resume.test_own_models import Like, Numbers, ready\ndata = lambda _: Numbers()\n"
    for note, code in (("", 0), ("other", 2)):
        Path("own_ready.py").write_text(f"{source}model = ready(Like(note={note!r}))\n")
        assert main(["eval", "run", "--module", "own_ready.py"]) == code
    assert "note: checkpoint , config other" in capsys.readouterr().err


def test_a_config_that_is_no_record_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ModelSpec\('odd'\).config is a dict, expected a dataclass"):
        ready({"dim": 32})


@pytest.mark.dist
def test_an_own_model_goes_on_bit_equal_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the ranks import this file
    module = tmp_path / "like_decoder.py"
    module.write_text("from tests.resume.test_own_models import Numbers, like as model\ndata = lambda _: Numbers()\n")
    (tmp_path / "like.toml").write_text("[model]\n[data]\nseq_len = 16\n[train]\nglobal_batch_size = 4\n")
    fixed = ("save.every=3", "mesh.dp_shard=2", "log.tensorboard=false", "debug.recorder=false", "train.device=cpu")

    def go(url: str, *sets: str) -> int:
        words = [part for text in (*fixed, f"save.url={url}", *sets) for part in ("--set", text)]
        return main(["train", "like.toml", "--module", str(module), "--nproc", "2", *words])

    assert go("whole", "train.steps=6") == 0
    cut_off(Path("whole"), Path("run"))
    assert go("run", "train.steps=6") == 0
    assert read_losses(Path("run")) == {step: loss for step, loss in read_losses(Path("whole")).items() if step > 3}
    assert go("run", "train.steps=7", 'model.note="other"') == 2


@pytest.mark.dist
def test_a_tie_across_stages_goes_on_bit_equal(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ("save.every=3", "train.steps=6", "train.microbatch_size=2", f"data.cache={cache}", "model.dim=32")
    fixed = (*shape, "mesh.dp_shard=1", "log.tensorboard=false", "debug.recorder=false", "train.device=cpu")

    def go(url: str, pp: int) -> dict[int, float]:
        sets = (*fixed, f"save.url={url}", f"mesh.pp={pp}", f"mesh.microbatches={2 * (pp > 1)}")
        words = [part for text in sets for part in ("--set", text)]
        command = ["train", str(EXAMPLES / "gpt2.toml"), "--module", str(EXAMPLES / "gpt2.py"), "--nproc", str(pp)]
        assert main([*command, *words]) == 0
        return {step: loss for step, loss in read_losses(Path(url)).items() if step > 3}

    stayed = go("whole", 2)
    for name, pp in (("run", 2), ("other", 1)):
        cut_off(Path("whole"), Path(name))
        found = go(name, pp)
        assert found == (stayed if pp == 2 else pytest.approx(stayed, rel=1e-6))
