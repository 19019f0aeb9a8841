"""The recorder and `collect` end, stop or follow nothing that is not the job's own, and keep evidence private."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug.live.collect import collect
from titan_ckpt.debug.live.publish import publish, publish_files
from titan_ckpt.debug.record import demand as demand_module
from titan_ckpt.debug.record.demand import demand
from titan_ckpt.debug.record.private_socket import Peer
from titan_ckpt.debug.record.recorder import Recorder
from titan_ckpt.errors import AlreadyExistsError, StoreError
from titan_ckpt.private_files import PrivateFolder, open_regular
from titan_ckpt.store.open import open_store


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder.start(tmp_path / "box", rank=0, world_size=1, stall_s=0)
    yield recorder
    recorder.stop()


def write_sidecar(folder: Path, pid: int, **more: object) -> None:
    value = {"titan_ckpt": "sidecar", "rank": 0, "world_size": 1, "host": socket.gethostname(), "pid": pid, **more}
    (folder / "rank_00000.sidecar.json").write_text(json.dumps(value))


def test_every_file_and_folder_is_private(recorder: Recorder) -> None:
    recorder.dump("demand")
    assert stat.S_IMODE(recorder.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in recorder.folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes


PLANTED = ("box", "sidecar.json", "gil.stacks", "fatal.stacks", "demand.stacks", "demand.pickle", "sock", "ask")


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_planted_names_are_neither_followed_nor_fatal(kind: str, name: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "box"
    victim.write_text("precious")
    folder.mkdir()
    planted = folder / f"rank_00000.{name}"
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    recorder = Recorder.start(folder, rank=0, world_size=1, stall_s=0)
    recorder.dump("demand")
    recorder.stop()
    assert victim.read_text() == "precious"
    assert planted.is_symlink() == (kind == "link")
    assert planted.is_fifo() == (kind == "pipe")


def test_a_full_disk_costs_the_box_and_not_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with Recorder.start(tmp_path / "box", rank=0, world_size=1, stall_s=0) as recorder:
        with recorder.phase("forward", step=1):
            pass
        assert not (tmp_path / "box" / "rank_00000.box").exists()


FORK = """
    import multiprocessing, os, signal, sys, time
    from titan_ckpt.debug.record.recorder import Recorder
    recorder = Recorder.start(sys.argv[1], rank=0, world_size=1, stall_s=0)
    def child(ready):
        ready.send(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        time.sleep(60)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    assert here.recv()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM, process.exitcode
    recorder.dump("demand")
    recorder.stop()
    print("alive", os.path.exists(sys.argv[1] + "/rank_00000.sigterm.stacks"))
"""


def test_a_worker_that_is_terminated_does_not_end_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORK), str(tmp_path / "box")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "alive False\n"), done.stderr


def test_stop_in_a_thread_leaves_no_closed_descriptor(tmp_path: Path) -> None:
    recorder = Recorder.start(tmp_path / "box", rank=0, world_size=1, stall_s=0)
    thread = threading.Thread(target=recorder.stop)
    thread.start()
    thread.join()
    descriptor = signal.set_wakeup_fd(-1)
    assert stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    assert recorder._signals is not None
    recorder._signals.stop()


def test_no_dump_for_another_user(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "peer_of", lambda _: Peer(pid=1, uid=54321))
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(recorder.folder / "rank_00000.ask"))
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(demand_module.DUMP)
        assert connection.recv(10) == b""
    assert demand(str(recorder.folder / "rank_00000.ask")) is None
    assert not (recorder.folder / "rank_00000.demand.stacks").exists()


SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


@pytest.mark.parametrize("claims", ["pid alone", "a box that others map", "a socket of another program"])
def test_a_process_that_is_not_a_rank_is_left_alone(claims: str, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "other"))
    listener.listen()
    write_sidecar(tmp_path, process.pid, ask=str(tmp_path / "other") if claims.startswith("a socket") else "")
    if claims.startswith("a box"):
        (tmp_path / "rank_00000.box").symlink_to(sys.executable)
    (found,) = collect(tmp_path, wait_s=0.2)
    assert (found.state == "gone") == (not claims.startswith("a socket"))
    assert process.poll() is None
    process.kill()
    process.communicate()
    listener.close()


# --------------------------------------------------------------------------------------------------------- publishing


def test_logs_of_ranks_keep_their_folders(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / "job" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"rank {rank}")
    (tmp_path / "box").mkdir()
    store = open_store(str(tmp_path / "out"))
    for pattern in ("attempt_0/*/stderr.log", "**/stderr.log"):
        assert publish(tmp_path / "box", str(tmp_path / "job" / pattern), store, is_forced=True) == []
    assert {entry.path: store.read(entry.path) for entry in store.list()} == {
        f"logs/attempt_0/{rank}/stderr.log": f"rank {rank}".encode() for rank in range(3)
    }


def test_nothing_that_was_collected_before_is_replaced(tmp_path: Path) -> None:
    folder, store = tmp_path / "box", open_store(str(tmp_path / "out"))
    folder.mkdir()
    (folder / "rank_00000.demand.stacks").write_text("new")
    store.write("rank_00000.demand.stacks", [b"old"])
    with pytest.raises(AlreadyExistsError, match="--force"):
        publish(folder, None, store, is_forced=False)
    assert store.read("rank_00000.demand.stacks") == b"old"
    publish(folder, None, store, is_forced=True)
    assert store.read("rank_00000.demand.stacks") == b"new"


def test_only_the_owner_can_read_what_was_collected(tmp_path: Path) -> None:
    """As the recorder's own files: a black box holds stacks, command lines and whatever a log printed."""
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "rank_00000.demand.stacks").write_text("stack")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("log")
    before = os.umask(0o022)
    try:
        publish(tmp_path / "box", str(tmp_path / "logs" / "*.log"), open_store(str(tmp_path / "out")), is_forced=False)
        publish_files({"pid_1.stacks": b"stack"}, open_store(str(tmp_path / "out")), is_forced=False)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777
        for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    }
    assert modes == {
        "out": 0o700,
        "out/logs": 0o700,
        "out/logs/a.log": 0o600,
        "out/rank_00000.demand.stacks": 0o600,
        "out/pid_1.stacks": 0o600,
    }


def test_links_pipes_and_secrets_are_not_published(tmp_path: Path) -> None:
    secret, folder, logs = tmp_path / "id_rsa", tmp_path / "box", tmp_path / "logs"
    secret.write_text("private")
    folder.mkdir()
    logs.mkdir()
    (folder / "LICENSE").symlink_to(secret)
    os.link(secret, folder / "hard")
    os.mkfifo(folder / "pipe")
    (logs / "a.log").symlink_to(secret)
    (logs / "b.log").write_text("export HF_TOKEN=abcdefgh\n")
    (folder / "e.json").write_text(json.dumps({"env": {"API_KEY": "abcdefgh"}, "url": "s3://k:abcdefgh@b/x"}))
    store = open_store(str(tmp_path / "out"))
    left_out = publish(folder, str(logs / "*.log"), store, is_forced=False)
    assert len(left_out) == 4, left_out
    content = {entry.path: store.read(entry.path).decode() for entry in store.list()}
    assert set(content) == {"e.json", "logs/b.log"}
    assert not any("abcdefgh" in text or "private" in text for text in content.values())
    assert json.loads(content["e.json"])["url"] == "s3://***@b/x"


def test_a_log_folder_swapped_for_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("logs", "private", "box"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.log").write_text(f"of {name}")
    real = os.path.isfile

    def swap(path: str) -> bool:
        found = real(path)
        if not (tmp_path / "logs").is_symlink():
            (tmp_path / "logs").rename(tmp_path / "away")
            (tmp_path / "logs").symlink_to(tmp_path / "private")
        return found

    monkeypatch.setattr(os.path, "isfile", swap)
    store = open_store(str(tmp_path / "out"))
    left_out = publish(tmp_path / "box", str(tmp_path / "logs" / "*.log"), store, is_forced=False)
    assert ["not followed" in reason for reason in left_out] == [True]
    assert not (tmp_path / "out" / "logs").exists()


def test_collect_writes_through_no_planted_link(recorder: Recorder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (recorder.folder / f"processes.{socket.gethostname()}.json").symlink_to(victim)
    with pytest.raises(AlreadyExistsError, match="symbolic link"):
        collect(recorder.folder, wait_s=0.2)
    assert victim.read_text() == "precious"


def test_collect_says_what_it_left_out(recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorder.folder / "planted").symlink_to("/etc/passwd")
    assert main(["debug", "collect", str(recorder.folder), "--out", str(tmp_path / "out")]) == 0
    assert "left out" in capsys.readouterr().err
    assert (tmp_path / "out" / "rank_00000.demand.stacks").exists()
    assert main(["debug", "collect", str(recorder.folder), "--out", str(tmp_path / "out")]) == 3
    assert main(["debug", "collect", str(recorder.folder), "--out", str(tmp_path / "out"), "--force"]) == 0


# -------------------------------------------------------------------------------------------------------- private files


def test_a_private_file_replaces_only_a_file_of_ours(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    folder.write("a", b"1")
    folder.write("a", b"2")
    assert folder.read("a") == b"2"
    (tmp_path / "d").mkdir()
    (tmp_path / "l").symlink_to(tmp_path / "a")
    for name in ("d", "l"):
        with pytest.raises(AlreadyExistsError):
            folder.write(name, b"3")
        with pytest.raises(StoreError):
            open_regular(tmp_path / name)
    folder.remove("l")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d", "l"]
    assert folder.read("a") == b"2"


def test_a_swapped_folder_leads_nowhere_else(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").symlink_to(tmp_path / "other")
    folder.write("a", b"1")
    assert list((tmp_path / "other").iterdir()) == []
    assert (tmp_path / "moved" / "a").read_bytes() == b"1"
