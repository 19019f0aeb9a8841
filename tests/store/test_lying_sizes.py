"""A store that states a wrong size: an error, never damage, so that no older checkpoint is opened because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError, DamagedError, StoreError
from titan_ckpt.saving.saver import save
from titan_ckpt.store.base import ObjectInfo
from titan_ckpt.store.local import FileStore

CHANGES: dict[str, Callable[[int], int]] = {
    "empty": lambda _: 0,
    "shorter": lambda size: size - 1,
    "longer": lambda size: size + 1,
    "far too long": lambda size: size + (2 << 30),
}


class Liar(FileStore):
    """States a wrong size of one file of the newest step, each time it is asked."""

    def __init__(self, url: str, name: str, change: Callable[[int], int]) -> None:
        super().__init__(url)
        self._name, self._change = name, change

    def _told(self, entry: ObjectInfo) -> ObjectInfo:
        is_it = entry.path.startswith("step-00000002/") and entry.path.endswith(self._name)
        return replace(entry, size_bytes=self._change(entry.size_bytes)) if is_it else entry

    def stat(self, path: str) -> ObjectInfo:
        return self._told(super().stat(path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return map(self._told, super().list(prefix))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["COMMIT.json", "manifest.json", "__0_0.distcp"])
def test_a_wrong_size_never_opens_an_older_step(tmp_path: Path, name: str, change: str) -> None:
    for step in (1, 2):
        save(str(tmp_path), {"w": torch.full((300,), float(step))}, step=step)
    store = Liar(str(tmp_path), name, CHANGES[change])
    with pytest.raises(StoreError) as raised:
        open_checkpoint(str(tmp_path), store=store)
    assert name in str(raised.value)
    assert not isinstance(raised.value, CheckpointError)
    states = {info.step: info.state for info in list_checkpoints(store)}
    assert states == {1: "committed", 2: "unreadable" if name == "COMMIT.json" else "committed"}


def test_a_file_that_is_shorter_is_damaged(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.ones(300)}, step=1)
    (file,) = tmp_path.rglob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"__0_0.distcp: expected \d+ bytes"):
        open_checkpoint(f"{tmp_path}@1")


def test_a_commit_that_is_too_large_is_damaged(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.ones(3)}, step=1)
    commit = tmp_path / "step-00000001" / "COMMIT.json"
    commit.write_bytes(commit.read_bytes() + b" " * (1 << 20))
    with pytest.raises(DamagedError, match="too many for a commit"):
        open_checkpoint(f"{tmp_path}@1")
