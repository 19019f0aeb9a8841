"""Threads beside the main one: a lock that one holds while it waits for other ranks, an exception that ends one. The stacks are
py-spy's (0.4, with and without `--native`), of a recorded job of torch 2.13, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

HEAD = (
    'Process 90{rank}: python -u job.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread 90{rank} (idle): "MainThread"\n'
)
ENTRY = "    main (job.py:45)\n    <module> (job.py:56)\n"
LOCK = """\
    0x7f408c8aed90 (libc.so.6)
    PyThread_acquire_lock_timed (libpython3.11.so.1.0)
    lock_PyThread_acquire_lock (libpython3.11.so.1.0)
"""
CALL = (
    "    {op} (torch/distributed/distributed_c10d.py:3252)\n"
    "    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)\n"
)
THREAD = """\
Thread 28469 (idle): "metrics"
{call}    main.<locals>.back (job.py:42)
    Thread.run (threading.py:982)
    Thread._bootstrap (threading.py:1002)
"""
REDUCE, BROADCAST = CALL.format(op="all_reduce"), CALL.format(op="broadcast")
READS = "    read_shard (data.py:61)\n"


def judged(folder: Path, *stacks: str) -> Verdict:
    for rank, stack in enumerate(stacks):
        (folder / f"rank_{rank}.txt").write_text(HEAD.format(rank=rank) + stack)
    return diagnose(open_run(str(folder)))[0]


def main(inner: str, thread: str = "") -> str:
    return inner + ENTRY + (THREAD.format(call=thread) if thread else "")


@pytest.mark.parametrize("lock", ["", LOCK])
def test_lock_that_a_thread_in_a_collective_holds(lock: str, tmp_path: Path) -> None:
    top = judged(tmp_path, main(BROADCAST), main(lock, REDUCE), main(BROADCAST), main(BROADCAST))
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))
    assert (top.subtype == "python_lock") == bool(lock)
    assert "job.py:45, its thread metrics in all_reduce at job.py:42" in top.headline
    assert {("job.py", 45), ("job.py", 42)} <= {(e.file, e.line) for e in top.evidence if e.rank == 1}


@pytest.mark.parametrize("lock", ["", LOCK])
def test_thread_in_the_others_collective_is_there(lock: str, tmp_path: Path) -> None:
    top = judged(tmp_path, main(REDUCE), main(lock, REDUCE), main(REDUCE), main(REDUCE))
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())


def test_all_wait_in_threads_for_which_the_main_ones_wait(tmp_path: Path) -> None:
    top = judged(tmp_path, *[main(LOCK, REDUCE)] * 4)
    assert (top.verdict, top.culprits, top.victims) == ("INSUFFICIENT_DATA", (), (0, 1, 2, 3))
    assert any("all_reduce at job.py:42" in item.text for item in top.evidence)


def test_rank_whose_thread_did_not_come_is_named(tmp_path: Path) -> None:
    top = judged(tmp_path, main(LOCK, REDUCE), main(LOCK, REDUCE), main(LOCK, READS), main(LOCK, REDUCE))
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (2,))


def test_threads_beside_main_threads_that_work_are_no_hang(tmp_path: Path) -> None:
    top = judged(tmp_path, main(READS, REDUCE), main(READS), main(READS, REDUCE))
    assert (top.verdict, top.culprits) == ("RUNNING", ())


def test_second_look_that_shows_the_same_is_no_running_job(tmp_path: Path) -> None:
    for look in (1, 2):
        for rank in range(3):
            (tmp_path / f"rank_{rank}.look{look}.txt").write_text(HEAD.format(rank=rank) + main(READS))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), ())
    assert ("data.py", 61) in {(item.file, item.line) for item in top.evidence}


def test_second_look_that_shows_another_line_is_no_hang(tmp_path: Path) -> None:
    for look, line in ((1, 61), (2, 77)):
        for rank in range(3):
            stack = main(READS.replace("61", str(line)))
            (tmp_path / f"rank_{rank}.look{look}.txt").write_text(HEAD.format(rank=rank) + stack)
    assert diagnose(open_run(str(tmp_path)))[0].verdict == "RUNNING"


RAISED = """\
Exception in thread Thread-3 (upload):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/job/train.py", line 31, in upload
    raise OSError("bucket gone")
OSError: bucket gone
"""
SPAWNED = (
    "[2026-11-24 03:00:00,000] [INFO] [launch.py:256:main] process 90{rank} spawned with command: "
    "['/usr/bin/python', '-u', 'train.py', '--local_rank={rank}']\n"
)
ENDED = "[2026-11-24 04:00:00,000] [INFO] [launch.py:347:main] Process 90{rank} exits successfully.\n"


def test_lost_thread_of_a_job_that_ended_well_is_a_note(tmp_path: Path) -> None:
    spawned, ended = ("".join(line.format(rank=rank) for rank in range(2)) for line in (SPAWNED, ENDED))
    (tmp_path / "console.log").write_text(spawned + "step 1\nstep 2\n" + RAISED + ended)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert top.verdict == "HEALTHY"
    assert any("thread Thread-3 (upload)" in item.text and "bucket gone" in item.text for item in top.evidence)
