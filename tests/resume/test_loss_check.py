"""`resume.check_losses`: losses after a resume are those recorded for the same steps, or lie near those before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_runs import read_losses, train
from titan_ckpt.trainer.report.loss_check import LEAST, LossCheck, LossJumpError, recorded_losses

USUAL = ("log.progress=false", "optimizer.schedule=constant", "resume.check_losses=3")


def _records(*attempts: tuple[int, dict[int, float]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for start, losses in attempts:
        found.append({"event": "start", "step": start})
        found += [{"event": "step", "step": step, "loss": loss} for step, loss in losses.items()]
    return found


def _check(*attempts: tuple[int, dict[int, float]], is_same_run: bool = True) -> LossCheck:
    return recorded_losses(_records(*attempts), step=10, count=2, tolerance=1e-4, is_same_run=is_same_run)


STEADY = {step: 2.0 + 0.01 * (step % 2) for step in range(1, 11)}


def test_the_last_attempt_at_a_step_is_compared() -> None:
    check = _check((0, STEADY | {11: 9.0, 12: 9.0}), (10, {11: 2.0}), (10, {}))
    assert (check.same, check.steps) == ({11: 2.0}, range(11, 13))
    check.check(11, 2.0001)
    with pytest.raises(
        LossJumpError, match=r"step 11, 1 after the resume: loss 2\.001, but 2 was recorded for this step"
    ):
        check.check(11, 2.001)


def test_steps_that_were_not_recorded_are_near_those_before() -> None:
    check = _check((0, STEADY | {11: 1.0}), is_same_run=False)
    assert not check.same
    for loss in (2.04, 0.5):
        check.check(11, loss)
    with pytest.raises(LossJumpError, match=r"step 12, 2 after .* the last 10 recorded before it have mean 2\.005"):
        check.check(12, 2.06)
    with pytest.raises(LossJumpError, match="loss nan"):
        check.check(12, float("nan"))
    check.check(13, 9.0)  # is past the steps that are checked


def test_too_few_losses_bound_nothing() -> None:
    check = _check((0, {step: STEADY[step] for step in range(1, LEAST)}))
    assert "no losses are compared: of the run 7" in check.describe()
    check.check(11, 100.0)


def _forget(run: Path, step: int) -> None:
    (committed,) = [name for name in run.iterdir() if name.name.endswith(f"{step:08d}") and name.is_dir()]
    shutil.rmtree(committed)


def test_a_crashed_run_goes_on_if_its_losses_repeat(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run reached step 4 and lost its checkpoint there; then a loss is not the recorded one."""
    usual = (*USUAL, "train.steps=4", "save.every=2")
    assert train(cache, tmp_path, *usual) == 0
    losses, metrics = read_losses(tmp_path), tmp_path / "logs" / "metrics.jsonl"
    _forget(tmp_path, 4)
    assert train(cache, tmp_path, *usual) == 0
    assert read_losses(tmp_path) == losses
    assert "the losses of 2 steps are compared" in (tmp_path / "logs" / "rank_00000.log").read_text()
    _forget(tmp_path, 4)
    metrics.write_text(metrics.read_text().replace(f'"loss": {losses[4]}', '"loss": 1.0'))
    capsys.readouterr()
    assert train(cache, tmp_path, *usual) == 3
    assert f"step 4, 2 after the resume: loss {losses[4]:.6g}, but 1 was recorded" in capsys.readouterr().err
    assert not any(name.name.endswith("00000004") for name in tmp_path.iterdir())


def test_another_runs_losses_are_read_beside_its_checkpoint(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(cache, first, *USUAL, f"train.steps={LEAST}") == 0
    more = (*USUAL, f"train.steps={LEAST + 2}", f"resume.from={first}", "save.every=1")
    assert train(cache, second, *more) == 0
    log = (second / "logs" / "rank_00000.log").read_text()
    assert f"the first 3 losses are compared with the last {LEAST} before the checkpoint" in log
    records = first / "logs" / "metrics.jsonl"
    records.write_text("\n".join(line for line in records.read_text().splitlines() if '"step"' not in line))
    shutil.rmtree(second)
    assert train(cache, second, *more) == 0
    assert "resume.check_losses: no losses are compared" in capsys.readouterr().err
