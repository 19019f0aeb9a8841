"""Errors that a rank logged and went on after: its lines or its operations show that, whatever words it has for a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import START_NS, job
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Frame, Heartbeat, LogEvent, RankLog, Run, StackSnapshot, Thread

ROUTINE = "[2026-03-02 10:00:{0:02},100][myjob][INFO] it {0} loss={1:.4f}\n"
CAUGHT = """\
[2026-03-02 10:00:03,633][myjob][ERROR] could not parse metric, ignored
Traceback (most recent call last):
  File "/job/train.py", line 4, in <module>
ValueError: invalid literal for int() with base 10: 'N/A'
"""


def rounds(first: int, end: int) -> str:
    return "".join(ROUTINE.format(number, 1 / (number + 1)) for number in range(first, end))


@pytest.mark.parametrize(
    ("after", "culprits"),
    [
        (rounds(3, 5), ()),
        ("", (0,)),
        ("[2026-03-02 10:00:04,100][myjob][INFO] saving checkpoint 3\n", (0,)),
        (ROUTINE.format(4, 0.2).replace("INFO", "ERROR"), (0,)),
    ],
)
def test_a_logged_error_before_more_of_the_same_was_caught(
    after: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(rounds(0, 3) + (CAUGHT + after if rank == 0 else rounds(3, 5)))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == culprits


def test_a_line_that_begins_only_after_the_error_is_no_routine(tmp_path: Path) -> None:
    ending = "".join(f"[2026-03-02 10:01:{s:02},100][myjob][INFO] waiting for uploads {s}\n" for s in range(9))
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(rounds(0, 9) + (CAUGHT + ending if rank == 0 else ""))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (0,)


TORCH = "/lib/python3.11/site-packages/torch/"


def with_error(run: Run, inner: Frame, source: str = "rank_0.log") -> Run:
    """Rank 0 printed a traceback, its recorder ticks, and its main thread is in `inner`."""
    error = LogEvent(
        kind=EventKind.EXCEPTION, rank=0, text="ValueError: N/A", source=source, line=3,
        frame=Frame(file="/job/train.py", line=4, function="parse"), values={"type": "ValueError"},
    )  # fmt: skip
    user = Frame(file="/job/train.py", line=9, function="step")
    stack = StackSnapshot(
        source="s", reason="stall", threads=(Thread(name="MainThread", frames=(inner, user), is_main=True),)
    )
    beat = Heartbeat(step=-1, phase="", phase_ns=0, alive_ns=START_NS + 90 * 10**9, source="b")
    log = RankLog(source=source, events=(error,))
    record = replace(run.ranks[0], log=log, heartbeat=beat, stacks=(stack,), has_recorder=True)
    return replace(run, ranks={**run.ranks, 0: record})


BACKWARD = Frame(file=f"{TORCH}autograd/graph.py", line=9, function="backward")
BARRIER = Frame(file=f"{TORCH}distributed/distributed_c10d.py", line=9, function="barrier")
LOADING = Frame(file="/job/data.py", line=7, function="load")


@pytest.mark.parametrize(
    ("operations", "inner", "culprits"),
    [
        ("all_reduce@1 all_reduce@2 all_reduce@3?", BACKWARD, (1,)),
        ("barrier@1 barrier@1 barrier@1?", BARRIER, (1,)),
        ("all_reduce@1 all_reduce@1 barrier@5?", BARRIER, (0,)),
        ("barrier@1 barrier@1 barrier@5?", BARRIER, (0,)),
        ("all_reduce@1 all_reduce@1 all_reduce@1?", LOADING, (0,)),
    ],
)
def test_who_waits_in_its_routine_died_of_no_error(operations: str, inner: Frame, culprits: tuple[int, ...]) -> None:
    """A handler's own barrier is none: then the error is the cause."""
    done = operations.rpartition(" ")[0]
    run = with_error(job(f"0 2: {operations}\n1: {done}\nat 1: /job/data.py 7 load"), inner)
    assert diagnose(run)[0].culprits == culprits


def test_the_error_that_a_recorder_wrote_of_the_end_counts() -> None:
    run = job("0 2: all_reduce@1 all_reduce@1 all_reduce@1?\n1: all_reduce@1 all_reduce@1\nat 1: /job/data.py 7 load")
    assert diagnose(with_error(run, BACKWARD, "rank_00000.error.json"))[0].culprits == (0,)
