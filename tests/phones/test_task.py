"""What a peer refuses before it works: another task in its home, wrong settings, an album that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.phones.choices import Choices
from examples.phones.peer import main, read_settings
from examples.phones.pictures import TRUTH, pictures_in
from examples.phones.settings import FILES
from examples.phones.task import TASK, take_home, task_of
from titan_ckpt.errors import ConfigError, DataError, StoreError, UsageError
from tools.paths import ROOT

HERE, THERE = "127.0.0.1:7001", "127.0.0.1:7002"


@pytest.fixture
def few(album: Path, tmp_path: Path) -> Path:
    """Three photographs, without the truth."""
    folder = tmp_path / "few"
    folder.mkdir()
    for path in pictures_in(album)[:3]:
        shutil.copy(path, folder)
    return folder


def _arguments(album: Path, home: Path, *more: str) -> list[str]:
    return ["--address", HERE, "--book", f"{HERE},{THERE}", "--home", str(home), "--album", str(album), *more]


def _task(album: Path, **choices: Any) -> dict[str, Any]:
    return task_of(pictures_in(album), Choices(**choices))


def _save(home: Path) -> None:
    (home / FILES / "descriptors").mkdir(parents=True)


def test_a_home_goes_on_with_its_own_task(few: Path, tmp_path: Path) -> None:
    take_home(tmp_path / "home", _task(few))
    _save(tmp_path / "home")
    take_home(tmp_path / "home", _task(few))


def test_a_home_without_checkpoints_takes_any_task(few: Path, tmp_path: Path) -> None:
    for seed in (7, 0):
        take_home(tmp_path / "home", _task(few, seed=seed))
    assert json.loads((tmp_path / "home" / TASK).read_text())["seed"] == 0


def test_a_home_of_another_album_is_refused(few: Path, tmp_path: Path) -> None:
    take_home(tmp_path / "home", _task(few))
    _save(tmp_path / "home")
    first, second, _ = pictures_in(few)
    shutil.copy(first, second)
    with pytest.raises(UsageError, match=r"another task: other pictures \(3 in both albums\)\. Choose another --home"):
        take_home(tmp_path / "home", _task(few))


def test_a_renamed_picture_makes_another_album(few: Path) -> None:
    before = _task(few)
    (first, *_), last = pictures_in(few), few / "z.jpg"
    first.rename(last)
    assert _task(few)["album"] != before["album"]


def test_a_home_of_other_choices_is_refused(few: Path, tmp_path: Path) -> None:
    take_home(tmp_path / "home", _task(few, seed=7, features="orb"))
    _save(tmp_path / "home")
    with pytest.raises(UsageError, match="another task: features orb instead of sift, seed 7 instead of 0"):
        take_home(tmp_path / "home", _task(few))
    assert json.loads((tmp_path / "home" / TASK).read_text())["seed"] == 7


def test_checkpoints_of_an_unknown_task_are_refused(few: Path, tmp_path: Path) -> None:
    _save(tmp_path / "home")
    with pytest.raises(UsageError, match=r"a task unknown: there is no task\.json\. Choose another --home"):
        take_home(tmp_path / "home", _task(few))


def test_a_home_that_cannot_be_written_is_refused(few: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/home: cannot be used: Not a directory; give this peer a folder"):
        take_home(tmp_path / "file" / "home", _task(few))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"featurs": "orb"}', "there is no featurs; there are features, width,"),
        ('{"features": "surf"}', "features is 'surf'; expected one of sift, orb, gradients"),
        ('{"words": 0}', "words is 0; expected a whole number from 1"),
        ('{"block": 0}', "block is 0; expected a whole number from 1"),
        ('{"restarts": 0}', "restarts is 0;"),
        ('{"iterations": 2.5}', "iterations is 2.5;"),
        ('{"batch": true}', "batch is True;"),
        ('{"width": "320"}', "width is '320';"),
        ('{"seed": -1}', "seed is -1;"),
        ('{"tolerance": NaN}', "tolerance is nan; expected a number from 0.0"),
        ('{"sample": 0}', "sample is 0; expected a number above 0, at most 1"),
        ("[1]", "expected a JSON object"),
        ("{words: 3}", "not JSON"),
    ],
)
def test_wrong_choices_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^choices: {message}"):
        Choices.read(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--address", "127.0.0.1:7003"], "127.0.0.1:7003 is not in --book"),
        (["--address", "127.0.0.1"], "'127.0.0.1': expected an address host:port"),
        (["--book", f"{HERE},here:port"], "'here:port': expected an address"),
        (["--save-every", "-1"], "--save-every is -1.0; expected 0.0 to"),
        (["--timeout", "nan"], "--timeout is nan;"),
        (["--look-every", "0"], "--look-every is 0.0;"),
        (["--choices", '{"words": 0}'], "choices: words is 0;"),
    ],
)
def test_wrong_settings_end_at_once(
    few: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(few, tmp_path / "home", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_an_album_needs_no_truth(few: Path, tmp_path: Path) -> None:
    (few / "00001.jpg").rename(few / "Holiday.JPEG")
    (few / "._00000.jpg").write_bytes(b"of another system")
    settings = read_settings(_arguments(few, tmp_path / "home"))
    assert not (few / TRUTH).exists()
    assert [path.name for path in settings.pictures] == ["00000.jpg", "00002.jpg", "Holiday.JPEG"]


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "No such file"), ("empty", "has no JPEG file")])
def test_an_album_without_pictures_is_refused(tmp_path: Path, folder: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"album .*{folder}: .*{message}"):
        read_settings(_arguments(tmp_path / folder, tmp_path / "home"))


def test_a_corrupt_picture_is_named(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (few / "00001.jpg").write_bytes(b"junk")
    assert main(_arguments(few, tmp_path / "home")) == 3
    assert f"error: {few / '00001.jpg'}: cannot be read as a picture" in capsys.readouterr().err


ORPHAN = """
import multiprocessing, os, time
from examples.phones.peer import die_with_parent

def work():
    die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    worker = multiprocessing.get_context("forkserver").Process(target=work, daemon=True)
    worker.start()
    worker.join()
"""


def test_a_worker_dies_with_its_peer(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command, environment = [sys.executable, str(tmp_path / "orphan.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as peer:
        assert peer.stdout is not None
        worker = int(peer.stdout.readline())
        try:
            peer.kill()
            peer.communicate(timeout=60)  # until nobody holds its output
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
