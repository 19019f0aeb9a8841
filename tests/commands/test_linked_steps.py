"""A step to which symbolic links lead belongs to others as well: it is never the reason why an own checkpoint goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands.test_deletion import fill, loads, prune
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import apply_retention
from titan_ckpt.upkeep.retention import RetentionPolicy


def behind_a_link(run: Path, other: Path, step: int, what: str) -> None:
    """Move a step's folder, attempt, data file or COMMIT to `other`, and leave a link in its place."""
    folder = run / f"step-{step:08d}"
    known = {"step": folder, "attempt": next(folder.glob("a-*")), "file": next(folder.glob("a-*/*.distcp"))}
    target = known.get(what, folder / what)
    other.mkdir()
    shutil.move(target, other / target.name)
    target.symlink_to(other / target.name)


@pytest.mark.parametrize("what", ["step", "attempt", "file", "COMMIT.json"])
def test_the_newest_own_step_stays_beside_a_newer_link(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, 3)
    behind_a_link(run, tmp_path / "other", 3, what)
    code, text = prune(run, capsys, "--keep-last", "1", "--yes")
    assert code == 0, text
    assert [info.step for info in list_checkpoints(str(run))] == [2, 3]
    shutil.rmtree(tmp_path / "other")
    assert loads(run, 2)


def test_retention_counts_no_linked_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, 3)
    behind_a_link(run, tmp_path / "other", 3, "step")
    assert apply_retention(FileStore(str(run)), RetentionPolicy(keep_last=1), now_s=0.0) == [1]


def test_what_a_linked_step_needs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, incremental=True)
    fill(run, 3, 4)
    behind_a_link(run, tmp_path / "other", 2, "step")
    code, text = prune(run, capsys, "--keep-last", "1", "--yes")
    assert (code, "symbolic link" in text) == (0, True)
    assert [info.step for info in list_checkpoints(str(run))] == [1, 2, 4]
    assert loads(run, 2)
