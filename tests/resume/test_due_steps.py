"""The list of steps that are due in the second tier: it is on the disk when a COMMIT is, and a person may shorten it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.tiers import KEEP_ONE, Target, committed, fail, save
from titan_ckpt.cli.main import main
from titan_ckpt.errors import DamagedError, StoreError
from titan_ckpt.format.commit import Commit
from titan_ckpt.format.names import UNMIRRORED
from titan_ckpt.saving import commit
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.saving.second_tier import Mirror
from titan_ckpt.upkeep.copy import Copier, cp


@pytest.fixture
def safe(tmp_path: Path) -> Target:
    return Target(str(tmp_path / "safe"))


@pytest.mark.parametrize("kept_by", ["prune", "retention"])
def test_a_job_killed_before_it_copied_leaves_a_list(
    tmp_path: Path, safe: Target, monkeypatch: pytest.MonkeyPatch, kept_by: str
) -> None:
    """Nothing that such a job does can be relied upon: its list is on the disk when its COMMIT is."""
    fast = tmp_path / "fast"
    monkeypatch.setattr(Mirror, "_round", lambda *_: None)
    monkeypatch.setattr(Mirror, "close", lambda _: None)
    with Saver(str(fast), SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
        save(saver, 2)
    monkeypatch.undo()
    assert (fast / UNMIRRORED).read_text().splitlines()[1:] == ["1", "2"]
    if kept_by == "prune":
        assert main(["prune", str(fast), "--keep-last", "1", "--yes"]) == 0
    else:
        with Saver(str(fast), SaveOptions(retention=KEEP_ONE)) as saver:
            save(saver, 3)
    assert committed(fast)[:2] == [1, 2]
    with Saver(str(fast), SaveOptions(mirror=safe)):
        pass
    assert committed(safe)[:2] == [1, 2]
    assert not (fast / UNMIRRORED).exists()


def test_the_list_is_written_before_the_commit(tmp_path: Path, safe: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails takes its line back."""
    fast = tmp_path / "fast"
    lists: list[list[str]] = []

    def fails(*_: object, **__: object) -> None:
        lists.append((fast / UNMIRRORED).read_text().splitlines()[1:])
        raise StoreError("no room")

    with Saver(str(fast), SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
        monkeypatch.setattr(commit, "commit_checkpoint", fails)
        with pytest.raises(SaveError, match="no room"):
            save(saver, 2)
        assert lists == [["2"]]
        assert not (fast / UNMIRRORED).exists()


def test_a_line_of_a_step_that_was_never_committed_goes(tmp_path: Path, safe: Target) -> None:
    fast = tmp_path / "fast"
    with Saver(str(fast), SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
        save(saver, 2)
    (fast / "step-00000002" / "COMMIT.json").unlink()  # as if the job was killed just before it
    (fast / UNMIRRORED).write_text("2\n")
    for path in (tmp_path / "safe" / "step-00000002").rglob("*"):
        path.unlink(missing_ok=True) if path.is_file() else None
    with Saver(str(fast), SaveOptions(mirror=safe)):
        pass
    assert not (fast / UNMIRRORED).exists()


def test_a_step_that_cannot_be_read_holds_up_no_other(tmp_path: Path, safe: Target) -> None:
    fast = tmp_path / "fast"
    saver = Saver(str(fast), SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 1)
    safe.is_down = True
    for step in (2, 3, 4):
        fail(saver, step)
    for path in (fast / "step-00000003").rglob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    safe.is_down = False
    for step in (5, 6):
        save(saver, step)
    assert committed(safe) == [1, 2, 4, 5, 6]
    assert (fast / UNMIRRORED).read_text().splitlines()[1:] == ["3"]
    saver.close()


@pytest.mark.parametrize("how", ["mirror", "cp"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_step_is_copied_with_the_index_it_was_committed_with(tmp_path: Path, how: str, is_there: bool) -> None:
    """Another save of it that died before its COMMIT has left its own, or the index is gone."""
    fast, safe, index = tmp_path / "fast", tmp_path / "safe", "step-00000001/.metadata"
    with Saver(fast) as saver:
        save(saver, 1)
        saver.save({"another": torch.ones(3)}, step=2).wait()
    wanted = (fast / index).read_bytes()
    (fast / index).unlink()
    if is_there:
        shutil.copy(fast / "step-00000002" / ".metadata", fast / index)
    if how == "cp":
        cp(f"{fast}@1", safe)
    else:
        (fast / UNMIRRORED).write_text("1\n")
        Saver(fast, SaveOptions(mirror=safe)).close()
    assert (safe / index).read_bytes() == wanted


def test_a_person_lets_a_step_go_while_the_job_lives(
    tmp_path: Path, safe: Target, caplog: pytest.LogCaptureFixture
) -> None:
    fast = tmp_path / "fast"
    saver = Saver(str(fast), SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 1)
    safe.is_down = True
    for step in (2, 3):
        fail(saver, step)
    text = (fast / UNMIRRORED).read_text()
    (fast / UNMIRRORED).write_text(text.replace("2\n", ""))
    for step in (4, 5):
        fail(saver, step)
    assert (fast / UNMIRRORED).read_text().splitlines()[1:] == ["3", "4", "5"]
    assert committed(fast) == [3, 4, 5]
    assert "steps [2], whose lines were removed" in caplog.text
    safe.is_down = False
    saver.close()
    assert committed(safe) == [1, 3, 4, 5]


def test_a_step_saved_again_during_its_copy_is_not_committed(
    tmp_path: Path, safe: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its COMMIT would name files of the new save, of which the copy has none."""
    fast, index = tmp_path / "fast", Copier._index
    saver = Saver(str(fast))
    save(saver, 1)

    def saves(self: Copier, commit: Commit) -> bytes:
        found = index(self, commit)
        saver.save({"w": torch.ones(5)}, step=1).wait()
        return found

    monkeypatch.setattr(Copier, "_index", saves)
    with pytest.raises(DamagedError, match="saved again while it was copied"):
        cp(f"{fast}@1", safe)
    assert committed(safe) == []
    saver.close()
