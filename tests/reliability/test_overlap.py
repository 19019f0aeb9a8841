"""A sample of `tools.hostile.overlap`: saves and deletions that overlap leave every committed step whole."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from titan_ckpt.check.verify import verify
from titan_ckpt.errors import StoreError
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.store.local import FileStore
from tools.hostile.overlap import CASES, OLD, OLD_AND_ALL, crossings, overlap, remove, state

EVERY = 6  # of the moments of a case; `python -m scripts.hostile overlap` tries each


@pytest.mark.parametrize("case", CASES)
def test_a_save_and_a_deletion_leave_whole_steps(tmp_path: Path, case: str) -> None:
    for at in range(1 + sorted(CASES).index(case) % EVERY, 400, EVERY):
        calls, wrong = overlap(tmp_path / str(at), case, at)
        assert wrong == []
        if calls < at:
            break
    assert EVERY < calls < at


def test_a_deletion_that_goes_on_after_the_save_has_ended(tmp_path: Path) -> None:
    rng = random.Random(3)
    for number, (case, then) in enumerate(crossings(rng, 24)):
        assert overlap(tmp_path / str(number), case, rng.randint(8, 28), then)[1] == []


def test_a_mark_of_a_deletion_stops_a_save(tmp_path: Path) -> None:
    """In the folder of a file that it refers to; the next save writes everything, and after a day the mark counts no more."""
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        saver.save_now(state(1), step=1)
        mark = next((tmp_path / "step-00000001").glob("a-*")) / "deleting" / "0123456789abcdef.txt"
        mark.parent.mkdir()
        mark.write_bytes(b"")
        with pytest.raises(SaveError, match="a deletion is under way"):
            saver.save_now(state(2), step=2)
        assert saver.save_now(state(3), step=3).written_bytes > saver.save_now(state(4), step=4).written_bytes
    remove(FileStore(str(tmp_path)), OLD_AND_ALL)
    assert not mark.exists()


def test_a_job_killed_while_it_deleted_stops_no_save_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = SaveOptions(incremental=True)
    with Saver(str(tmp_path), options) as saver:
        saver.save_now(state(1), step=1)
    mark = next((tmp_path / "step-00000001").glob("a-*")) / "deleting" / "0123456789abcdef.txt"
    mark.parent.mkdir()
    mark.write_bytes(b"")
    written = []
    for step in (2, 3):
        with Saver(str(tmp_path), options) as saver:
            written.append(saver.save_now(state(step), step=step).written_bytes)
    assert written[0] > written[1]
    assert f"{mark.parent.parent}: a deletion began here and has not ended" in caplog.text
    remove(FileStore(str(tmp_path)), OLD_AND_ALL)
    assert not mark.exists()
    assert verify(f"{tmp_path}@3", read_data=True) == []


def test_a_mark_counts_no_more_after_a_day(tmp_path: Path) -> None:
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        saver.save_now(state(1), step=1)
        mark = next((tmp_path / "step-00000001").glob("a-*")) / "deleting" / "0123456789abcdef.txt"
        mark.parent.mkdir()
        mark.write_bytes(b"")
        os.utime(mark, (time.time() - 2 * 86400,) * 2)
        saver.save_now(state(2), step=2)
    assert verify(f"{tmp_path}@2", read_data=True) == []


def test_no_mark_is_left_by_a_deletion_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(str(tmp_path), state(step), step=step)
    store, delete_all = FileStore(str(tmp_path)), FileStore.delete

    def fails(self: FileStore, paths: Iterable[str]) -> None:
        held = list(paths)
        if any(path.endswith(".distcp") for path in held):
            raise StoreError("no")
        delete_all(self, held)

    monkeypatch.setattr(FileStore, "delete", fails)
    with pytest.raises(StoreError, match="no"):
        remove(store, OLD)
    assert list(tmp_path.rglob("deleting")) == []
