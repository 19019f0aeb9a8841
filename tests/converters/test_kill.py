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
from titan_ckpt.converters.hf.publish import publish
from titan_ckpt.errors import AlreadyExistsError

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
        assert not target.exists()
        kills += 1
        call += 3
    assert kills >= 5
    assert contents(target) == contents(tmp_path / "reference")
    assert [name for name in os.listdir(tmp_path) if "partial" in name] == []


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
