"""`titan-ckpt eval`: the numbers of a run's own validation, of sets added later, and of the averages of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_runs import read_events, train
from titan_ckpt.cli.main import main
from titan_ckpt.demo.ports import HOST, free_port
from titan_ckpt.sharding.mesh import AXES
from titan_ckpt.trainer.eval_run import DEGREES
from tools.paths import ROOT

SETS = ("train.steps=2", "validation.fraction=0.02", "validation.every=2", "validation.samples=4", "log.progress=false")


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenised standard library, shared by all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")


def _evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_checkpoint_has_the_numbers_of_its_run(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, added = tmp_path / "run", json.dumps(str(ROOT / "docs" / "design.md"))
    assert train(cache, run, *SETS, "optimizer.ema_decay=0.5") == 0
    (record,) = read_events(run, "validation")
    plain = _evaluated(capsys, str(run))
    assert plain == {
        "step": 2,
        "ema": False,
        "sets": {"held out": {"loss": record["loss"], "tokens": record["tokens"]}},
    }
    more = _evaluated(capsys, f"{run}@2", "--ema", "--set", f'validation.sets=[{{name="page", url={added}}}]')
    assert more["sets"]["held out"]["loss"] > record["loss"]  # the averages lag behind
    assert more["sets"]["page"]["tokens"] > 0
    assert main(["eval", str(run), "--set", "validation.fraction=0.0"]) == 2
    assert "there is nothing to evaluate" in capsys.readouterr().err


def test_no_axis_of_the_run_is_left_in_an_evaluation() -> None:
    assert {axis: DEGREES[axis] for axis in AXES} == dict.fromkeys(AXES, 1) | {"dp_shard": -1}


@pytest.mark.dist
def test_ranks_that_found_different_steps_evaluate_one(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path / "run", *SETS, "model.n_layers=1", "save.every=1") == 0
    first, last = (_evaluated(capsys, f"{tmp_path / 'run'}@{step}") for step in (1, 2))
    assert first["sets"] != last["sets"]
    rendezvous = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    words = [sys.executable, "-m", "titan_ckpt", "eval", "--json"]
    ranks = [
        subprocess.Popen(
            [*words, f"{tmp_path / 'run'}@{2 - rank}"],
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = json.loads(answers[0])["sets"]["held out"]
    assert found == pytest.approx(last["sets"]["held out"], rel=1e-5)


def test_sets_are_added_at_any_time_and_averages_must_be_there(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = json.dumps(str(ROOT / "docs" / "design.md"))
    sets = f'validation.sets=[{{name="page", url={page}}}, {{name="again", url={page}}}]'
    assert train(cache, tmp_path, "train.steps=1", "log.progress=false") == 0
    assert train(cache, tmp_path, "train.steps=2", "validation.every=2", "log.progress=false", sets) == 0
    first, second = read_events(tmp_path, "validation")
    assert (first["set"], second["set"], first["loss"]) == ("page", "again", second["loss"])
    assert main(["eval", str(tmp_path), "--ema"]) == 3
    assert "no averages of the weights" in capsys.readouterr().err
    assert train(cache, tmp_path, 'validation.sets=[{name="a", url="x"}, {name="a", url="y"}]') == 2
    assert "'a': each set needs a name of its own" in capsys.readouterr().err
