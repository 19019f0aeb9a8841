"""One rank waits in another call than most, by stacks or watchdogs: the root of a gather waits for whoever left it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

SPY = 'Process 80{0}: python train.py\nPython v3.10.12 (/usr/bin/python3.10)\n\nThread 80{0} (idle): "MainThread"\n'
WAIT = "    {1} (torch/distributed/distributed_c10d.py:4700)\n    main (train.py:{2})\n    <module> (train.py:140)\n"
WATCHDOG = (
    "[rank{0}]:[E1127 03:21:40.1 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600012 milliseconds before timing "
    "out.\n"
)


@pytest.mark.parametrize(
    ("call", "accused"), [("gather", ()), ("scatter", ()), ("broadcast", ()), ("all_gather", (0,))]
)
def test_one_rank_in_another_call_than_most(call: str, accused: tuple[int, ...], tmp_path: Path) -> None:
    for rank in range(4):
        where = (call, 40) if rank == 0 else ("barrier", 125)
        (tmp_path / f"rank{rank}.txt").write_text((SPY + WAIT).format(rank, *where))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert top.culprits == accused
    assert accused or top.suspects


@pytest.mark.parametrize(("call", "root", "accused"), [("broadcast", 2, ()), ("broadcast", 0, (2,)), ("gather", 0, ())])
def test_the_root_by_the_line_of_the_traceback(call: str, root: int, accused: tuple[int, ...], tmp_path: Path) -> None:
    """The root waits for whoever left it out; another rank in a broadcast has left the way of all others, root included."""
    trace = (
        '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/job/train.py", line {1}, in step\n'
        "[rank{0}]:     {2}\n"
        '[rank{0}]:   File "/venv/lib/torch/distributed/distributed_c10d.py", line 3151, in {3}\n[rank{0}]:     work.wait()\n'
        "[rank{0}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 14000ms for "
        "recv operation to complete\n"
    )
    alone = (40, f"dist.{call}(x, {'src' if call == 'broadcast' else 'dst'}={root})", call)
    text = "".join(trace.format(r, *(alone if r == 2 else (50, "dist.all_reduce(x)", "all_reduce"))) for r in range(4))
    (tmp_path / "log.txt").write_text(text)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == accused


@pytest.mark.parametrize(
    ("number", "op", "accused"), [(40, "BROADCAST", (3,)), (800, "_ALLGATHER_BASE", ()), (41, "_ALLGATHER_BASE", (3,))]
)
def test_numbers_far_apart_are_of_other_groups(number: int, op: str, accused: tuple[int, ...], tmp_path: Path) -> None:
    text = "".join(WATCHDOG.format(rank, *((number, op) if rank == 3 else (40, "ALLREDUCE"))) for rank in range(4))
    (tmp_path / "log.txt").write_text(text)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == accused
