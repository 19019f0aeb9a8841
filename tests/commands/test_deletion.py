"""What retention and `prune` never delete: what is needed, what is not ours, and anything on the strength of an error."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import DamagedError, NewerFormatError, PermissionDeniedError, StoreError, UsageError
from titan_ckpt.format.commit import DIGEST, _encode
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.store import ERRORS, FaultyStore, StoreFault

ALL = ["--keep-last", "1", "--incomplete", "--older-than", "0s", "--yes"]
OLD_S = 10 * 86400.0


def fill(run: Path, *steps: int, incremental: bool = False, **options: Any) -> None:
    with Saver(str(run), SaveOptions(incremental=incremental, **options)) as saver:
        for step in steps:
            saver.save(state(step), step=step).wait()


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((40,), float(step)), "frozen": torch.arange(100.0)}, "step": step}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def age(folder: Path, seconds: float = OLD_S) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def prune(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["prune", str(run), *(flags or ALL)])
    out, err = capsys.readouterr()
    return code, out + err


def loads(run: Path, step: int) -> bool:
    found: dict[str, Any] = {"model": {"w": torch.zeros(40), "frozen": torch.zeros(100)}, "step": 0}
    load(f"{run}@{step}", found)
    expected = state(step)["model"]
    return torch.equal(found["model"]["w"], expected["w"]) and torch.equal(found["model"]["frozen"], expected["frozen"])


def break_commit(run: Path, step: int, how: str) -> None:
    path = run / f"step-{step:08d}" / "COMMIT.json"
    content = path.read_text()
    broken = {
        "torn": content[: len(content) // 2],
        "empty": "",
        "not ours": json.dumps({"hello": 1}),
        "infinity": content.replace('"size_bytes": ', '"size_bytes": Infinity, "x": '),
        "later release": _encode(
            {k: v for k, v in json.loads(content).items() if k != DIGEST} | {"version": 99}
        ).decode(),
    }
    if how == "manifest":
        next(path.parent.glob("a-*/manifest.json")).write_text("{}")
    elif how == "no manifest":
        next(path.parent.glob("a-*/manifest.json")).unlink()
    else:
        path.write_text(broken[how])


BREAKS = ["torn", "empty", "not ours", "infinity", "later release", "manifest", "no manifest"]


@pytest.mark.parametrize("how", BREAKS)
def test_what_an_unopenable_checkpoint_needs_stays(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 refers to the frozen tensor in step 1; then nobody can read step 2's references any more."""
    fill(tmp_path, 1, 2, 3, 4, incremental=True)
    whole = (tmp_path / "step-00000002" / "COMMIT.json").read_bytes()
    manifest = next((tmp_path / "step-00000002").glob("a-*/manifest.json"))
    kept = manifest.read_bytes()
    break_commit(tmp_path, 2, how)
    age(tmp_path)
    before = files(tmp_path)
    code, text = prune(tmp_path, capsys)
    assert (code, files(tmp_path)) == (1, before)
    assert "@2 cannot be opened" in text
    assert "nothing is deleted" in text
    (tmp_path / "step-00000002" / "COMMIT.json").write_bytes(whole)
    manifest.write_bytes(kept)
    assert loads(tmp_path, 2)


@pytest.mark.parametrize("how", BREAKS)
def test_commands_over_a_run_survive_one_bad_step(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 1, 2)
    break_commit(tmp_path, 2, how)
    assert main(["ls", str(tmp_path), "--check"]) == 1
    out = capsys.readouterr().out
    assert "step 2: " in out
    assert prune(tmp_path, capsys)[0] in (0, 1)
    if how == "later release":
        with pytest.raises(NewerFormatError, match="upgrade"):
            open_checkpoint(str(tmp_path))
    else:
        assert open_checkpoint(str(tmp_path)).step == 1


def test_a_commit_that_the_store_refuses_is_unreadable(tmp_path: Path) -> None:
    class Refusing(FileStore):
        def stat(self, path: str) -> Any:
            if path == "step-00000002/COMMIT.json":
                raise PermissionDeniedError("not yours")
            return super().stat(path)

    fill(tmp_path, 1, 2, 3)
    store = Refusing(str(tmp_path))
    assert [info.state for info in list_checkpoints(store)] == ["committed", "unreadable", "committed"]
    plan = plan_removal(store, RetentionPolicy(keep_last=1), now_s=time.time())
    assert (plan.garbage, plan.is_blocked) == ((), True)
    assert "not yours" in plan.kept[0]
    assert open_checkpoint(str(tmp_path), store=store).step == 3
    shutil.rmtree(tmp_path / "step-00000003")
    with pytest.raises(PermissionDeniedError):
        open_checkpoint(str(tmp_path), store=store)


def test_retention_says_why_it_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, 1, 2, 3, incremental=True)
    break_commit(tmp_path, 2, "torn")
    before = files(tmp_path)
    with caplog.at_level(logging.WARNING):
        fill(tmp_path, 4, 5, incremental=True, retention=RetentionPolicy(keep_last=1))
    assert before <= files(tmp_path)
    assert "@2 cannot be opened" in caplog.text


def test_a_file_that_a_damaged_step_needs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest can be read, so what it refers to is known, though one of its own files is missing."""
    fill(tmp_path, 1, 2, 3, incremental=True)
    next((tmp_path / "step-00000002").glob("a-*/*.distcp")).unlink()
    code, _ = prune(tmp_path, capsys)
    assert code == 0
    assert not (tmp_path / "step-00000001" / "COMMIT.json").exists()
    assert len(list((tmp_path / "step-00000001").glob("a-*/*.distcp"))) == 1


@pytest.mark.parametrize("what", ["step", "attempt", "file", "COMMIT.json", ".metadata"])
def test_links_and_what_they_point_to_stay(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fill(run, 1, 2, 3)
    step = run / "step-00000001"
    known = {"step": step, "attempt": next(step.glob("a-*")), "file": next(step.glob("a-*/*.distcp"))}
    target = known.get(what, step / what)
    other.mkdir()
    target.rename(other / target.name)
    target.symlink_to(other / target.name)
    age(tmp_path)
    before = files(tmp_path)
    code, text = prune(run, capsys, "--keep-last", "2", "--incomplete", "--older-than", "0s", "--yes")
    assert code == 0
    assert files(tmp_path) == before
    assert "symbolic link" in text
    assert loads(run, 1)


def test_half_a_save_behind_a_link_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fill(run, 1, 2)
    other.mkdir()
    (run / "step-00000001" / "COMMIT.json").unlink()
    (run / "step-00000001").rename(other / "x")
    (run / "step-00000001").symlink_to(other / "x")
    age(tmp_path)
    before = files(tmp_path)
    code, text = prune(run, capsys)
    assert (code, files(tmp_path)) == (0, before)
    assert "symbolic link" in text


def test_the_local_store_deletes_nothing_through_a_link(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "run"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("x")
    store.write("a/y", [b"y"])
    (tmp_path / "run" / "a" / "folder").symlink_to(tmp_path / "other")
    (tmp_path / "run" / "a" / "file").symlink_to(tmp_path / "other" / "x")
    for path in ("a/folder/x", "a/file"):
        assert store.is_link(path)
        with pytest.raises(StoreError, match="symbolic link"):
            store.delete([path])
    store.delete(["a/y", "a/nothing", "nowhere/at/all", "a/y/z"])
    assert files(tmp_path) == {"other/x", "run/a/file", "run/a/folder"}


def test_checkpoints_of_other_programs_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    fill(tmp_path, 3, 4)
    with warnings.catch_warnings(action="ignore"):  # DCP warns that it writes over a checkpoint, here one of ours
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "step-00000003", no_dist=True)
    age(tmp_path)
    foreign = [path for path in files(tmp_path) if path.endswith("__0_0.distcp") and "a-" not in path]
    foreign += [f"step-0000000{step}/.metadata" for step in (1, 2, 3)]
    prune(tmp_path, capsys)
    assert set(foreign) <= files(tmp_path)
    for step in (1, 2, 3):
        found = {"w": torch.zeros(4)}
        dcp.load(found, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
        assert torch.equal(found["w"], torch.ones(4))


def test_files_that_users_put_there_stay_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 1, 2, 3)
    attempt = next((tmp_path / "step-00000001").glob("a-*"))
    (tmp_path / "step-00000002" / "COMMIT.json").unlink()
    (tmp_path / "step-00000002" / ".metadata").unlink()
    mine = ["step-00000001/notes.txt", f"{attempt.relative_to(tmp_path)}/eval.json", "step-00000002/plots/loss.svg",
            f"{attempt.relative_to(tmp_path)}/assets/mine.txt"]  # fmt: skip
    for path in mine:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("mine")
    age(tmp_path)
    code, text = prune(tmp_path, capsys)
    assert code == 0
    left = {path for path in files(tmp_path) if not path.startswith(("step-00000003", "OWNER"))}
    assert left == set(mine)
    assert all(path.partition("/")[2] in text for path in mine)


def test_an_undecodable_dcp_index_stays_with_all_it_may_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-00000001" / ".metadata").write_bytes(pickle.dumps({"what": object}))
    before = files(tmp_path)
    _, text = prune(tmp_path, capsys)
    assert files(tmp_path) == before
    assert "cannot be decoded" in text


def test_a_lost_commit_with_a_broken_manifest_stops_deletions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000002" / "COMMIT.json").unlink()
    manifest = next((tmp_path / "step-00000002").glob("a-*/manifest.json"))
    manifest.write_bytes(b"null")
    before = files(tmp_path)
    code, text = prune(tmp_path, capsys, "--keep-last", "1", "--keep", "2", "--yes")
    assert files(tmp_path) == before
    assert code == DamagedError.exit_code
    assert f"the deletion stops here: which files of other steps {manifest} needs is unknown" in text
    assert f"remove {manifest.parent.relative_to(tmp_path)} yourself" in text


def test_keeping_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 10, 20, 1000)
    code, text = prune(tmp_path, capsys, *ALL, "--keep", "100")
    assert code == UsageError.exit_code
    assert "has no step 100; nothing was deleted. The nearest steps: 20, 10, 1000" in text
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [10, 20, 1000]
    (tmp_path / "pins.txt").write_text("10\n100\n")
    assert "no step 100" in prune(tmp_path, capsys)[1]
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [10, 1000]


class StoppingStore(FileStore):
    """The local disk, with a machine that dies after the n-th object is deleted; marks of the deletion are not counted."""

    def __init__(self, url: str, left: int) -> None:
        super().__init__(url)
        self.left = left

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= "/deleting/" not in path
            super().delete([path])


def dcp_reads(folder: Path, step: int) -> bool:
    """Whether plain DCP finds the step whole; True as well if it finds no checkpoint at all."""
    if not (folder / ".metadata").exists():
        return True
    found = {"model": {"w": torch.zeros(40), "frozen": torch.zeros(100)}}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return torch.equal(found["model"]["w"], torch.full((40,), float(step)))


def test_at_every_moment_of_a_deletion_what_opens_is_whole(tmp_path: Path) -> None:
    """Steps 2 to 4 refer to step 1's data; 1 to 3 go, 4 stays; the machine stops after each single deletion."""
    source = tmp_path / "source"
    fill(source, 1, 2, 3, 4, incremental=True)
    store = FileStore(str(source))
    plan = plan_removal(store, RetentionPolicy(keep_last=1), now_s=time.time())
    number = sum(len(item.entries) for item in plan.garbage)
    assert number == 3 * 4 - 1  # COMMIT, .metadata, manifest and data of three steps, but step 1's data stay
    for left in range(number + 2):
        run = tmp_path / f"run-{left}"
        shutil.copytree(source, run)
        stopped = StoppingStore(str(run), left)
        try:
            delete(stopped, plan_removal(stopped, RetentionPolicy(keep_last=1), now_s=time.time()))
        except KeyboardInterrupt:
            assert left <= number
        for info in list_checkpoints(str(run)):
            if info.state == "committed":
                assert verify(f"{run}@{info.step}", read_data=True) == []
            assert dcp_reads(run / f"step-{info.step:08d}", info.step)
        assert open_checkpoint(str(run)).step == 4


def test_a_transient_error_never_opens_an_older_step(tmp_path: Path) -> None:
    """Each store call of an open fails in turn, and each time the error is raised."""
    fill(tmp_path, 1, 2, 3)
    counted = FaultyStore(FileStore(str(tmp_path)))
    assert open_checkpoint(str(tmp_path), store=counted).step == 3
    for number in range(1, len(counted.calls) + 1):
        for error in ERRORS:
            store = FaultyStore(FileStore(str(tmp_path)), [StoreFault(number=number, error=error)])
            with pytest.raises((StoreError, OSError)):
                open_checkpoint(str(tmp_path), store=store)


def test_bytes_garbled_once_do_not_open_an_older_step(tmp_path: Path) -> None:
    class Garbling(FileStore):
        left = 1

        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            data = super().read(path, start, length)
            self.left -= 1
            return bytes(len(data)) if self.left == 0 else data

    fill(tmp_path, 1, 2)
    for left in (1, 2):
        store = Garbling(str(tmp_path))
        store.left = left
        assert open_checkpoint(str(tmp_path), store=store).step == 2


def test_damage_that_is_proved_opens_the_step_before_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, 1, 2)
    break_commit(tmp_path, 2, "torn")
    assert open_checkpoint(str(tmp_path)).step == 1
    assert "@2 is damaged and was skipped" in caplog.text
    with pytest.raises(DamagedError):
        open_checkpoint(str(tmp_path), on_damage="error")


def test_a_save_that_replaced_what_a_reader_looked_at_is_opened(tmp_path: Path) -> None:
    """Between the listing and the look, retention deletes step 2 for a new step 3; the pinned step 1 must not be opened."""
    fill(tmp_path, 1, 2)
    (tmp_path / "pins.txt").write_text("1\n")

    class Slow(FileStore):
        is_done = False

        def stat(self, path: str) -> Any:
            if not self.is_done and path.endswith("COMMIT.json"):
                Slow.is_done = True
                fill(tmp_path, 3, retention=RetentionPolicy(keep_last=1))
            return super().stat(path)

    assert open_checkpoint(str(tmp_path), store=Slow(str(tmp_path))).step == 3
