"""Looks at jobs that run: healthy ones are never accused, and `debug` looks twice before it accuses a live one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import cli
from titan_ckpt.debug.diagnosis import standstill
from titan_ckpt.debug.record.environment import environment
from tools.healthy import jobs as healthy_jobs
from tools.healthy.campaign import looks_at

pytestmark = pytest.mark.dist

HANGS = """
import sys, time, torch, torch.distributed as dist
from titan_ckpt.debug import Recorder
folder, rank = sys.argv[1], int(sys.argv[2])
Recorder.start(folder, rank=rank, world_size=2, stall_s=3600)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for step in range(12):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.02)
open(f"{folder}/reached_{rank}", "w").close()
if rank == 1:
    time.sleep(3600)  # the culprit
dist.all_reduce(torch.ones(4))
"""


def test_looks_at_a_healthy_job_accuse_nobody(tmp_path: Path) -> None:
    found = looks_at("slow_save", tmp_path / "job", looks=5, seconds=4, ranks=2, seed=1)
    assert [one for one in found if one.is_wrong] == []
    assert found[-1].verdict in ("HEALTHY", "STRAGGLER")


@contextmanager
def hung_job(folder: Path) -> Iterator[None]:
    variables = {**os.environ, **environment(200), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", HANGS, str(folder), str(rank)], env=variables) for rank in range(2)
    ]
    try:
        _wait_for(*(folder / f"reached_{rank}" for rank in range(2)))
        yield
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait_for(*paths: Path) -> None:
    give_up = time.monotonic() + 240
    while not all(path.exists() for path in paths):
        assert time.monotonic() < give_up, "the job did not start"
        time.sleep(0.1)


def test_hung_live_job_is_accused_at_the_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(standstill, "LEAST_STANDSTILL_S", 4.0)
    monkeypatch.setattr(standstill, "TIMES_LONGEST_GAP", 0.0)
    monkeypatch.setattr(cli, "SECOND_LOOK_S", 8.0)
    with hung_job(tmp_path):
        code = main(["debug", str(tmp_path)])
    shown = capsys.readouterr()
    assert "looking again in 8 s" in shown.err
    assert code == 1
    assert shown.out.startswith("STUCK_ON_CPU: rank 1 ")


def test_second_look_at_a_healthy_job_lets_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SECOND_LOOK_S", 0.2)
    ranks = healthy_jobs.start("pipeline", tmp_path, world=2, seconds=600)
    try:
        _wait_for(tmp_path / "rank_0.log", tmp_path / "rank_00001.box")
        codes = {main(["debug", str(tmp_path)]) for _ in range(8)}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes <= {0, 5}
    assert "looking again in" in capsys.readouterr().err
