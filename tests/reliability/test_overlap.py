"""A save and a deletion that overlap, at every moment: every committed step is whole afterwards, for us and for plain DCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.errors import TitanError
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy

MOST_CALLS = 400
OLD = RetentionPolicy(keep_last=1)
ALL = RetentionPolicy(keep_last=9, is_incomplete=True, older_than_s=0)


class Interrupted(FileStore):
    """Runs `other` once, before its call number `at`."""

    at, calls, other = 0, 0, staticmethod(lambda: None)

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.other()

    def stat(self, path: str) -> ObjectInfo:
        self.count()
        return super().stat(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.count()
        return super().list(prefix)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        self.count()
        return super().write(path, parts)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        self.count()
        return super().write_if(path, data, version=version)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.count()
            super().delete([path])


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((8,), value), "frozen": torch.arange(4.0)}


def remove(store: FileStore, policy: RetentionPolicy) -> None:
    delete(store, plan_removal(store, policy, now_s=time.time() + 2))


def check(run: Path) -> None:
    for info in list_checkpoints(str(run)):
        assert info.state in (CheckpointState.COMMITTED, CheckpointState.PARTIAL), info
        if info.state == CheckpointState.COMMITTED:
            assert verify(f"{run}@{info.step}", read_data=True) == []
            dcp.load(state(0), checkpoint_id=str(run / f"step-{info.step:08d}"))


@pytest.mark.parametrize("case", ["save in prune", "prune in save", "again in prune", "incomplete in save"])
def test_a_save_and_a_deletion_leave_whole_steps(tmp_path: Path, case: str) -> None:
    """Also where one of the two raised: what is committed is whole all the same, unless living attempts were deleted."""
    ended = {"fine": 0, "said": 0}
    for at in range(1, MOST_CALLS):
        run = tmp_path / str(at)
        calls, errors = overlap(run, case, at)
        if not (errors and case.startswith("incomplete")):  # an age that a living attempt has: the save raises
            check(run)
        ended["said" if errors else "fine"] += 1
        if calls < at:
            break
    assert calls < at
    assert ended["fine"] > 3


def overlap(run: Path, case: str, at: int) -> tuple[int, list[TitanError]]:
    """Run one of the two until its call `at`, then the other, then the rest; the calls that the first made, and errors."""
    store = Interrupted(str(run))
    errors: list[TitanError] = []

    def tried(action: Callable[[], object]) -> None:
        try:
            action()
        except TitanError as error:
            errors.append(error)

    with Saver(store, SaveOptions(incremental=True, is_exclusive=False)) as saver:
        for step in (1, 2):
            saver.save_now(state(step), step=step)
        save(str(run), state(9), step=100)
        saves: Callable[[], object] = lambda: saver.save_now(state(3), step=3)
        if case.startswith("again"):
            saves = lambda: save(str(run), state(22), step=2)
        policy = ALL if case.startswith("incomplete") else OLD
        is_first = case.endswith("in save")
        removal: Callable[[], object] = lambda: remove(store if not is_first else FileStore(str(run)), policy)
        first, other = (saves, removal) if is_first else (removal, saves)
        store.calls, store.at, store.other = 0, at, lambda: tried(other)
        tried(first)
        calls, store.at = store.calls, 0
    return calls, errors
