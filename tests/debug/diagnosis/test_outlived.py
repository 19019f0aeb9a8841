"""Errors that a rank logged and went on after: its lines or its operations show that, whatever words it has for a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import START_NS, job
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import TIMER, Frame, Heartbeat, LogEvent, RankLog, Run, StackSnapshot, Thread

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
        ("[2026-03-02 10:00:04,100][myjob][INFO] saving checkpoint 3\n", ()),
        (ROUTINE.format(4, 0.2).replace("INFO", "ERROR"), ()),
    ],
)
def test_a_logged_error_before_more_of_the_same_was_caught(
    after: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(rounds(0, 3) + (CAUGHT + after if rank == 0 else rounds(3, 5)))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == culprits


def test_a_line_that_begins_only_after_the_error_is_no_routine(tmp_path: Path) -> None:
    """It may have been caught all the same: a logger wrote the error."""
    ending = "".join(f"[2026-03-02 10:01:{s:02},100][myjob][INFO] waiting for uploads {s}\n" for s in range(9))
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(rounds(0, 9) + (CAUGHT + ending if rank == 0 else ""))
    found = diagnose(open_run(str(tmp_path)))[0]
    assert (found.culprits, found.suspects) == ((), (0,))


CRASHED = """\
[rank0] 2026-11-27 01:00:09 ERROR training failed
[rank0] Traceback (most recent call last):
[rank0]   File "/w/train.py", line 30, in main
[rank0]     step(x)
[rank0] ValueError: NaN in gradients
"""
FINISHED = "I1127 01:00:12.0 90 torch/distributed/elastic/agent/server/api.py:932] Done waiting for other agents. Elapsed: 0.1\n"


@pytest.mark.parametrize(
    ("end", "verdict", "suspects"),
    [("exit code: 0\n", "RANK_DIED", (0,)), (FINISHED, "HEALTHY", ())],
)
def test_the_code_of_a_shell_is_no_good_end_of_its_ranks(
    end: str, verdict: str, suspects: tuple[int, ...], tmp_path: Path
) -> None:
    """`python train.py | tee log; echo "exit code: $?"` gives the code of `tee`; torchrun's agents meet after good ends alone."""
    steps = "".join(f"[rank{rank}] 2026-11-27 01:00:0{n} step {n} loss 1.0\n" for n in range(1, 7) for rank in range(2))
    (tmp_path / "job.log").write_text(steps + CRASHED + end)
    found = diagnose(open_run(str(tmp_path)))[0]
    assert (found.verdict, found.culprits, found.suspects) == (verdict, (), suspects)


def test_tests_that_passed_before_a_crash_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("====== 3 passed in 1.02s ======\n[rank0] step 1\n" + CRASHED)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (0,)
    (tmp_path / "rank_0.log").write_text(CRASHED + "====== 3 passed in 1.02s ======\n")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()


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


MNIST = "Epoch 1 [{}/60000] loss: 0.06\n"  # pytorch/examples, mnist/main.py
BAR = "\r 10%|#         | {}/1000 [00:03<10:00,  1.64it/s]"  # tqdm's std.py, format_meter


@pytest.mark.parametrize(("line", "verdict"), [(MNIST, "RUNNING"), (BAR, "RUNNING")])
def test_any_progress_is_a_step(line: str, verdict: str, tmp_path: Path) -> None:
    for rank in range(3):
        numbers = [line.format(10 * number) for number in range(8)]
        (tmp_path / f"rank_{rank}.log").write_text("".join([*numbers[:4], CAUGHT if rank == 0 else "", *numbers[4:]]))
    assert diagnose(open_run(str(tmp_path)))[0].verdict == verdict


def test_a_bar_that_closes_below_the_error_is_no_progress(tmp_path: Path) -> None:
    told = "".join(BAR.format(number) for number in range(4)) + "\n" + CAUGHT + BAR.format(3) + "\n"
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(told if rank == 0 else BAR.format(3))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (0,)


CLOSED = """\
Traceback (most recent call last):
  File "/w/t.py", line 9, in step
    dist.all_reduce(t)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:42813

{}

Traceback (most recent call last):
  File "/w/t.py", line 12, in <module>
    go()
train.errors.StepFailed: step 30 failed
"""
LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("victims", [(3,), (0, 2, 3)])
def test_what_a_victim_raises_of_its_error_is_no_cause(link: str, victims: tuple[int, ...], tmp_path: Path) -> None:
    plain = CLOSED.partition("\n\n")[0] + "\n"
    for rank in range(4):
        told = "" if rank == 1 else CLOSED.format(link) if rank in victims else plain
        (tmp_path / f"rank_{rank}.log").write_text(f"step 29\n{told}")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (1,)


def test_a_connection_of_the_program_s_own_may_end_it(tmp_path: Path) -> None:
    told = CLOSED.format(LINKS[0]).replace("RuntimeError", "requests.exceptions.ConnectionError")
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text(
            "step 29\n" + (told if rank == 1 else CLOSED.partition("\n\n")[0] + "\n")
        )
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (1,)


@pytest.mark.parametrize(
    "line",
    [
        "2026-03-02 10:02:00 INFO mem: peak 71.2 GiB; CUDA out of memory events: 0",
        "oom_kill 0, out of memory: 0",
        "WARNING larger batches may run out of memory",
        "set expandable_segments to avoid out of memory",
    ],
)
def test_talk_of_memory_is_no_lack_of_it(line: str, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(f"step 29\n{line}\n")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()


TIMED_OUT = """\
Timeout (0:05:00)!
Thread 0x00007f1d3b7fe740 (most recent call first):
  File "/job/train.py", line 42 in poll
  File "/job/train.py", line 60 in <module>
"""


@pytest.mark.parametrize(
    ("suffix", "text", "verdict"),
    [
        ("txt", TIMED_OUT, "INSUFFICIENT_DATA"),
        ("stacks", TIMED_OUT, "INSUFFICIENT_DATA"),
        ("log", rounds(0, 3) + TIMED_OUT, "INSUFFICIENT_DATA"),
        ("log", rounds(0, 3) + TIMED_OUT + rounds(3, 5), "RUNNING"),
    ],
    ids=["text", "stacks", "log", "log-goes-on"],
)
def test_a_timer_that_went_off_last_shows_no_running_job(suffix: str, text: str, verdict: str, tmp_path: Path) -> None:
    """`faulthandler.dump_traceback_later` writes since something took longer than its author allows."""
    for rank in range(3):
        (tmp_path / f"rank_{rank}.{suffix}").write_text(text)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (verdict, ())
    said = [item for item in top.evidence if "a timer of faulthandler went off on ranks 0, 1, 2 in poll" in item.text]
    assert [(item.file, item.line) for item in said] == [("/job/train.py", 42)] * (verdict != "RUNNING")


def test_equal_operations_and_a_timer_are_no_calm_verdict() -> None:
    """All ranks may be stuck between two operations: the timer went off for something."""
    run = job("0 1 2: all_reduce@1 all_reduce@1")
    assert diagnose(run)[0].verdict == "RUNNING"
    stack = StackSnapshot(
        source="s", reason=TIMER, threads=(Thread(name="MainThread", frames=(LOADING,), is_main=True),)
    )
    ranks = {rank: replace(record, stacks=(stack,)) for rank, record in run.ranks.items()}
    assert diagnose(replace(run, ranks=ranks))[0].verdict == "INSUFFICIENT_DATA"
