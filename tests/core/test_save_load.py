"""Save and load in one process: round trips are bit-exact, damage is reported, mismatches are rejected."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import (
    ConditionFailedError,
    DamagedError,
    LoadContractError,
    NotCommittedError,
    StoreError,
    UsageError,
)
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.loading.load import LoadPolicy, load, open_checkpoint
from titan_ckpt.saving.saver import SaveError, Saver, save
from titan_ckpt.sharding.placement import Box
from titan_ckpt.state.state_dict import TORCH_DTYPE
from titan_ckpt.store.local import FileStore


def _random(dtype: str, *sizes: int) -> torch.Tensor:
    count = int(torch.Size(sizes).numel()) * ELEMENT_SIZE[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(TORCH_DTYPE[dtype]).view(sizes)


def _every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"{dtype}.{n}": _random(dtype, *s) for dtype in ELEMENT_SIZE for n, s in enumerate([(), (0, 2), (3, 50)])}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """As `torch.zeros_like`, which some dtypes lack."""
    raw = torch.zeros(tensor.numel() * tensor.dtype.itemsize, dtype=torch.uint8)
    return raw.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("how", ["async", "sync", "dcp"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, how: str) -> None:
    state, url = _every_dtype(), str(tmp_path)
    if how == "async":
        with Saver(url) as saver:
            saver.save({"m": state}, step=1)
    elif how == "sync":
        save(url, {"m": state}, step=1)
    else:
        dcp.save({"m": state}, storage_writer=StorageWriter(f"{url}@1"))
    ours = {"m": {name: _zeros(t) for name, t in state.items()}}
    report = load(url, ours)
    assert report.unverified_bytes == 0
    assert report.fetched_bytes == report.needed_bytes
    theirs = {"m": {name: _zeros(t) for name, t in state.items()}}
    dcp.load(theirs, checkpoint_id=tmp_path / "step-00000001")
    through = {"m": {name: _zeros(t) for name, t in state.items()}}
    dcp.load(through, storage_reader=StorageReader(url))
    for name, tensor in state.items():
        assert _bytes(ours["m"][name]) == _bytes(theirs["m"][name]) == _bytes(through["m"][name]) == _bytes(tensor)


def test_changing_every_tensor_after_save_changes_nothing_stored(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20), "v": torch.ones(3)}
    with Saver(str(tmp_path)) as saver:
        saver.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(float("nan"))
    loaded = {"w": torch.zeros(1 << 20), "v": torch.zeros(3)}
    load(str(tmp_path), loaded)
    assert all(bool((tensor == 1).all()) for tensor in loaded.values())


def test_a_box_is_read_from_the_middle_of_a_chunk(tmp_path: Path) -> None:
    whole = torch.randn(70, 30, 5)
    save(str(tmp_path), {"w": whole}, step=1)
    checkpoint = open_checkpoint(str(tmp_path))
    assert torch.equal(checkpoint.read("w"), whole)
    assert torch.equal(checkpoint.read("w", Box((3, 4, 1), (60, 20, 3))), whole[3:63, 4:24, 1:4])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".tmp-"))


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    elif how == "truncate":
        path.write_bytes(data[: len(data) - 7])
    elif how == "delete":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json", "COMMIT.json"])
def test_damage_is_logged_and_the_step_before_is_opened(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(str(tmp_path), {"w": torch.full((4096,), float(step))}, step=step)
    [path] = [path for path in _files(tmp_path / "step-00000002") if path.name == name]
    _damage(path, how)
    state = {"w": torch.zeros(4096)}
    if name == "__0_0.distcp" and how == "flip":
        with pytest.raises(DamagedError, match=r"w: bytes \d+ to \d+"):
            load(str(tmp_path), state)
        return
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.step == 1
    load(checkpoint, state)
    assert bool((state["w"] == 1).all())
    if (name, how) != ("COMMIT.json", "delete"):
        assert "step" in caplog.text
        with pytest.raises(DamagedError):
            open_checkpoint(str(tmp_path), on_damage="error")


def test_nothing_committed_is_an_error_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match="empty or does not exist"):
        open_checkpoint(str(tmp_path / "none"))
    (tmp_path / "dump.json").write_text("{}")
    with pytest.raises(NotCommittedError, match="it has no step folder"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(NotCommittedError, match="it is a file, not the folder of a run"):
        open_checkpoint(str(tmp_path / "dump.json"))
    save(str(tmp_path), {"w": torch.zeros(2)}, step=5)
    (tmp_path / "step-00000005" / "COMMIT.json").unlink()
    with pytest.raises(NotCommittedError, match="begun but not committed"):
        open_checkpoint(str(tmp_path))
    assert [info.state for info in list_checkpoints(str(tmp_path))] == ["partial"]


def test_a_model_export_never_shadows_a_resumable_checkpoint(tmp_path: Path) -> None:
    with Saver(str(tmp_path)) as saver:
        saver.save({"model": {"w": torch.zeros(2)}, "optimizer": {"m": torch.zeros(2)}}, step=10)
        saver.save({"model": {"w": torch.zeros(2)}}, step=20, kind="model")
    assert open_checkpoint(str(tmp_path)).step == 10
    assert open_checkpoint(str(tmp_path), step=20).manifest.kind == "model"


def test_a_re_save_keeps_the_old_step_until_it_replaces_it(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(2)}, step=1)
    before = open_checkpoint(str(tmp_path))
    save(str(tmp_path), {"w": torch.ones(2)}, step=1)
    assert torch.equal(before.read("w"), torch.zeros(2))
    assert torch.equal(open_checkpoint(str(tmp_path)).read("w"), torch.ones(2))


class Gate(FileStore):
    """Delays the first COMMIT until released, so that two jobs save the same step at once."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write_if(self, path: str, data: Any, *, version: str | None) -> Any:
        self.reached.set()
        assert self.go_on.wait(240)
        return super().write_if(path, data, version=version)


def test_the_second_of_two_jobs_that_commit_one_step_is_refused(tmp_path: Path) -> None:
    slow = Gate(str(tmp_path))
    with Saver(slow) as zombie:
        handle = zombie.save({"w": torch.zeros(2)}, step=1)
        assert slow.reached.wait(240)
        save(str(tmp_path), {"w": torch.ones(2)}, step=1)
        slow.go_on.set()
        with pytest.raises(SaveError, match="another job committed step 1"):
            handle.wait()
    assert torch.equal(open_checkpoint(str(tmp_path)).read("w"), torch.ones(2))


class Failing(FileStore):
    """Fails the n-th write: before it, after it, or partway through."""

    def __init__(self, url: str, at: int, how: str) -> None:
        super().__init__(url)
        self._at, self._how, self.calls = at, how, 0

    def _fails(self, path: str) -> bool:
        self.calls += path != "OWNER.json"
        return self.calls == self._at and path != "OWNER.json"

    def write(self, path: str, parts: Any) -> Any:
        if not self._fails(path):
            return super().write(path, parts)
        if self._how == "after":
            super().write(path, parts)
        elif self._how == "torn":
            super().write(path, _torn(parts))
        raise StoreError(f"write {self._at}")

    def write_if(self, path: str, data: Any, *, version: str | None) -> Any:
        if not self._fails(path):
            return super().write_if(path, data, version=version)
        if self._how == "after":
            super().write_if(path, data, version=version)
        raise StoreError(f"write {self._at}")


def _torn(parts: Any) -> Iterator[Any]:
    yield bytes(next(iter(parts)))[:10]
    raise StoreError("in the middle")


@pytest.mark.parametrize("how", ["before", "torn", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failed_write_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, at: int, how: str) -> None:
    save(str(tmp_path), {"w": torch.zeros(2), "v": 1}, step=1)
    with Saver(Failing(str(tmp_path), at, how)) as saver:
        is_committed = (at, how) == (4, "after")  # the response to the commit was lost, but the commit took effect
        handle = saver.save({"w": torch.ones(2), "v": 2}, step=2)
        if is_committed:
            handle.wait()
        else:
            with pytest.raises((SaveError, StoreError), match=r"write \d|in the middle"):
                handle.wait()
        newest = open_checkpoint(str(tmp_path))
        state: dict[str, Any] = {"w": torch.full((2,), 9.0), "v": 0}
        load(newest, state)
        assert (newest.step, state["w"][0].item(), state["v"]) in [(1, 0.0, 1), (2, 1.0, 2)]
        assert newest.step == (2 if is_committed else 1)
        saver.save({"w": torch.ones(2) * 3, "v": 3}, step=3).wait()
    assert open_checkpoint(str(tmp_path)).step == 3


def test_an_upload_error_reaches_the_loop_at_the_next_check(tmp_path: Path) -> None:
    saver = Saver(Failing(str(tmp_path), 1, "before"))
    handle = saver.save({"w": torch.zeros(2)}, step=1)
    handle.future.exception()
    with pytest.raises(StoreError, match="write 1"):
        saver.check()
    saver.check()
    saver.close()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"model": {"w": torch.zeros(3, 3)}}, r"model.w: checkpoint has global shape \(2, 3\), model wants \(3, 3\)"),
        ({"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}}, "float32 -> bfloat16 may lose precision"),
        ({"model": {"w": torch.zeros(2, 3, dtype=torch.float64)}}, "float32 -> float64 changes the dtype"),
        ({"model": {"w": torch.zeros(2, 3), "new": torch.zeros(1)}}, "model.new: missing from the checkpoint"),
        ({"model": {}, "other": 1}, "other: missing from the checkpoint"),
        ({"model": {"x": torch.zeros(1)}}, "model.w: in the checkpoint but not in the state"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, state: dict[str, Any], text: str) -> None:
    save(str(tmp_path), {"model": {"w": torch.ones(2, 3)}, "optimizer": {"m": torch.ones(2)}}, step=1)
    with pytest.raises(LoadContractError, match=text):
        load(str(tmp_path), state)


def test_a_cast_that_the_policy_allows_is_reported(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.tensor([1.0, 2e-42])}, step=1)
    state = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    report = load(str(tmp_path), state, policy=LoadPolicy(lossy_cast="warn"))
    assert report.cast == {"w": "float32 -> bfloat16"}
    assert state["w"].tolist() == torch.tensor([1.0, 2e-42]).to(torch.bfloat16).tolist()


def test_sixteen_committers_of_one_step_have_one_winner(tmp_path: Path) -> None:
    barrier = threading.Barrier(16)
    outcomes: list[str] = []

    def commit(value: int) -> None:
        store = FileStore(str(tmp_path))
        barrier.wait()
        try:
            store.write_if("step-00000001/COMMIT.json", f"{value}".encode(), version=None)
            outcomes.append("won")
        except ConditionFailedError:
            outcomes.append("lost")

    threads = [threading.Thread(target=commit, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 15 + ["won"]


def test_saved_files_are_all_that_is_left(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(2)}, step=1)
    names = sorted(os.path.basename(path) for path in _files(tmp_path))
    assert names == [".metadata", "COMMIT.json", "__0_0.distcp", "manifest.json"]


@pytest.mark.parametrize("field", ["missing", "extra", "cast", "lossy_cast", "verify"])
def test_an_unknown_word_in_a_load_policy_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} is 'maybe'; use one of"):
        LoadPolicy(**{field: "maybe"})  # type: ignore[arg-type]


def test_an_unknown_answer_to_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on_damage is 'skip'; use one of error, fall_back"):
        open_checkpoint(str(tmp_path), on_damage="skip")


@pytest.mark.parametrize("kind", ["foreign", "weights"])
def test_a_kind_that_cannot_be_saved_is_refused(tmp_path: Path, kind: str) -> None:
    with Saver(str(tmp_path)) as saver, pytest.raises(SaveError, match=f"kind is '{kind}'"):
        saver.save({"w": torch.zeros(2)}, step=1, kind=kind)
    assert list_checkpoints(str(tmp_path)) == []
