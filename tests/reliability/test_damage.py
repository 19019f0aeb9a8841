"""Every kind of damage to every kind of file is found, attributed to a tensor if possible, and never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError, DamagedError, StoreError
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.ownership import FencedError
from tools.faults.damage import damage_table


@pytest.mark.parametrize("codec", ["raw", "planes-zstd"])
def test_every_damage_is_found_and_named_and_never_loaded(tmp_path: Path, codec: str) -> None:
    for row in damage_table(tmp_path, seed=3, flips=12, codec=codec):
        assert row.found == row.named == row.cases, row
        assert row.wrong == 0, row


def test_a_cut_file_has_lost_only_what_lay_behind_the_cut(tmp_path: Path) -> None:
    save(str(tmp_path), {name: torch.arange(100.0) for name in "abc"}, step=1)
    (path,) = tmp_path.glob("step-00000001/a-*/*.distcp")
    checkpoint = open_checkpoint(str(tmp_path))
    places = {entry.fqn: next(checkpoint.manifest.chunks_of(entry)).offset for entry in checkpoint.manifest.tensors}
    first, second, third = sorted(places, key=lambda fqn: places[fqn])
    path.write_bytes(path.read_bytes()[: places[third]])
    named = {problem.fqn for problem in verify(f"{tmp_path}@1", read_data=True)}
    assert third in named
    assert not {first, second} & named


def test_a_commit_moved_to_another_step_is_not_that_step(tmp_path: Path) -> None:
    for step in (1, 2):
        save(str(tmp_path), {"w": torch.full((4,), float(step))}, step=step)
    (tmp_path / "step-00000002/COMMIT.json").write_bytes((tmp_path / "step-00000001/COMMIT.json").read_bytes())
    with pytest.raises(DamagedError, match="is the commit of step 1"):
        open_checkpoint(str(tmp_path), step=2)


def test_a_step_whose_commit_is_damaged_can_be_saved_again(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(4)}, step=1)
    (tmp_path / "step-00000001/COMMIT.json").write_text("{")
    save(str(tmp_path), {"w": torch.ones(4)}, step=1)
    assert torch.equal(open_checkpoint(str(tmp_path)).read("w"), torch.ones(4))


def test_an_incremental_save_survives_a_damaged_reference(tmp_path: Path) -> None:
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        saver.save({"w": torch.ones(4000)}, step=1).wait()
        (path,) = tmp_path.glob("step-00000001/a-*/*.distcp")
        path.unlink()
        with pytest.raises(SaveError, match="missing"):
            saver.save({"w": torch.ones(4000)}, step=2).wait()
        saver.save({"w": torch.ones(4000)}, step=3).wait()
    assert torch.equal(open_checkpoint(str(tmp_path), step=3).read("w"), torch.ones(4000))


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b'{"owner": 3}', b"[" * 100_000],
    ids=["gone", "empty", "cut", "list", "number", "nested"],
)
def test_a_claim_that_is_gone_or_damaged_stops_the_job(tmp_path: Path, content: bytes | None) -> None:
    with Saver(str(tmp_path)) as saver:
        saver.save({"w": torch.zeros(4)}, step=1).wait()
        owner = tmp_path / "OWNER.json"
        owner.unlink() if content is None else owner.write_bytes(content)
        with pytest.raises(SaveError, match=FencedError.__name__):
            saver.save({"w": torch.zeros(4)}, step=2).wait()
    assert open_checkpoint(str(tmp_path)).step == 1


def test_an_unlistable_folder_is_an_error_not_an_empty_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("titan_ckpt.store.local.os.scandir", refuse)
    with pytest.raises(StoreError, match="Permission denied"):
        list_checkpoints(str(tmp_path))
    with pytest.raises(StoreError, match="Permission denied"):
        list(FileStore(str(tmp_path)).list())


def test_every_byte_of_a_commit_is_covered_by_its_own_digest(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(4)}, step=1)
    path = tmp_path / "step-00000001/COMMIT.json"
    data = path.read_bytes()
    assert list(json.loads(data))[-1] == "xxh3_128"
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError):
            open_checkpoint(str(tmp_path), step=1)
