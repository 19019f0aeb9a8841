"""The second tier after failures: what was not copied is copied later, and the first tier keeps it until then."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.support.tiers import KEEP_ONE, Target, committed, fail, save
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import StoreError, TransientStoreError
from titan_ckpt.format.names import UNMIRRORED
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.saving.second_tier import open_nearest
from titan_ckpt.store.local import FileStore
from tools.faults.tiers import Tier, tier_runs


@pytest.fixture
def safe(tmp_path: Path) -> Target:
    return Target(str(tmp_path / "safe"))


def test_steps_that_failed_are_copied_with_the_next(tmp_path: Path, safe: Target) -> None:
    fast = tmp_path / "fast"
    with Saver(str(fast), SaveOptions(mirror=safe, retention=KEEP_ONE, incremental=True)) as saver:
        save(saver, 1)
        safe.is_down = True
        for step in (2, 3):
            fail(saver, step)
        assert committed(fast)[-2:] == [2, 3]
        safe.is_down = False
        save(saver, 4)
    assert committed(safe) == [1, 2, 3, 4]
    assert not (fast / UNMIRRORED).exists()
    assert float(open_checkpoint(f"{safe.url}@2").read("w")[0]) == 2


def test_steps_that_failed_are_copied_when_the_saver_closes(tmp_path: Path, safe: Target) -> None:
    with Saver(str(tmp_path / "fast"), SaveOptions(mirror=safe)) as saver:
        safe.is_down = True
        fail(saver, 1)
        safe.is_down = False
    assert committed(safe) == [1]


def test_the_next_job_copies_what_the_last_one_could_not(
    tmp_path: Path, safe: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = tmp_path / "fast"
    saver = Saver(str(fast), SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 1)
    safe.is_down = True
    fail(saver, 2)
    saver.close()
    assert (fast / UNMIRRORED).read_text().splitlines()[1:] == ["2"]
    with Saver(str(fast)) as other:  # a job without a mirror does not know of it, but must not delete it either
        save(other, 3)
    with Saver(str(fast), SaveOptions(retention=KEEP_ONE)) as other:
        save(other, 4)
    assert 2 in committed(fast)
    assert main(["prune", str(fast), "--keep-last", "1", "--yes"]) == 0
    assert "@2: kept: not yet copied to the second tier" in capsys.readouterr().out
    safe.is_down = False
    with Saver(str(fast), SaveOptions(mirror=safe)):
        pass
    assert set(committed(safe)) >= {1, 2, 4}
    assert not (fast / UNMIRRORED).exists()
    main(["prune", str(fast), "--keep-last", "1", "--yes"])
    assert committed(fast) == [4]


def test_steps_of_a_job_that_died_before_it_copied_them(tmp_path: Path, safe: Target) -> None:
    with Saver(str(tmp_path / "fast"), SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
    with Saver(str(tmp_path / "fast")) as saver:
        save(saver, 2)
        save(saver, 3)
    with Saver(str(tmp_path / "fast"), SaveOptions(mirror=safe)):
        pass
    assert committed(safe) == [1, 2, 3]


def test_an_empty_tier_gets_the_newest_step_not_the_history(tmp_path: Path, safe: Target) -> None:
    with Saver(str(tmp_path / "fast")) as saver:
        for step in (1, 2, 3):
            save(saver, step)
    with Saver(str(tmp_path / "fast"), SaveOptions(mirror=safe)):
        pass
    assert committed(safe) == [3]


def test_nothing_goes_while_it_is_unknown_what_the_tier_lacks(
    tmp_path: Path, safe: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(*_: object) -> list[str]:
        raise TransientStoreError("no answer")

    with Saver(str(tmp_path / "fast")) as saver:
        save(saver, 1)
    monkeypatch.setattr(safe, "folders", down)
    saver = Saver(str(tmp_path / "fast"), SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 2)
    save(saver, 3)
    with pytest.raises(SaveError, match="no answer"):
        saver.close()
    assert committed(tmp_path / "fast") == [1, 2, 3]
    assert "lacks is unknown" in caplog.text


def test_a_due_step_that_was_deleted_is_said_and_passed_over(
    tmp_path: Path, safe: Target, caplog: pytest.LogCaptureFixture
) -> None:
    fast = tmp_path / "fast"
    with caplog.at_level(logging.WARNING), Saver(str(fast), SaveOptions(mirror=safe)) as saver:
        safe.is_down = True
        fail(saver, 1)
        (fast / "step-00000001" / "COMMIT.json").unlink()
        safe.is_down = False
        save(saver, 2)
    assert committed(safe) == [2]
    assert "@1 is not there, so it cannot be copied" in caplog.text


@pytest.fixture
def fast(tmp_path: Path) -> Tier:
    return Tier(str(tmp_path / "fast"))


def test_what_a_dead_job_left_is_written_down_until_it_is_copied(fast: Tier, safe: Target) -> None:
    """Steps 2 and 3 are due because they are newer than the newest copy; then step 4 is copied and they are not."""
    with Saver(fast, SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
    with Saver(fast) as saver:
        save(saver, 2)
        save(saver, 3)
    fast.hidden = ("step-00000002/COMMIT.json", "step-00000003/COMMIT.json")
    with Saver(fast, SaveOptions(mirror=safe)):
        pass
    fast.hidden = ()
    safe.is_down = True
    saver = Saver(fast, SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 4)
    with pytest.raises(SaveError):
        saver.close()
    safe.is_down = False
    marked = [int(line) for line in Path(fast.url, UNMIRRORED).read_text().splitlines()[1:]]
    assert marked == [2, 3, 4]
    with Saver(fast, SaveOptions(mirror=safe, retention=KEEP_ONE)) as saver:
        save(saver, 5)
    assert committed(safe.url) == [1, 2, 3, 4, 5]


def test_a_due_step_that_is_not_shown_once_is_still_due(fast: Tier, safe: Target) -> None:
    saver = Saver(fast, SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 1)
    safe.is_down = True
    fail(saver, 2)
    safe.is_down, fast.hidden = False, ("step-00000002/COMMIT.json",)
    save(saver, 3)
    fast.hidden = ()
    save(saver, 4)
    saver.close()
    assert committed(safe.url) == [1, 2, 3, 4]
    assert not Path(fast.url, UNMIRRORED).exists()


def test_a_list_that_is_not_shown_once_loses_no_line(fast: Tier, safe: Target) -> None:
    saver = Saver(fast, SaveOptions(mirror=safe))
    save(saver, 1)
    safe.is_down = True
    fail(saver, 2)
    fast.hidden = (UNMIRRORED,)
    fail(saver, 3)
    fast.hidden = ()
    saver.close()
    assert Path(fast.url, UNMIRRORED).read_text().splitlines()[1:] == ["2", "3"]


def test_nothing_is_copied_past_a_step_that_is_not_written_down(fast: Tier, safe: Target) -> None:
    """Else the next job would take step 2 for one that the second tier was not to get."""
    saver = Saver(fast, SaveOptions(mirror=safe, retention=KEEP_ONE))
    save(saver, 1)
    safe.is_down, fast.unwritable = True, (UNMIRRORED,)
    fail(saver, 2)
    safe.is_down = False
    save(saver, 3)
    with pytest.raises(SaveError, match=r"unmirrored\.txt was not written for \[2\]"):
        saver.check()
    saver.close()
    assert committed(safe.url) == [1]
    fast.unwritable = ()
    with Saver(fast, SaveOptions(mirror=safe, retention=KEEP_ONE)) as saver:
        save(saver, 4)
    assert committed(safe.url) == [1, 2, 3, 4]


def test_a_step_saved_again_is_copied_by_the_next_job(fast: Tier, safe: Target) -> None:
    saver = Saver(fast, SaveOptions(mirror=safe))
    save(saver, 1)
    save(saver, 2)
    safe.is_down, fast.unwritable = True, (UNMIRRORED,)
    saver.save({"w": torch.full((5,), 7.0), "frozen": torch.arange(90.0)}, step=1).wait()
    with pytest.raises(SaveError):
        saver.close()
    safe.is_down, fast.unwritable = False, ()
    with Saver(fast, SaveOptions(mirror=safe)):
        pass
    assert float(open_checkpoint(f"{safe.url}@1").read("w")[0]) == 7.0


@pytest.mark.repeats
def test_jobs_whose_copies_fail_at_any_step_lose_none(tmp_path: Path) -> None:
    """A sample of `python -m scripts.faults --tiers 1000`."""
    for outcome in tier_runs(tmp_path, 12, seed=0):
        assert outcome.wrong == []
    assert outcome.saves == 120
    assert outcome.deleted > 20
    assert outcome.failed_copies > 10


def test_a_tier_that_fails_is_not_passed_over_for_an_older_step(
    tmp_path: Path, safe: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = str(tmp_path / "fast")
    with Saver(fast, SaveOptions(mirror=safe)) as saver:
        save(saver, 1)
    with Saver(fast) as saver:
        save(saver, 2)
    answer = FileStore.folders

    def folders(self: FileStore, prefix: str = "") -> list[str]:
        if self.url == fast:
            raise TransientStoreError("no answer")
        return answer(self, prefix)

    assert open_nearest([fast, safe.url]).step == 2
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "folders", folders)
        with pytest.raises(StoreError, match="no answer; it may hold the newest"):
            open_nearest([fast, safe.url])
    with pytest.raises(StoreError, match="another rank could not read it"):
        open_nearest([fast, safe.url], all_steps=lambda step: [step, -2])
