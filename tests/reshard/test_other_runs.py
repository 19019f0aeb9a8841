"""A checkpoint is never written among those that another training job saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from titan_ckpt import Saver, cp, list_checkpoints, reshard
from titan_ckpt.cli.main import main
from titan_ckpt.errors import AlreadyExistsError


def trained(url: Path, *steps: int) -> str:
    """A run that a job of its own saves."""
    with Saver(str(url)) as saver:
        for step in steps:
            saver.save({"model": {"w": torch.full((8, 4), float(step))}}, step=step)
    return str(url)


def steps_of(url: Path) -> list[int]:
    return [info.step for info in list_checkpoints(str(url))]


WRITERS: dict[str, Callable[[str, str], object]] = {
    "cp": cp,
    "reshard": lambda source, target: reshard(source, target, "dp_shard=2"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_run_of_another_job_is_left_as_it_is(writer: str, tmp_path: Path) -> None:
    one, other = trained(tmp_path / "one", 4), trained(tmp_path / "other", 1, 2)
    before = sorted((tmp_path / "other").rglob("*"))
    with pytest.raises(
        AlreadyExistsError, match=r"other is the run of another training job \(OWNER.json and steps 1 to 2 "
    ):
        WRITERS[writer](one, other)
    assert sorted((tmp_path / "other").rglob("*")) == before


def test_the_command_says_so_before_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = trained(tmp_path / "one", 4), trained(tmp_path / "other", 1)
    assert main(["reshard", one, other, "--mesh", "dp_shard=2", "--dry-run"]) == 3
    assert "is the run of another training job (OWNER.json and step 1 are there)" in capsys.readouterr().err


def test_what_no_job_goes_on_from_may_be_written(tmp_path: Path) -> None:
    """A step from an archive, older than the newest there; and one from the other tier of the run."""
    one = trained(tmp_path / "one", 4)
    cp(one, trained(tmp_path / "newer", 5))
    assert steps_of(tmp_path / "newer") == [4, 5]
    tier = trained(tmp_path / "tier", 3)
    for folder in (one, tier):
        Path(folder, "run-id.txt").write_text("ab12\n")
    cp(one, tier)
    assert steps_of(tmp_path / "tier") == [3, 4]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_run_may_get_more_of_its_own_steps(writer: str, tmp_path: Path) -> None:
    """A copy of a run in which training went on, and one that no job has claimed."""
    one = trained(tmp_path / "one", 4)
    cp(one, tmp_path / "copy")
    trained(tmp_path / "copy", 5)
    trained(tmp_path / "one", 6)
    WRITERS[writer](f"{one}@6", str(tmp_path / "copy"))
    assert steps_of(tmp_path / "copy") == [4, 5, 6]
    cp(one, tmp_path / "archive")
    WRITERS[writer](f"{tmp_path / 'copy'}@5", str(tmp_path / "archive"))
    assert steps_of(tmp_path / "archive") == [5, 6]
