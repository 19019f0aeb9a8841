"""What is left of writes that died goes with `prune --incomplete`; what no manifest names, and what plain DCP needs, stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.cli.main import main
from titan_ckpt.errors import PermissionDeniedError
from titan_ckpt.saving.saver import save
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy

ALL = ["--keep-last", "1", "--incomplete", "--yes"]
DIED = "-0123456789ab"


def fill(run: Path, *steps: int) -> None:
    for step in steps:
        save(str(run), {"w": torch.full((40,), float(step))}, step=step)


def attempt(run: Path, step: int) -> Path:
    return next((run / f"step-{step:08d}").glob("a-*"))


def committed(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(str(run)) if info.state == "committed"]


def leave(path: Path, *, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_temporary_files_of_dead_writes_go_once_they_are_old(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    step, own, other = tmp_path / "step-00000001", attempt(tmp_path, 1), tmp_path / "step-00000007"
    dead = "a-20260101T000000Z-0123abcd"
    names = [step / ".tmp-COMMIT.json", step / ".tmp-.metadata", own / ".tmp-manifest.json", own / ".tmp-__0_0.distcp"]
    old = [leave(Path(f"{name}{DIED}"), age_s=2 * 86400) for name in (*names, other / dead / ".tmp-__0_0.distcp")]
    young = leave(step / f".tmp-COMMIT.json{DIED[:-1]}c", age_s=60)
    foreign = [leave(step / name, age_s=2 * 86400) for name in (f".tmp-notes{DIED}", ".tmp-COMMIT.json", ".tmp-x")]
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--yes"]) == 0
    assert all(path.exists() for path in old)
    assert main(["prune", str(tmp_path), *ALL]) == 0
    assert [path for path in old if path.exists()] == []
    assert [path.exists() for path in (young, *foreign)] == [True] * 4
    assert not other.exists()
    assert committed(tmp_path) == [1]


@pytest.mark.parametrize("is_committed", [True, False])
def test_digests_that_no_manifest_names_stay(tmp_path: Path, is_committed: bool) -> None:
    fill(tmp_path, 1, 2)
    path = attempt(tmp_path, 1) / "digests.bin"
    path.write_bytes(b"another tool's")
    if not is_committed:
        (tmp_path / "step-00000001" / "COMMIT.json").unlink()
    assert main(["prune", str(tmp_path), *ALL, "--older-than", "0s"]) == 0
    assert committed(tmp_path) == [2]
    assert [found.name for found in path.parent.iterdir()] == ["digests.bin"]


def test_a_step_that_dcp_cannot_open_lets_no_other_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / ".metadata").unlink()
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--yes"]) == 0
    assert committed(tmp_path) == [2, 3]
    assert main(["verify", f"{tmp_path}@3", "--fix"]) == 0
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--yes"]) == 0
    assert committed(tmp_path) == [3]
    capsys.readouterr()


def test_a_step_saved_again_after_the_plan_was_made_stays(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    store = FileStore(str(tmp_path))
    plan = plan_removal(store, RetentionPolicy(keep_last=1), now_s=time.time())
    fill(tmp_path, 1)
    assert "saved again meanwhile" in delete(store, plan)[0]
    assert committed(tmp_path) == [1, 2]


def test_ls_lists_the_steps_beside_an_unreadable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(whole: Any) -> Any:
        def checked(self: FileStore, path: str = "") -> Any:
            if path.startswith("step-00000002"):
                raise PermissionDeniedError("not yours")
            return whole(self, path)

        return checked

    fill(tmp_path, 1, 2)
    for name in ("stat", "list"):
        monkeypatch.setattr(FileStore, name, refuse(getattr(FileStore, name)))
    assert main(["ls", str(tmp_path)]) == 1
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert rows == [["1", "committed"], ["2", "unreadable"]]
