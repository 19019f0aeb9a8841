"""Writers leave alone what is not proved ours: other programs' checkpoints, links, later formats; unreadable pins stop prune."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.commands.test_deletion import fill, loads, prune
from titan_ckpt.check.mend import mend_metadata
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.cli.main import main
from titan_ckpt.dcp.storage import StorageWriter
from titan_ckpt.errors import AlreadyExistsError, ConfigError, PermissionDeniedError, TitanError, UsageError
from titan_ckpt.format.commit import DIGEST, _encode
from titan_ckpt.location import parse_location
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.store.base import ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import apply_retention
from titan_ckpt.upkeep.retention import RetentionPolicy, parse_pins

STEP = "step-00000002"


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((8,), value)}


def source(run: Path) -> str:
    url = str(run.parent / "source")
    save(url, state(2), step=2)
    return url


def by_saver(run: Path) -> None:
    with Saver(str(run)) as saver:
        saver.save(state(2), step=2).wait()


def by_mirror(run: Path) -> None:
    with Saver(str(run.parent / "fast"), SaveOptions(mirror=str(run))) as saver:
        saver.save(state(2), step=2).wait()


def by_command(*arguments: str) -> None:
    if main(list(arguments)):
        raise UsageError("the command failed")


WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda run: save(str(run), state(2), step=2),
    "Saver": by_saver,
    "mirror": by_mirror,
    "StorageWriter": lambda run: dcp.save(state(2), storage_writer=StorageWriter(f"{run}@2")),
    "cp": lambda run: by_command("cp", f"{source(run)}@2", str(run)),
    "reshard": lambda run: by_command("reshard", f"{source(run)}@2", str(run), "--mesh", "dp_shard=2"),
}


def foreign(run: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(500), checkpoint_id=str(run / STEP))


def linked(run: Path) -> None:
    other = run.parent / "other"
    save(str(other), state(7), step=2)
    run.mkdir(exist_ok=True)
    (run / STEP).symlink_to(other / STEP)


def later(run: Path) -> None:
    save(str(run), state(7), step=2)
    path = run / STEP / "COMMIT.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != DIGEST}
    path.write_bytes(_encode(content | {"version": 2}))


def over_ours(run: Path) -> None:
    save(str(run), state(7), step=2)
    foreign(run)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "OWNER.json"}


@pytest.mark.parametrize("what", [foreign, linked, later, over_ours], ids=lambda what: what.__name__)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_step_that_is_not_ours_stays_as_it_is(tmp_path: Path, writer: str, what: Callable[[Path], None]) -> None:
    run = tmp_path / "run"
    what(run)
    before = files(run / STEP)
    assert before
    with pytest.raises((TitanError, CheckpointException)):
        WRITERS[writer](run)
    assert files(run / STEP) == before


def test_verify_fix_leaves_another_programs_index(tmp_path: Path) -> None:
    over_ours(tmp_path)
    before = files(tmp_path / STEP)
    with pytest.raises(AlreadyExistsError, match="another program"):
        mend_metadata(open_store(str(tmp_path)), 2)
    assert files(tmp_path / STEP) == before


@pytest.mark.parametrize("name", ["x", "a/x"])
def test_a_store_writes_nothing_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name.partition("/")[0]).symlink_to(tmp_path / "other")
    with pytest.raises(TitanError, match="symbolic link"):
        FileStore(str(tmp_path / "run")).write(name, [b"1"])
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("name", ["pins.txt", "unmirrored.txt", "step-00000001/COMMIT.json"])
@pytest.mark.parametrize("how", ["dangling", "folder"])
def test_what_cannot_be_read_permits_no_deletion(tmp_path: Path, name: str, how: str) -> None:
    for step in (1, 2, 3):
        save(str(tmp_path), state(step), step=step)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
        (path / "x").write_text("")
    else:
        path.symlink_to(tmp_path / "not mounted" / "file")
    before = set(files(tmp_path))
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--incomplete", "--older-than", "0s", "--yes"]) != 0
    assert set(files(tmp_path)) == before
    policy = RetentionPolicy(keep_last=1, is_incomplete=True, older_than_s=0)
    with Saver(str(tmp_path), SaveOptions(retention=policy)) as saver:
        saver.save(state(4), step=4).wait()
    assert set(files(tmp_path)) >= before


@pytest.mark.parametrize("text", ["9" * 5000, "²", "١", "-1"], ids=["huge", "power", "arabic", "negative"])
def test_a_number_that_is_no_step_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a step"):
        parse_pins(text, where="pins.txt")
    assert parse_pins("0" * 5000 + "12", where="pins.txt") == {12}


def test_an_address_of_many_digits_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no step is larger"):
        parse_location("run@" + "9" * 5000)


@pytest.mark.parametrize("mirror", ["run", "./run", "link", "run/inside", "."])
def test_a_mirror_that_is_the_run_is_refused(tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(UsageError, match="no second copy"):
        Saver("run", SaveOptions(mirror=mirror))


def test_a_save_leaves_what_users_put_into_its_folder(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir(parents=True)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    save(str(tmp_path), state(1), step=1)
    assert (tmp_path / "step-00000001" / "notes.txt").read_text() == "mine"


def behind_a_link(run: Path, other: Path, step: int, what: str) -> None:
    """Move a step's folder, attempt, data file or COMMIT to `other`, and leave a link in its place."""
    folder = run / f"step-{step:08d}"
    known = {"step": folder, "attempt": next(folder.glob("a-*")), "file": next(folder.glob("a-*/*.distcp"))}
    target = known.get(what, folder / what)
    other.mkdir()
    shutil.move(target, other / target.name)
    target.symlink_to(other / target.name)


@pytest.mark.parametrize("what", ["step", "attempt", "file", "COMMIT.json"])
def test_the_newest_own_step_stays_beside_a_newer_link(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, 3)
    behind_a_link(run, tmp_path / "other", 3, what)
    code, text = prune(run, capsys, "--keep-last", "1", "--yes")
    assert code == 0, text
    assert [info.step for info in list_checkpoints(str(run))] == [2, 3]
    shutil.rmtree(tmp_path / "other")
    assert loads(run, 2)


def test_retention_counts_no_linked_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, 3)
    behind_a_link(run, tmp_path / "other", 3, "step")
    assert apply_retention(FileStore(str(run)), RetentionPolicy(keep_last=1), now_s=0.0) == [1]


def test_what_a_linked_step_needs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fill(run, 1, 2, incremental=True)
    fill(run, 3, 4)
    behind_a_link(run, tmp_path / "other", 2, "step")
    code, text = prune(run, capsys, "--keep-last", "1", "--yes")
    assert (code, "symbolic link" in text) == (0, True)
    assert [info.step for info in list_checkpoints(str(run))] == [1, 2, 4]
    assert loads(run, 2)


def test_ls_lists_the_others_beside_a_forbidden_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "run", 1, 2, 3)
    there, listed = FileStore.stat, FileStore.list

    def stat(store: FileStore, path: str) -> ObjectInfo:
        if path.startswith(STEP):
            raise PermissionDeniedError(f"{path}: Permission denied")
        return there(store, path)

    def listing(store: FileStore, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith(STEP):
            raise PermissionDeniedError(f"{prefix}: Permission denied")
        return listed(store, prefix)

    monkeypatch.setattr(FileStore, "stat", stat)
    monkeypatch.setattr(FileStore, "list", listing)
    assert main(["ls", str(tmp_path / "run")]) == 1
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [["1", "committed"], ["2", "unreadable"], ["3", "committed"]]
