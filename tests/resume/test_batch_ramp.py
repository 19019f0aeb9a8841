"""`train.batch_ramp`: fewer samples in the first steps, in the same order, exact over a resume and on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training_runs import read_events, read_losses, train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.trainer.config.train_config import TrainOptions

RAMP = "train.batch_ramp=[[2, 1], [3, 3]]"
USUAL = (RAMP, "train.global_batch_size=4", "log.progress=false", "optimizer.schedule=constant")


def test_a_pair_counts_up_to_and_with_its_step() -> None:
    train = TrainOptions(global_batch_size=8, batch_ramp=((2, 1), (3, 4)))
    assert [train.batch_size(step) for step in range(1, 6)] == [1, 1, 4, 8, 8]


def test_a_resume_within_the_ramp_is_exact(cache: str, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(cache, whole, *USUAL, "train.steps=5") == 0
    for steps in (2, 5):
        assert train(cache, halves, *USUAL, f"train.steps={steps}") == 0
    assert read_losses(halves) == read_losses(whole)
    seen = [record["tokens_seen"] for record in read_events(whole)]
    length = seen[0]
    assert seen == [length * samples for samples in (1, 2, 5, 9, 13)]
    assert open_checkpoint(str(halves)).manifest.training["data"]["position"] == 13


@pytest.mark.dist
def test_a_ramp_has_the_same_samples_on_two_ranks(cache: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(cache, one, *USUAL, "train.steps=5") == 0
    assert train(cache, two, *USUAL, "train.steps=5", "mesh.dp_shard=2") == 0
    found, expected = read_losses(two), read_losses(one)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("ramp", ["[[0, 1]]", "[[2, 4]]", "[[2, 2], [2, 3]]", "[[2, 3], [3, 2]]", "[[1, 0]]"])
def test_a_ramp_that_does_not_rise_is_refused(
    cache: str, tmp_path: Path, ramp: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert train(cache, tmp_path, *USUAL, f"train.batch_ramp={ramp}") == 2
    assert "expected pairs [last step, samples] that both rise" in capsys.readouterr().err
