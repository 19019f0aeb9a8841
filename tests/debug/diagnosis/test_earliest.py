"""Several ranks raised exceptions of their own: the first of them is the cause, where the evidence shows which that is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run


def raised(error: str, line: int, before: str = "") -> str:
    return f'{before}Traceback (most recent call last):\n  File "/srv/train.py", line {line}, in main\n    step()\n{error}\n'


def top(folder: Path, **logs: str) -> Verdict:
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return diagnose(open_run(folder))[0]


def culprits(folder: Path, **logs: str) -> tuple[int, ...]:
    return top(folder, **logs).culprits


def test_the_earlier_exception_is_the_cause(tmp_path: Path) -> None:
    late = raised("lib.Stopped: no more work", 99, "2026-11-25 10:00:09 ERROR stopping\n")
    early = raised("ValueError: empty batch", 88, "2026-11-25 10:00:05 ERROR bad batch\n")
    assert culprits(tmp_path, rank0=late, rank1=early) == (1,)


def test_times_of_different_zones_are_compared(tmp_path: Path) -> None:
    late = raised("lib.Stopped: no more work", 99, "2026-11-25T10:00:09Z ERROR stopping\n")
    early = raised("ValueError: empty batch", 88, "2026-11-25T19:00:05+09:00 ERROR bad batch\n")
    assert culprits(tmp_path, rank0=late, rank1=early) == (1,)


def test_times_with_and_without_a_zone_are_not_compared(tmp_path: Path) -> None:
    one = raised("lib.Stopped: no more work", 99, "2026-11-25T10:00:09Z ERROR stopping\n")
    other = raised("ValueError: empty batch", 88, "2026-11-25 10:00:05 ERROR bad batch\n")
    found = top(tmp_path, rank0=one, rank1=other)
    assert (found.culprits, found.suspects) == ((), (0, 1))
    assert found.headline == "ranks 0, 1 raised exceptions of their own, and nothing shows which came first"


def test_a_time_long_before_the_traceback_is_not_its_own(tmp_path: Path) -> None:
    quiet = "2026-11-25 09:00:00 step 1\nno time here\n"
    one = raised("ValueError: empty batch", 88, "2026-11-25 10:00:05 ERROR bad batch\n")
    found = top(tmp_path, rank0=one, rank1=raised("lib.Stopped: no more work", 99, quiet))
    assert (found.culprits, found.suspects) == ((), (0, 1))


@pytest.mark.parametrize("seconds", [(0, 4), (0, 0)], ids=["apart", "in the same second"])
def test_times_of_torchelastics_error_files_count(tmp_path: Path, seconds: tuple[int, int]) -> None:
    for rank, after_s, error in ((2, seconds[0], "ValueError: a"), (0, seconds[1], "KeyError: 'b'")):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        extra = {"py_callstack": raised(error, 9), "timestamp": str(1_764_203_000 + after_s)}
        (folder / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    assert top(tmp_path).culprits == ((2,) if seconds[1] else ())


STEPS = "2026-11-25 {hour:02d}:00:{second:02d} step {step}\n"


def test_clocks_that_differ_are_compared_by_their_steps(tmp_path: Path) -> None:
    """The clock of rank 1 is an hour ahead: it failed first, though its time is the later one."""
    steps = ["".join(STEPS.format(hour=hour, second=5 * n, step=n) for n in range(6)) for hour in (10, 11)]
    late = steps[0] + raised("lib.Stopped: no more work", 99, "2026-11-25 10:00:50 ERROR stopping\n")
    early = steps[1] + raised("ValueError: empty batch", 88, "2026-11-25 11:00:30 ERROR bad batch\n")
    assert culprits(tmp_path, rank0=late, rank1=early) == (1,)


LOST = ["ConnectionResetError: [Errno 104] Connection reset by peer", "EOFError", "FileNotFoundError: 'shard_rank1.pt'"]


@pytest.mark.parametrize("error", LOST)
def test_what_one_raises_that_lost_another_is_no_cause(tmp_path: Path, error: str) -> None:
    times = [f"2026-11-25 10:00:{second:02d} INFO step 3\n" for second in (5, 6)]
    lost, own = raised(error, 99, times[0]), raised("ValueError: empty batch", 88, times[1])
    assert culprits(tmp_path, rank0=lost, rank1=own) == (1,)
    assert culprits(tmp_path, rank0=lost, rank1="step 3\n") == (0,)


def test_a_missing_file_of_nobodys_may_be_the_cause(tmp_path: Path) -> None:
    times = [f"2026-11-25 10:00:{second:02d} INFO step 3\n" for second in (5, 6)]
    missing = raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/train-0017.bin'", 99, times[0])
    found = top(tmp_path, rank0=missing, rank1=raised("ValueError: empty batch", 88, times[1]))
    assert (found.culprits, found.suspects) == ((), (0, 1))


NAMING = [
    "TimeoutError: 600 s: still waiting for ['/sync/done_rank2']",
    "RuntimeError: no heartbeat from rank [2] for 60 s",
    "_queue.Empty: no result from rank 2 within 900 s",
    "RuntimeError: waited 600 s for rank 2",
    "TimeoutError: ready=[0, 1, 3] missing=[2]",
    "AssertionError: stragglers after 600 s: rank 2",
    "TimeoutError: RPC to worker2 timed out",
]


@pytest.mark.parametrize("error", NAMING)
def test_one_that_gave_up_its_wait_for_another_is_a_witness(tmp_path: Path, error: str) -> None:
    others = {f"rank{rank}": "2026-11-25 10:00:05 INFO step 3\n" for rank in (1, 2, 3)}
    found = top(tmp_path, rank0=raised(error, 40, others["rank1"]), **others)
    assert (found.culprits, found.suspects) == ((), (2,))


def test_in_one_console_the_first_traceback_is_the_cause(tmp_path: Path) -> None:
    text = "".join(f"[rank{rank}]: step 1\n" for rank in range(3))
    for rank, error, line in ((2, "ValueError: empty batch", 88), (0, "lib.Stopped: no more work", 99)):
        text += "".join(f"[rank{rank}]: {part}\n" for part in raised(error, line).splitlines())
    assert culprits(tmp_path, console=text) == (2,)


def test_who_says_that_others_failed_comes_last(tmp_path: Path) -> None:
    told = raised("lib.PeerError: another worker reported a failure", 99)
    assert culprits(tmp_path, rank0=told, rank1=raised("ValueError: empty batch", 88)) == (1,)


def test_an_exception_that_blames_another_rank_accuses_nobody(tmp_path: Path) -> None:
    for rank in range(4):
        text = raised("RuntimeError: rank 2 returned no result within 600 s", 120) if rank == 0 else "step 1\n"
        (tmp_path / f"rank{rank}.log").write_text(text)
    top = diagnose(open_run(tmp_path))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (2,))
    assert any("returned no result" in item.text for item in top.evidence)


def test_an_exception_that_names_its_own_rank_is_its_own(tmp_path: Path) -> None:
    assert culprits(
        tmp_path, rank2=raised("RuntimeError: rank 2 timed out reading its shard", 70), rank0="step 1\n"
    ) == (2,)


def test_what_a_handler_of_a_signal_raises_is_no_death(tmp_path: Path) -> None:
    ends = "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO TIME LIMIT ***\n"
    text = "".join(f"{rank}: step {step}\n" for step in range(3) for rank in range(4)) + ends
    for rank in range(4):
        lines = raised("job.TimeUp: SIGTERM received", 70 + rank).splitlines()
        text += "".join(f"{rank}: {line}\n" for line in lines)
    (tmp_path / "slurm-4.out").write_text(text)
    top = diagnose(open_run(tmp_path))[0]
    assert not top.culprits
    assert "TIME LIMIT" in top.headline
