"""Faulty store calls during saves on real ranks: a seeded sample of `make faults`, and the effects of a hang."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.time_limit import HungStoreError, run_until
from tools.faults.cases import KINDS, FaultCase, all_cases, count_calls, run_case
from tools.faults.random_saves import random_runs
from tools.faults.store import FaultMode, FaultyStore, StoreFault
from tools.rank_pool import RankPool

pytestmark = pytest.mark.repeats


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_loses_nothing_and_is_reported_on_every_rank(pool: RankPool, tmp_path: Path, kind: str) -> None:
    cases = all_cases(
        kind, count_calls(pool, tmp_path / "count", kind), (FaultMode.BEFORE, FaultMode.AFTER, FaultMode.TORN)
    )
    hit = 0
    for number, case in enumerate(random.Random(f"7-{kind}").sample(cases, 10)):
        found, seen, _ = run_case(pool, tmp_path / f"case-{number}", case)
        assert found == []
        hit += bool(seen.call)
    assert hit >= 7


HANGS = (
    FaultCase(kind="async", store="first", rank=1, number=1, how=FaultMode.HANG),  # a data file
    FaultCase(kind="sync", store="first", rank=0, number=9, how=FaultMode.HANG),  # COMMIT.json
    FaultCase(kind="mirror", store="second", rank=1, number=2, how=FaultMode.HANG),
)


@pytest.mark.dist
@pytest.mark.parametrize("case", HANGS, ids=str)
def test_a_hang_on_one_rank_fails_all_within_the_timeout(pool: RankPool, tmp_path: Path, case: FaultCase) -> None:
    found, seen, _ = run_case(pool, tmp_path, case)
    assert found == []
    assert seen.failed or seen.mirror_errors, seen.call


def _save_out_of_step(rank: int, url: str) -> str:
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        try:
            saver.save({"w": torch.zeros(3)}, step=1 + rank).wait()
        except SaveError as error:
            return str(error)
    return ""


@pytest.mark.dist
def test_ranks_that_save_different_steps_all_raise(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_save_out_of_step, str(tmp_path)):
        assert "rank 0: 1, rank 1: 2" in message
    assert list_checkpoints(str(tmp_path)) == []


def _hear_at_different_moments(rank: int, url: str) -> tuple[str, int]:
    """Rank 0 gets the error from its handle, rank 1 only at its next save."""
    store = FaultyStore(FileStore(url), [StoreFault(call="write", number=1)] if rank == 1 else [])
    with Saver(store, SaveOptions(timeout_s=60)) as saver:
        handle, text = saver.save({"w": torch.ones(9), "v": torch.ones(9)}, step=1), ""
        if rank == 0:
            with pytest.raises(SaveError):
                handle.wait()
        try:
            saver.save({"w": torch.ones(9), "v": torch.ones(9)}, step=2)
        except (SaveError, OSError) as error:
            text = str(error)
        report = saver.save({"w": torch.ones(9), "v": torch.ones(9)}, step=3).wait()
    return text, report.step


@pytest.mark.dist
def test_ranks_that_learn_of_a_failure_late_stay_together(pool: RankPool, tmp_path: Path) -> None:
    for text, step in pool.run(_hear_at_different_moments, str(tmp_path)):
        assert "No space left" in text
        assert step == 3
    assert [info.step for info in list_checkpoints(str(tmp_path)) if info.state == "committed"] == [3]


EXIT = """
import sys
import torch
from tools.faults.store import FaultMode, StoreFault, FaultyStore
from titan_ckpt.errors import StoreError
from titan_ckpt import SaveOptions, Saver
from titan_ckpt.store.local import FileStore
store = FaultyStore(FileStore(sys.argv[1]), [StoreFault(call="write", number=2, how=FaultMode.HANG)])
with Saver(store, SaveOptions(timeout_s=0.5)) as saver:
    try:
        saver.save({"w": torch.zeros(3)}, step=1).wait()
    except StoreError as error:
        print(error)
"""


def test_a_call_that_never_returns_lets_the_process_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True, timeout=240, check=True
    )
    assert "uploading step 1: given up after 0.4 s in: write" in done.stdout


def test_work_that_was_given_up_can_do_nothing_when_it_wakes(tmp_path: Path) -> None:
    store = FaultyStore(FileStore(str(tmp_path)), [StoreFault(call="write", number=1, how=FaultMode.HANG)])
    ended: list[BaseException] = []
    over = threading.Event()

    def work(guarded: Any) -> None:
        try:
            guarded.write("first", [b"1"])
            guarded.write("second", [b"2"])
        except BaseException as error:
            ended.append(error)
            raise
        finally:
            over.set()

    with pytest.raises(HungStoreError, match=r"in: write .*first"):
        run_until(0.05, work, store, what="a test")
    store.released.set()
    assert over.wait(60)
    assert isinstance(ended[0], HungStoreError)
    assert [entry.path for entry in store.inner.list()] == ["first"]


def test_a_mirror_copies_the_commit_before_a_failed_save(tmp_path: Path) -> None:
    store = FaultyStore(FileStore(str(tmp_path / "fast")))
    saver = Saver(store, SaveOptions(mirror=str(tmp_path / "safe")))
    saver.save({"w": torch.zeros(3)}, step=1).wait()
    store.arm([StoreFault(call="write", number=1)])
    saver.save({"w": torch.zeros(3)}, step=2)
    with pytest.raises(OSError, match="No space"):
        saver.close()
    assert open_checkpoint(str(tmp_path / "safe")).step == 1


@pytest.mark.repeats
def test_saves_over_a_store_that_fails_at_random_lose_nothing(tmp_path: Path) -> None:
    for outcome in random_runs(tmp_path, 300, seed=5):
        assert outcome.wrong == []
    assert outcome.saves == 300
    assert outcome.committed > 120
    assert min(outcome.injected[kind] for kind in ("error", "timeout", "false 404", "short read")) > 40
    assert outcome.deleted > 10
