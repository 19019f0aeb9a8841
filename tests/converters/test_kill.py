"""SIGKILL at any moment of an export leaves nothing at the destination; the next run cleans up and succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hf_models import config, contents, tensors, write_model
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.publish import OWNER_TEXT, publish
from titan_ckpt.errors import AlreadyExistsError
from titan_ckpt.store.open import open_store

# Runs one conversion in a child that kills itself at the N-th write to disk, rename included.
CHILD = """
import os, signal, sys
from titan_ckpt.converters import export_hf, import_hf
limit, count = int(sys.argv[1]), [0]
def counted(call):
    def wrapper(*arguments, **keywords):
        count[0] += 1
        if count[0] > limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)
    return wrapper
for name in ("write", "rename", "replace", "makedirs", "link", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
convert = {"export": lambda a, b: export_hf(a, b, max_shard_bytes=20_000), "import": import_hf}[sys.argv[2]]
convert(sys.argv[3], sys.argv[4])
"""


def _killed_at(call: int, direction: str, source: Path, target: Path) -> bool:
    """Whether the child was killed; False if it finished first."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(call), direction, str(source), str(target)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder."""
    return write_model(tmp_path / "in", config(), tensors(config()), extra={"tokenizer.json": "{}"})


def test_killed_export_leaves_nothing_that_looks_finished(tmp_path: Path, model: Path) -> None:
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "reference"), max_shard_bytes=20_000)
    target, call, kills = tmp_path / "out", 0, 0
    while _killed_at(call, "export", tmp_path / "run", target):
        kills += 1
        call += 3
        if target.exists():
            break
    assert kills >= 5
    assert contents(target) == contents(tmp_path / "reference")
    with pytest.raises(AlreadyExistsError):
        export_hf(str(tmp_path / "run"), str(target))
    assert [name for name in os.listdir(tmp_path) if "partial" in name] == []


def test_only_what_is_proved_ours_is_removed(tmp_path: Path, model: Path) -> None:
    import_hf(str(model), str(tmp_path / "run"))
    for name in (".out.partial-12345678", ".out.partial-backup", ".out.partial-87654321"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / ".out.partial-87654321.owner").write_text("someone else's")
    (tmp_path / ".out.partial-0000000f").symlink_to(tmp_path / ".out.partial-backup")
    (tmp_path / ".out.partial-0000000f.owner").write_bytes(OWNER_TEXT)
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert [path.parent.name for path in sorted(tmp_path.glob(".out.partial-*/notes.txt")) if not path.parent.is_symlink()] == [
        ".out.partial-12345678", ".out.partial-87654321", ".out.partial-backup",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "link to an empty folder", "dangling link", "file", "folder with a file"])
def test_what_exists_is_never_replaced(tmp_path: Path, model: Path, kind: str) -> None:
    import_hf(str(model), str(tmp_path / "run"))
    target, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if "link" in kind:
        target.symlink_to(elsewhere)
    if kind != "dangling link" and kind != "file":
        (target if kind.startswith("folder") else elsewhere).mkdir()
    if kind in ("file", "link"):
        (target if kind == "file" else elsewhere / "mine").write_text("mine")
    if kind.startswith("folder"):
        (target / "mine").write_text("mine")
    before = sorted((str(path), path.is_symlink()) for path in tmp_path.rglob("*") if "run" not in path.parts)
    with pytest.raises(AlreadyExistsError):
        export_hf(str(tmp_path / "run"), str(target))
    assert sorted((str(p), p.is_symlink()) for p in tmp_path.rglob("*") if "run" not in p.parts) == before


def test_a_failed_export_to_a_prefix_removes_its_own_files() -> None:
    other = open_store("memory://a-failed-export/out")

    def fail() -> None:
        with publish("memory://a-failed-export/out", size_bytes=0) as store:
            store.write("model.safetensors", [b"ours"])
            other.write("config.json", [b"another writer's"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [entry.path for entry in other.list()] == ["config.json"]


def test_killed_import_is_no_checkpoint_or_a_whole_one(tmp_path: Path, model: Path) -> None:
    run, call, kills = tmp_path / "run", 0, 0
    while not (run / "step-00000000" / "COMMIT.json").exists() and _killed_at(call, "import", model, run):
        kills += 1
        call += 3
    assert kills >= 3
    export_hf(str(run), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_export_under_way_is_not_taken_for_an_abandoned_one(tmp_path: Path, model: Path) -> None:
    import_hf(str(model), str(tmp_path / "run"))
    slow = publish(str(tmp_path / "out"), size_bytes=0)
    store = slow.__enter__()
    store.write("half", [b"1"])
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert store.exists("half")
    with pytest.raises(AlreadyExistsError, match="meanwhile"):
        slow.__exit__(None, None, None)
    assert (tmp_path / "out" / "config.json").exists()
    assert [name for name in os.listdir(tmp_path) if "partial" in name] == []
