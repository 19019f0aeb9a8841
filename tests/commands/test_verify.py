"""Every kind of damage is found and reported by file, tensor and byte range."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_ckpt.check.scan import Problem
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import NotCommittedError, StoreError
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint

STEP = "step-00000007"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pristine")
    torch.manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(40, 30, dtype=torch.bfloat16 if n % 2 else torch.float32) for n in range(4)}
    with Saver(str(run)) as saver:
        saver.save({"model": state, "optim": {"step": 7, "note": "n" * 50}}, step=7, assets={"tokenizer.json": b"{}"})
    return run


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def only(run: Path, pattern: str) -> Path:
    (found,) = run.glob(f"{STEP}/{pattern}")
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_whole_checkpoint_has_no_problem(pristine: Path) -> None:
    read: list[int] = []
    assert verify(str(pristine)) == []
    assert verify(f"{pristine}@7", read_data=True, on_bytes=read.append) == []
    assert verify(open_checkpoint(str(pristine)), read_data=True) == []
    assert sum(read) == only(pristine, "a-*/__0_0.distcp").stat().st_size


def test_a_flipped_byte_is_named_by_tensor_and_range(run: Path) -> None:
    manifest = open_checkpoint(str(run)).manifest
    for tensor in manifest.tensors:
        chunk = manifest.chunk(tensor, 0)
        start = chunk.offset + chunk.payload_offset
        flip(run / STEP / chunk.file, start + chunk.payload_length - 1)
        (problem,) = verify(str(run), read_data=True)
        assert (problem.fqn, problem.start, problem.end) == (tensor.fqn, start, start + chunk.payload_length)
        flip(run / STEP / chunk.file, start + chunk.payload_length - 1)
    assert verify(str(run), read_data=True) == []


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_anywhere_in_any_file_is_found(run: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in (run / STEP).rglob("*") if p.is_file())))
    at = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, at)
    found = verify(str(run), read_data=True)
    flip(path, at)
    # Some facts are only in COMMIT.json, such as the size of `.metadata`.
    assert found or path.name == "COMMIT.json"


@pytest.mark.parametrize("name", ["a-*/__0_0.distcp", "a-*/manifest.json", ".metadata", "a-*/assets/tokenizer.json"])
@pytest.mark.parametrize("how", ["delete", "truncate", "empty", "extend"])
def test_a_lost_or_resized_file_is_found_without_reading_data(run: Path, name: str, how: str) -> None:
    path = only(run, name)
    data = path.read_bytes()
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:-1], "empty": b"", "extend": data + b"\0"}[how])
    problems = verify(str(run))
    assert [p.path for p in problems] == [str(path.relative_to(run))]
    assert verify(str(run), read_data=True)


def test_ls_notices_damage_to_the_newest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path, {"w": torch.arange(9.0)}, step=step)
    (old,), (new,) = (tmp_path.glob(f"step-0000000{step}/a-*/__0_0.distcp") for step in (1, 2))
    old.write_bytes(old.read_bytes()[:-1])
    assert (main(["ls", str(tmp_path)]), main(["ls", str(tmp_path), "--check"])) == (0, 1)
    capsys.readouterr()
    new.unlink()
    assert main(["ls", str(tmp_path)]) == 1
    assert "step 2: " in capsys.readouterr().out


def test_a_truncated_file_names_the_tensors_that_are_lost(run: Path) -> None:
    path = only(run, "a-*/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:100])
    lost = {p.fqn for p in verify(str(run), read_data=True)}
    assert {t.fqn for t in open_manifest(run).tensors} <= lost


def open_manifest(run: Path) -> Manifest:
    return decode_manifest(only(run, "a-*/manifest.json").read_bytes(), where="x")


def test_two_tensors_with_their_bytes_swapped_are_both_named(run: Path) -> None:
    manifest = open_checkpoint(str(run)).manifest
    first, second = (manifest.chunk(manifest.by_fqn[f"model.layers.{n}.w"], 0) for n in (0, 2))
    path = run / STEP / first.file
    data = bytearray(path.read_bytes())
    places = [
        slice(c.offset + c.payload_offset, c.offset + c.payload_offset + c.payload_length) for c in (first, second)
    ]
    data[places[0]], data[places[1]] = data[places[1]], data[places[0]]
    path.write_bytes(data)
    assert [p.fqn for p in verify(str(run), read_data=True)] == ["model.layers.0.w", "model.layers.2.w"]


def test_an_unreadable_commit_is_a_problem_not_skipped(run: Path) -> None:
    only(run, "COMMIT.json").write_text("{")
    (problem,) = verify(str(run))
    assert problem.path == f"{STEP}/COMMIT.json"


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError):
        verify(str(tmp_path))
    with pytest.raises(NotCommittedError):
        verify(f"{tmp_path}@3")


def test_tensors_and_values_of_plain_dcp_are_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(20, 30), "n": 3}, checkpoint_id=tmp_path)
    assert verify(str(tmp_path), read_data=True) == []
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert {p.fqn for p in verify(str(tmp_path), read_data=True)} == {"w", "n"}


def test_problem_is_printed_as_text_and_as_json() -> None:
    problem = Problem(path="p", fqn="w", start=1, end=9, message="are wrong")
    assert str(problem) == "p: w: bytes 1 to 9 are wrong"
    assert json.loads(json.dumps(problem.to_dict())) == {
        "path": "p",
        "fqn": "w",
        "start": 1,
        "end": 9,
        "message": "are wrong",
    }


def test_a_store_failure_is_a_problem_of_each_tensor_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileStore.read_into

    def fail(self: FileStore, path: str, start: int, buffer: memoryview) -> None:
        if path.endswith(".distcp"):
            raise StoreError(f"{path}: the disk is broken")
        real(self, path, start, buffer)

    monkeypatch.setattr(FileStore, "read_into", fail)
    problems = verify(str(run), read_data=True)
    assert {t.fqn for t in open_manifest(run).tensors} <= {p.fqn for p in problems}
    assert all("the disk is broken" in p.message for p in problems)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_copy_has_the_assets_of_its_source(tmp_path: Path, is_incremental: bool) -> None:
    run, copy = tmp_path / "run", str(tmp_path / "copy")
    assets = {"tokenizer.json": b"{}", "sub/vocab.txt": b"a b"}
    with Saver(str(run), SaveOptions(incremental=is_incremental)) as saver:
        for step in (1, 2):
            saver.save({"w": torch.full((40,), 1.0)}, step=step, assets=assets).wait()
    copy_checkpoint(open_checkpoint(str(run)), FileStore(copy))
    assert {name: open_checkpoint(copy).asset(name) for name in assets} == assets
    assert verify(copy, read_data=True) == []
