"""A run that reads weights it does not train reads the same ones at every start, or says that they are others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.training_runs import read_losses, train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError, LoadContractError
from titan_ckpt.loading.values_digest import Part
from titan_ckpt.sharding.placement import Box
from titan_ckpt.trainer import FrozenModel
from titan_ckpt.trainer import run as run_here
from titan_ckpt.trainer.job.frozen_weights import _joined
from tools.paths import DEBUG_CONFIG

LORA = ("lora.rank=2", "optimizer.lr=0.02")
ON_BASE = ("resume.from=base", *LORA)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base@1`; `run`, whose adapters were trained on `base` when that was its newest step; `later`, `base` with a step 2."""
    work, cache = tmp_path_factory.mktemp("made") / "work", str(tmp_path_factory.getbasetemp() / "tokens")
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        assert train(cache, "base", "train.steps=1") == 0
        assert train(cache, "run", *ON_BASE, "train.steps=1") == 0
        shutil.copytree("base", "later")
        assert train(cache, "later", "train.steps=2") == 0
    return Path(shutil.copytree(work, work.parent / "kept"))


@pytest.fixture
def work(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which `made` was made, as it was then; the test runs in it."""
    folder = made.parent / "work"
    shutil.rmtree(folder)
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def go(work: Path, cache: str) -> Callable[..., int]:
    """Train into a run in this folder; returns the exit code."""
    return lambda name, *sets: train(cache, work / name, *sets)


def recorded(run: str = "run") -> Any:
    return open_checkpoint(run).manifest.training.get("base")


def put_in_place_of(old: str, new: str) -> None:
    shutil.rmtree(old)
    shutil.copytree(new, old)


def test_a_base_that_was_replaced_in_place_is_refused(
    work: Path, go: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    digest = recorded()["digest"]
    assert recorded() == {"url": str(work / "base"), "step": 1, "digest": digest}
    assert go("other", "train.steps=1", "train.seed=5") == 0
    put_in_place_of("base", "other")
    capsys.readouterr()
    assert go("run", *ON_BASE, "train.steps=2") == 2
    error = capsys.readouterr().err
    assert (
        f"its adapters were trained on {work}/base@1 (values {digest}), but resume.from gives {work}/base@1 (" in error
    )
    assert "Set resume.from to the weights that they were trained on" in error
    assert main(["eval", "run", "--set", "validation.fraction=0.1"]) == 2
    assert digest in capsys.readouterr().err
    assert open_checkpoint("run").step == 1


def test_a_base_run_that_trained_on_is_read_at_its_step(go: Callable[..., int]) -> None:
    assert go("whole", *ON_BASE, "train.steps=2") == 0
    put_in_place_of("base", "later")
    assert go("run", *ON_BASE, "train.steps=2") == 0
    assert read_losses(Path("run")) == read_losses(Path("whole"))
    assert recorded()["step"] == 1
    assert go("new", *ON_BASE, "train.steps=1") == 0
    assert recorded("new")["step"] == 2


def test_a_base_whose_step_is_gone_is_named(go: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    put_in_place_of("base", "later")
    shutil.rmtree("base/step-00000001")
    assert go("run", *ON_BASE, "train.steps=2") == 2
    error = capsys.readouterr().err
    assert "base@1 (values" in error
    assert "is gone" in error
    assert go("run", *ON_BASE, "resume.from=base@2", "train.steps=2") == 2
    assert "has other values" in capsys.readouterr().err


def test_the_same_values_elsewhere_are_the_same_base(
    work: Path, go: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    before = recorded()
    assert main(["convert", "to-hf", "base", "hf"]) == 0
    assert main(["reshard", "base", "resharded", "--mesh", "dp_shard=2,tp=2"]) == 0
    for steps, name in enumerate(("hf", "resharded"), 2):
        caplog.clear()
        assert go("run", *ON_BASE, f"resume.from={name}", f"train.steps={steps}") == 0
        assert recorded() == before | {"url": str(work / name), "step": int(name != "hf")}
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert all("base" not in text for text in warnings), warnings


def test_adapters_of_an_older_release_go_on_with_a_word(
    go: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("titan_ckpt.trainer.job.setup.frozen_record", lambda *_: {})
        assert go("old", *ON_BASE, "train.steps=1") == 0
    assert recorded("old") is None
    assert go("old", *ON_BASE, "train.steps=2") == 0
    said = Path("old/logs/rank_00000.log").read_text()
    assert "old@1 does not record the values of its adapters' base, which was base; " in said
    assert recorded("old") == recorded("run")


@pytest.mark.usefixtures("work")
def test_an_adapter_is_merged_into_its_own_base_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def merge(base: str, name: str) -> int:
        return main(["convert", "to-hf", base, name, "--merge-lora", "adapter"])

    assert main(["train", "run", "--export-adapter", "adapter"]) == 0
    assert merge("later@2", "wrong") == 3
    error = capsys.readouterr().err
    assert recorded()["digest"] in error
    assert "Merge it into the weights that it was trained on" in error
    assert not Path("wrong").exists()
    assert main(["convert", "to-hf", "base", "hf"]) == 0
    for base, name in (("base", "merged"), ("hf", "merged-hf"), ("later@1", "merged-later")):
        assert merge(base, name) == 0
    found = {Path(name, "model.safetensors").read_bytes() for name in ("merged", "merged-hf", "merged-later")}
    assert len(found) == 1


def test_a_base_with_more_layers_than_the_model_is_refused(
    go: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign checkpoint records no shape; what the model lacks would be left out in silence."""
    assert go("deep", "train.steps=1", "model.n_layers=3") == 0
    dcp.save({"model": open_checkpoint("deep").read_all("model")}, checkpoint_id="foreign")
    assert go("new", "resume.from=foreign", *LORA, "train.steps=1") == 3
    assert "has tensors that this model lacks: model.model.layers.2." in capsys.readouterr().err


@pytest.mark.usefixtures("work")
def test_a_frozen_model_is_the_same_after_a_resume(cache: str) -> None:
    def resume(steps: int, url: str) -> Any:
        sets = [
            f"data.cache={cache}",
            "save.url=dpo",
            f"train.steps={steps}",
            "train.device=cpu",
            "log.tensorboard=false",
        ]
        frozen = {"reference": lambda config: FrozenModel(spec=config.spec, start=url)}
        run_here(DEBUG_CONFIG, sets=sets, frozen=frozen, prepare=lambda batch, frozen: batch if frozen else {})
        return open_checkpoint("dpo").manifest.training["frozen"]["reference"]

    first = resume(1, "base")
    shutil.copytree("later/step-00000002", "base/step-00000002")
    assert resume(2, "base") == first  # not its newest step
    said = Path("dpo/logs/rank_00000.log")
    assert "the frozen model" not in said.read_text()
    resume(3, "later@2")
    assert "changed since the checkpoint: the frozen model 'reference': " in said.read_text()
    assert train(cache, "other", "train.steps=2", "train.seed=5") == 0
    put_in_place_of("later", "other")
    with pytest.raises(
        ConfigError, match=r"frozen model 'reference' was .*/later@2 .* its files have been replaced since"
    ):
        resume(4, "later")


def test_ranks_that_read_other_values_are_noticed(made: Path) -> None:
    checkpoint = open_checkpoint(str(made / "base"))
    part = Part("norm", (4,), Box((0,), (4,)))
    half = replace(part, box=Box((0,), (2,)))
    assert _joined([{part: 1}, {part: 1}, {half: 3}], checkpoint) == {part: 1, half: 3}
    with pytest.raises(LoadContractError, match="norm: rank 2 has read other values"):
        _joined([{part: 1}, {half: 3}, {part: 2}], checkpoint)
