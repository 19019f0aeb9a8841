"""`convert to-hf --ema`: the averages of the weights as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.training_runs import train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main

ALWAYS = ("train.steps=2", "log.progress=false", "optimizer.lr=1e-2")


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenised standard library, shared by all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")


@pytest.mark.parametrize("more", [(), ("model.tied_embeddings=true", "save.codec=planes-zstd")])
def test_the_exported_weights_are_the_averages(cache: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    assert train(cache, run, *ALWAYS, "optimizer.ema_decay=0.5", *more) == 0
    assert main(["convert", "to-hf", str(run), str(tmp_path / "plain")]) == 0
    assert main(["convert", "to-hf", str(run), str(tmp_path / "averaged"), "--ema"]) == 0
    saved, plain, averaged = (open_checkpoint(str(tmp_path / name)) for name in ("run", "plain", "averaged"))
    names = [tensor.fqn for tensor in averaged.manifest.tensors]
    assert len(names) >= 20
    for name in names:
        average = saved.read(f"optimizer.state.{name.removeprefix('model.')}.ema")
        assert torch.equal(averaged.read(name), average)
        assert torch.equal(plain.read(name), saved.read(name))
        assert not torch.equal(average, saved.read(name))


def test_a_checkpoint_without_averages_is_refused(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path / "run", "train.steps=1", "log.progress=false") == 0
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--ema"]) == 3
    assert "run@1 has no averages of the weights: its run had optimizer.ema_decay = 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
