"""What torch.compile made goes with the checkpoints, and a run on another machine compiles nothing again."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from tests.support.training_runs import read_losses, train_arguments
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import DataError
from titan_ckpt.trainer.launch.compile_cache import ASSET, CompileCache


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path


def archive(*members: tuple[str, bytes | None]) -> bytes:
    """A compressed tar; a member without content is a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            made.addfile(member, io.BytesIO(data or b""))
    return zstandard.compress(out.getvalue())


def test_a_cache_comes_back_as_it_was(machine: Path) -> None:
    first = CompileCache("s3://bucket/one")
    assert first.folder.parent == machine
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.folder)
    assert first.asset() == {}
    (first.folder / "ab").mkdir()
    (first.folder / "ab" / "kernel.so").write_bytes(b"code" * 1000)
    (first.folder / "ab" / "kernel.lock").touch()
    asset = first.asset()[ASSET]
    other = CompileCache("s3://bucket/two")
    (other.folder / "own.py").write_text("x = 1")
    assert other.unpack(asset, "a checkpoint") == 1
    assert other.unpack(asset, "a checkpoint") == 0
    assert (other.folder / "ab" / "kernel.so").read_bytes() == b"code" * 1000
    assert sorted(path.name for path in other.folder.rglob("*.*")) == ["kernel.so", "own.py"]


@pytest.mark.parametrize(
    "content",
    [
        archive(("../outside", b"x")),
        archive(("/outside", b"x")),
        archive(("a/../../outside", b"x")),
        archive(("link", None)),
        archive(("good", b"x"))[:20],
        b"no archive",
        zstandard.compress(b"no archive" * 100),
    ],
    ids=["parent", "absolute", "through", "link", "cut", "bytes", "other"],
)
def test_an_asset_writes_nothing_outside(machine: Path, content: bytes) -> None:
    cache = CompileCache(str(machine / "run"))
    with pytest.raises(DataError, match="compile_cache"):
        cache.unpack(content, "a checkpoint")
    assert [path for path in machine.rglob("*") if path.is_file() or path.is_symlink()] == []


def test_a_folder_that_others_can_write_is_refused(machine: Path) -> None:
    folder = CompileCache("run").folder
    folder.chmod(0o777)
    with pytest.raises(DataError, match="only this user can write"):
        CompileCache("run")
    folder.rmdir()
    folder.symlink_to(machine)
    with pytest.raises(DataError, match="only this user can write"):
        CompileCache("run")


@pytest.mark.e2e
def test_another_machine_compiles_nothing_again(tmp_path: Path) -> None:
    said = []
    for steps, machine in ((2, "first"), (4, "second")):
        (tmp_path / machine).mkdir()
        sets = [
            "mesh.compile=true",
            "save.compile_cache=true",
            f"train.steps={steps}",
            "model.n_layers=1",
            "save.every=0",
        ]
        arguments = train_arguments(str(tmp_path / "cache"), tmp_path / "run", *sets)
        done = subprocess.run(
            [sys.executable, "-m", "titan_ckpt", *arguments], check=False, capture_output=True, text=True,
            env=os.environ | {"TMPDIR": str(tmp_path / machine)},
        )  # fmt: skip
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, said[-1]
    assert ASSET in open_checkpoint(str(tmp_path / "run")).manifest.assets
    assert "compiled code: " not in said[0]
    assert "files of " in said[1].partition("compiled code: ")[2]
    first, second = (
        {path.relative_to(folder) for path in folder.rglob("*.so")}
        for folder in (next((tmp_path / name).glob("titan-ckpt-compiled-*")) for name in ("first", "second"))
    )
    assert first == second
    assert sorted(read_losses(tmp_path / "run")) == [1, 2, 3, 4]
