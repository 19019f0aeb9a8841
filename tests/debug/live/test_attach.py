"""`debug collect --pid`: processes that know nothing of us, found and looked at without a signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import open_run
from titan_ckpt.debug.live.attach import attach, find_training
from titan_ckpt.errors import NotFoundError, UsageError

SLEEPER = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process of rank 3 of 8 with a secret in its environment; it runs until its input is closed."""
    environment = {
        **os.environ,
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "API_TOKEN": "s3cr3t",
    }
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.poll() is None, "it was ended by what looked at it"


def test_collect_pid_writes_a_folder_that_debug_reads(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    out = tmp_path / "seen"
    assert main(["debug", "collect", "--pid", str(sleeper.pid), "--out", str(out)]) == 0
    run = open_run(str(out))
    record = run.ranks[3]
    assert (run.world_size, record.pid, record.host) == (8, sleeper.pid, os.uname().nodename)
    assert record.process_state.startswith("S")
    assert not record.has_recorder


def test_nothing_of_the_environment_but_places_is_kept(sleeper: subprocess.Popen[str]) -> None:
    found = attach(sleeper.pid)
    content = b"".join(found.files.values())
    assert b"s3cr3t" not in content
    assert b"API_TOKEN" not in content
    [document] = [json.loads(data) for name, data in found.files.items() if name.endswith(".process.json")]
    assert document["environment"]["MASTER_ADDR"] == "10.0.0.1"
    assert document["threads"][0]["tid"] == sleeper.pid


def test_collect_pid_replaces_nothing_without_force(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    command = ["debug", "collect", "--pid", str(sleeper.pid), "--out", str(tmp_path)]
    assert main(command) == 0
    assert main(command) == 3
    assert main([*command, "--force"]) == 0


def test_py_spy_is_asked_without_stopping_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text(
        '#!/bin/sh\necho "Process $6: python train.py --token=hf_abcdefghijklmnopqrstuvwxyz0123456789"\necho "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = attach(os.getpid())
    [stacks] = [data for name, data in found.files.items() if name.endswith(".pyspy.stacks")]
    assert b"--nonblocking" in stacks
    assert b"hf_abcdefghijklmnopqrstuvwxyz" not in stacks


def make_process(proc: Path, pid: int, *, parent: int = 1, environment: str = "", maps: str = "") -> None:
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "environ").write_text(environment)
    (folder / "maps").write_text(maps)
    (folder / "status").write_text(f"Name:\tpython\nState:\tR (running)\nPPid:\t{parent}\n")


def test_training_is_found_by_rank_and_libtorch(tmp_path: Path) -> None:
    torch = "7f00-7f01 r-xp 0 0 1 /x/torch/lib/libtorch_cpu.so\n"
    make_process(tmp_path, 100, environment="RANK=0\0WORLD_SIZE=2\0", maps=torch)
    make_process(tmp_path, 101, environment="RANK=1\0WORLD_SIZE=2\0", maps=torch)
    make_process(tmp_path, 102, environment="RANK=1\0WORLD_SIZE=2\0", maps=torch, parent=101)  # a loader's worker
    make_process(tmp_path, 103, environment="HOME=/root\0", maps=torch)
    make_process(tmp_path, 104, environment="RANK=1\0")
    (tmp_path / "self").mkdir()
    assert find_training(tmp_path) == [100, 101]


def test_process_without_a_rank_keeps_its_pid(tmp_path: Path) -> None:
    make_process(tmp_path, 100, environment="HOME=/root\0")
    found = attach(100, tmp_path)
    assert found.rank is None
    assert "pid_100.process.json" in found.files


def test_process_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_process(tmp_path, 100)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to user"):
        attach(100, tmp_path)
    with pytest.raises(NotFoundError, match="no process 4194305"):
        attach(4194305)


def test_process_that_is_gone_is_left_out(
    sleeper: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "collect", "--pid", "4194305", str(sleeper.pid), "--out", str(tmp_path / "seen")]) == 0
    assert "left out: no process 4194305" in capsys.readouterr().err
    assert main(["debug", "collect", "--pid", "4194305", "--out", str(tmp_path / "none")]) == 3


def test_refused_py_spy_says_what_to_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied (os error 13)' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "SYS_PTRACE" in attach(os.getpid()).note


PLAIN = """
import os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
dist.barrier()
print("ready", flush=True)
if rank == 1:
    sys.stdin.read()
else:
    dist.all_reduce(torch.zeros(4))
"""


@pytest.mark.dist
def test_plain_torch_job_is_found_and_read(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN, str(tmp_path / "store")],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        pids = [process.pid for process in ranks]
        assert set(pids) <= set(find_training())
        assert main(["debug", "collect", "--pid", *map(str, pids), "--out", str(tmp_path / "seen")]) == 0
        assert [process.poll() for process in ranks] == [None, None]
        run = open_run(str(tmp_path / "seen"))
        assert [run.ranks[rank].pid for rank in (0, 1)] == pids
        assert all(run.ranks[rank].process_state[:1] in "RSD" for rank in (0, 1))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "words", [["--pid", "1"], ["--pid", "1", "--out", "x", "--logs", "y"], ["folder", "--pid", "1"], []]
)
def test_collect_refuses_unclear_words(words: list[str]) -> None:
    assert main(["debug", "collect", *words]) == 2
