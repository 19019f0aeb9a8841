"""Retention is a pure function: steps that stay, stay under every policy. What it could not look at is reported."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints
from titan_ckpt.errors import ConfigError, NotFoundError, StoreError
from titan_ckpt.format.commit import Commit
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.saving.saver import Saver, save
from titan_ckpt.store.base import ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import apply_retention
from titan_ckpt.upkeep.retention import RetentionPolicy, parse_age, parse_pins, prune


def info(step: int, state: str = "committed", kind: str = "full") -> CheckpointInfo:
    if state != "committed":
        return CheckpointInfo(step=step, state=CheckpointState(state))
    commit = Commit(
        step=step, attempt="a-20260101T000000Z-00000000", kind=kind, created="2026-01-01T00:00:00Z", size_bytes=1, mesh="",
        manifest_size=1, manifest_digest="", metadata_digest="", version="v",
    )  # fmt: skip
    return CheckpointInfo(step=step, state=CheckpointState.COMMITTED, commit=commit)


def gone(infos: list[CheckpointInfo], ages: dict[int, float] | None = None, **policy: object) -> list[int]:
    return [i.step for i in prune(infos, RetentionPolicy(**policy), ages_s=ages)]  # type: ignore[arg-type]


def test_the_newest_and_every_mth_step_stay() -> None:
    infos = [info(step) for step in range(100, 1001, 100)]
    assert gone(infos, keep_last=2, keep_every=500) == [100, 200, 300, 400, 600, 700, 800]
    assert gone(infos, keep_last=20) == []


def test_an_export_neither_counts_as_kept_nor_goes() -> None:
    infos = [info(100), info(200), info(300, kind="model"), info(400, kind="model")]
    assert gone(infos, keep_last=1) == [100]


def test_a_damaged_checkpoint_neither_counts_as_kept_nor_goes() -> None:
    assert gone([info(100), info(200), info(300, "damaged")], keep_last=1) == [100]


def test_uncommitted_attempts_go_only_on_request_and_when_old() -> None:
    infos, ages = (
        [info(100), info(50, "partial"), info(200, "partial"), info(300, "partial")],
        {50: 2e5, 200: 9e4, 300: 60.0},
    )
    assert gone(infos, ages, keep_last=1) == []
    assert gone(infos, ages, keep_last=1, is_incomplete=True) == [50, 200]
    assert gone(infos, {}, keep_last=1, is_incomplete=True) == []
    assert gone(infos, ages, keep_last=1, is_incomplete=True, pins=frozenset({50})) == [200]


kinds = st.sampled_from([("committed", "full"), ("committed", "model"), ("partial", ""), ("damaged", "")])
runs = st.dictionaries(st.integers(0, 500), kinds, max_size=30).map(
    lambda d: [info(s, a, b) for s, (a, b) in d.items()]
)


@st.composite
def policies(draw: st.DrawFn) -> RetentionPolicy:
    return RetentionPolicy(
        keep_last=draw(st.integers(1, 10)),
        keep_every=draw(st.none() | st.integers(1, 100)),
        pins=draw(st.frozensets(st.integers(0, 500), max_size=5)),
        is_incomplete=draw(st.booleans()),
        older_than_s=draw(st.floats(0, 1e6)),
    )


@given(runs, policies(), st.dictionaries(st.integers(0, 500), st.floats(0, 2e6)))
def test_what_must_stay_stays_under_every_policy(
    infos: list[CheckpointInfo], policy: RetentionPolicy, ages: dict[int, float]
) -> None:
    removed = {i.step for i in prune(infos, policy, ages_s=ages)}
    resumable = sorted(i.step for i in infos if i.is_resumable)
    assert removed.isdisjoint(policy.pins)
    assert removed.isdisjoint(resumable[-policy.keep_last :])
    assert removed.isdisjoint(i.step for i in infos if i.state == "damaged")
    assert removed.isdisjoint(i.step for i in infos if i.commit is not None and i.commit.kind != "full")
    assert all(
        policy.is_incomplete and ages[i.step] > policy.older_than_s
        for i in infos
        if i.state == "partial" and i.step in removed
    )
    stay = len(resumable) - len(removed & set(resumable))
    assert stay >= min(policy.keep_last, len(resumable))


@given(runs, policies())
def test_pruning_twice_removes_nothing_more(infos: list[CheckpointInfo], policy: RetentionPolicy) -> None:
    removed = {i.step for i in prune(infos, policy)}
    assert prune([i for i in infos if i.step not in removed], policy) == []


@given(runs, policies(), st.randoms())
def test_the_order_of_the_list_does_not_matter(
    infos: list[CheckpointInfo], policy: RetentionPolicy, random: object
) -> None:
    shuffled = sorted(infos, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert prune(shuffled, policy) == prune(infos, policy)


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}])
def test_a_policy_that_would_keep_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="keep_"):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]


def test_a_pins_file_with_a_line_that_is_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pins\.txt, line 2: '12oo'"):
        parse_pins("1\n12oo\n", where="pins.txt")
    with pytest.raises(ConfigError, match="not an age"):
        parse_age("3 fortnights")


def test_retention_says_that_a_commit_could_not_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is due as long as a step may be another's base; that the store refused to read it is reported."""

    class Refusing(FileStore):
        def stat(self, path: str) -> ObjectInfo:
            if path == "step-00000001/COMMIT.json":
                raise StoreError(f"{path}: BadDigest")
            return super().stat(path)

    for step in (1, 2):
        save(str(tmp_path), {"w": torch.zeros(4)}, step=step)
    assert apply_retention(Refusing(str(tmp_path)), RetentionPolicy(keep_last=1), now_s=time.time()) == []
    assert f"{tmp_path}@1: step-00000001/COMMIT.json: BadDigest" in caplog.text
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [1, 2]


class Blind(FileStore):
    """A store that does not show `pins.txt` at first."""

    looks = 0

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        if path == "pins.txt":
            self.looks += 1
            if self.looks == 1:
                raise NotFoundError(path)
        return super().read(path, start, length)

    def is_taken(self, path: str) -> bool:
        return self.looks > 1 and super().is_taken(path)


def test_pins_are_read_again_before_anything_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pin of this moment counts, and so does one that a store hid while the deletion was planned."""
    for step in (1, 2, 3):
        save(str(tmp_path), {"w": torch.zeros(4)}, step=step)
    (tmp_path / "pins.txt").write_text("1  # the paper's\n")
    assert apply_retention(Blind(str(tmp_path)), RetentionPolicy(keep_last=1), now_s=time.time()) == []
    assert "pins step 1, which it did not when this deletion was planned; nothing was deleted" in caplog.text
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [1, 2, 3]
    assert apply_retention(FileStore(str(tmp_path)), RetentionPolicy(keep_last=1), now_s=time.time()) == [2]


def test_a_new_job_in_an_old_run_keeps_its_own_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, options = str(tmp_path / "run"), SaveOptions(retention=RetentionPolicy(keep_last=2))
    for steps in ((8, 10, 12), (3, 6, 9, 15, 18)):
        caplog.clear()
        with Saver(url, options) as saver:
            for step in steps:
                saver.save_now({"w": torch.ones(2)}, step=step)
                kept = [info.step for info in list_checkpoints(url)]
                own = [own for own in steps if own <= step]
                assert set(own[-2:]) <= set(kept), (step, kept)
        warned = [record.message for record in caplog.records if "has steps up to 12" in record.message]
        assert len(warned) == (1 if steps[0] == 3 else 0)
    assert kept == [15, 18]
