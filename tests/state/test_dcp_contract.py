"""What `torch.distributed.checkpoint` documents for storages: identifiers, cached plans, which URLs a storage takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

import titan_ckpt
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.storage import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((4,), value), "n": {"value": value}}


def test_checkpoint_save_and_load_ids_are_those_of_dcp(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path, step=3), StorageReader(tmp_path)
    metadata = dcp.save(_state(1.0), storage_writer=writer)
    assert metadata.storage_meta is not None
    assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id) == (f"{tmp_path}@3", writer.save_id)
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert (found.checkpoint_id, found.save_id, found.load_id) == (f"{tmp_path}@3", writer.save_id, reader.load_id)
    assert (writer.checkpoint_id, reader.checkpoint_id) == (f"{tmp_path}@3", f"{tmp_path}@3")
    first = reader.load_id
    reader.reset(tmp_path)
    assert reader.load_id != first


def test_one_writer_saves_a_step_again_as_another_attempt(tmp_path: Path) -> None:
    writer, attempts = StorageWriter(f"{tmp_path}@1"), []
    for value in (1.0, 2.0):
        dcp.save(_state(value), storage_writer=writer)
        attempts.append(open_checkpoint(tmp_path).manifest.attempt)
        assert writer.save_id == attempts[-1]
    assert attempts[0] != attempts[1]
    assert open_checkpoint(tmp_path).read("w").tolist() == [2.0] * 4


def test_a_cached_plan_saves_to_the_attempt_of_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        monkeypatch.setattr(SavePlanner, name, {})
    for step, value in ((1, 1.0), (1, 2.0), (2, 3.0)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(_state(value), storage_writer=StorageWriter(tmp_path, step=step), planner=planner)
    for step, value in ((1, 2.0), (2, 3.0)):
        for reader in (StorageReader(f"{tmp_path}@{step}"), dcp.FileSystemReader(tmp_path / f"step-{step:08d}")):
            dcp.load(state := _state(0.0), storage_reader=reader)
            assert state["w"].tolist() == [value] * 4
            assert state["n"] == {"value": value}
    files = [file.path for step in (1, 2) for file in open_checkpoint(f"{tmp_path}@{step}").manifest.files]
    assert len({path.partition("/")[0] for path in files}) == 2


def test_a_writer_without_a_step_says_so_on_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="which step"):
        dcp.save(_state(1.0), storage_writer=StorageWriter(tmp_path))


@pytest.mark.parametrize(
    ("url", "can_read", "can_write"),
    [
        ("/runs/a", True, False), (Path("/runs/a@1"), True, True), ("s3://b/run@1", True, True), ("memory://a@1", True, True),
        ("abc://abc.abc@1", False, False), ("", False, False),
    ],
)  # fmt: skip
def test_a_storage_takes_urls_that_it_can_open(url: str, can_read: bool, can_write: bool) -> None:
    assert titan_ckpt.StorageReader.validate_checkpoint_id(url) == can_read
    assert titan_ckpt.StorageWriter.validate_checkpoint_id(url) == can_write
