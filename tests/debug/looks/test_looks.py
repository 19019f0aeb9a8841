"""What one look, and what several looks at the stacks of a job show that knows nothing of us."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.live.attach import attach, look_again
from titan_ckpt.debug.read.several import find_several
from titan_ckpt.store.open import open_store

WAITS = """\
Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    wrapper (torch/distributed/c10d_logger.py:81)
    step (/job/train.py:{line})
    <module> (/job/train.py:90)
"""
COMPUTES = """\
Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (active): "MainThread"
    tokenize (/job/data.py:{line})
    <module> (/job/train.py:88)
"""
LOADS = """\
Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    __getitem__ (/job/data.py:12)
    fetch (/usr/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py:54)
    _worker_loop (/usr/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py:374)
    <module> (/job/train.py:88)
"""
STEPS = "".join(f"2026-11-22 10:17:{step:02d},320 INFO step {step} loss 1.0\n" for step in range(9))


def look(folder: Path, busy: int, *, line: int = 33) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(4):
        text = COMPUTES.format(pid=70 + rank, line=line) if rank == busy else WAITS.format(pid=70 + rank, line=61)
        (folder / f"rank_{rank}.pyspy.txt").write_text(text)


def log_steps(folder: Path, more: str = "") -> None:
    for rank in range(4):
        (folder / f"rank_{rank}.log").write_text(STEPS + more)


def judged(folder: Path) -> Verdict:
    return diagnose(open_run(str(folder)))[0]


def test_one_look_beside_logs_of_steps_accuses_nobody(tmp_path: Path) -> None:
    look(tmp_path / "stacks", 1)
    log_steps(tmp_path)
    top = judged(tmp_path)
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (1,))
    assert "do not show that the job stands still" in top.headline
    assert "data.py:33" in top.headline
    assert any("look again" in step for step in top.next_steps)


def test_who_took_stacks_of_a_job_without_logs_had_a_reason(tmp_path: Path) -> None:
    look(tmp_path, 1)
    assert judged(tmp_path).culprits == (1,)


def test_two_looks_at_the_same_place_show_a_hang(tmp_path: Path) -> None:
    for number in (0, 1):
        look(tmp_path / f"look{number}", 1)
    log_steps(tmp_path)
    assert find_several(open_store(str(tmp_path))) == []
    top = judged(tmp_path)
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))


def test_another_rank_outside_at_each_look_is_progress(tmp_path: Path) -> None:
    for number in (0, 1, 2):
        look(tmp_path / f"look{number}", number)
    log_steps(tmp_path)
    top = judged(tmp_path)
    assert (top.verdict, top.culprits, top.suspects) == ("RUNNING", (), ())


def test_a_loop_that_another_line_of_shows_still_hangs(tmp_path: Path) -> None:
    """Who waits for it did not move."""
    for number in (0, 1):
        look(tmp_path / f"look{number}", 1, line=30 + number)
    log_steps(tmp_path)
    assert judged(tmp_path).culprits == (1,)


def test_folders_of_hosts_are_no_looks(tmp_path: Path) -> None:
    for number in (0, 1):
        look(tmp_path / f"node{number}", 1)
    assert len(find_several(open_store(str(tmp_path)))) == 2


def test_a_data_loaders_worker_is_not_its_rank(tmp_path: Path) -> None:
    look(tmp_path, 1)
    (tmp_path / "rank_1.pid_99.pyspy.txt").write_text(LOADS.format(pid=99))
    run = open_run(str(tmp_path))
    assert [stack.source for stack in run.ranks[1].stacks] == ["rank_1.pyspy.txt"]
    (tmp_path / "rank_1.pyspy.txt").unlink()
    assert len(open_run(str(tmp_path)).ranks[1].stacks) == 1, "better than nothing"


@pytest.mark.parametrize(
    "word", ["WARNING no progress for 600 s, dumping the flight recorder", "[watcher] job is hung, killing it"]
)
def test_a_log_that_tells_of_a_hang_is_no_running_job(word: str, tmp_path: Path) -> None:
    log_steps(tmp_path)
    assert judged(tmp_path).verdict == "RUNNING"
    log_steps(tmp_path, f"2026-11-22 10:27:12,000 {word}\n")
    top = judged(tmp_path)
    assert top.verdict == "INSUFFICIENT_DATA"
    assert any(word.split("]")[-1].strip() in item.text for item in top.evidence)


@pytest.mark.parametrize(("slept", "culprits"), [({0: 0, 2: 0, 3: 0}, (1,)), ({0: 17, 1: 32, 2: 17, 3: 17}, ())])
def test_threads_that_ran_between_two_looks_may_have_gone_on(
    slept: dict[int, int], culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """One rank is slow in each step: it and those that wait for it are at the same lines whenever one looks."""
    for rank in range(4):
        text = (COMPUTES if rank == 1 else WAITS).format(pid=70 + rank, line=61)
        for look_at in ("", ".again"):
            (tmp_path / f"rank_0000{rank}.pid_{70 + rank}{look_at}.pyspy.stacks").write_text(text)
        document = {"titan_ckpt": "process", "host": "h", "pid": 70 + rank, "state": "S (sleeping)", "rank": rank}
        process = {**document, "world_size": 4, "threads": [], "slept_since": slept.get(rank, 5)}
        (tmp_path / f"rank_0000{rank}.pid_{70 + rank}.process.json").write_text(json.dumps(process))
    top = judged(tmp_path)
    assert (top.culprits, top.suspects) == (culprits, () if culprits else (1,))


def test_a_second_look_counts_how_often_a_process_slept() -> None:
    """A real one, which sleeps again and again; of one without stacks nothing is looked at again."""
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.05)"]) as sleeper:
        try:
            time.sleep(1.0)
            first = attach(sleeper.pid)
            time.sleep(1.0)
            assert attach(sleeper.pid).sleeps - first.sleeps > 5
            assert look_again(replace(first, note="no py-spy")) == {}
        finally:
            sleeper.kill()
