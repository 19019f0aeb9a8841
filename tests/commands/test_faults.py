"""cp and prune with a fault at every call: good data stay good, partial work is not committed, a retry finishes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.saving.saver import Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.store import ERRORS, FaultMode, FaultyStore, StoreFault, no_space


@pytest.fixture
def run(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    with Saver(url) as saver:
        for step in (1, 2, 3):
            saver.save({"w": torch.arange(1000.0) + step}, step=step)
    return url


def number_of_calls(action: Callable[[FaultyStore], object], url: str) -> int:
    store = FaultyStore(FileStore(url))
    action(store)
    return len(store.calls)


@pytest.mark.parametrize("how", [FaultMode.BEFORE, FaultMode.AFTER, FaultMode.TORN])
def test_a_copy_that_fails_anywhere_is_finished_by_the_next(run: str, tmp_path: Path, how: FaultMode) -> None:
    source = open_checkpoint(run)
    calls = number_of_calls(lambda store: copy_checkpoint(source, store), str(tmp_path / "counted"))
    for number in range(1, calls + 1):
        url = str(tmp_path / f"copy-{number}")
        store = FaultyStore(FileStore(url), [StoreFault(number=number, how=how, error=ERRORS[number % len(ERRORS)])])
        with suppress(TitanError, OSError):  # a "not there" answer never reaches a fault placed after the call
            copy_checkpoint(source, store)
        assert store.hit
        for info in list_checkpoints(url):
            if info.state == "committed":
                assert verify(url, read_data=True) == []
        copy_checkpoint(source, FileStore(url))
        assert verify(url, read_data=True) == []


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_prune_that_fails_anywhere_leaves_whole_checkpoints(tmp_path: Path, how: FaultMode) -> None:
    def prune(store: FaultyStore) -> None:
        delete(store, plan_removal(store, RetentionPolicy(keep_last=1), now_s=time.time()))

    def fresh(name: str) -> str:
        url = str(tmp_path / name)
        with Saver(url) as saver:
            for step in (1, 2, 3):
                saver.save({"w": torch.arange(10.0) + step}, step=step)
        return url

    for number in range(1, number_of_calls(prune, fresh("counted")) + 1):
        url = fresh(f"run-{number}")
        store = FaultyStore(FileStore(url), [StoreFault(number=number, how=how, error=no_space)])
        try:
            prune(store)
        except (TitanError, OSError):
            assert store.hit
        else:
            assert store.is_preempted  # a "not there" answer never reaches a fault placed after the call
        committed = [info.step for info in list_checkpoints(url) if info.state == "committed"]
        assert 3 in committed
        for step in committed:
            assert verify(f"{url}@{step}", read_data=True) == []
