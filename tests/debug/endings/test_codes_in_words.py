"""Exit codes of ranks in plain words, and local ranks whose host only the launcher's command tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

STEPS = "".join(f"2026-11-22 10:17:{step:02d},320 INFO step {step} loss 1.0\n" for step in range(9))


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("rank {rank}: exit code {code}", "RANK_DIED"),
        ("rank {rank} exited with code {code}", "RANK_DIED"),
        ("rank={rank} exitcode={code}", "RANK_DIED"),
        ("Process {rank} terminated with exit code {code}", "RANK_DIED"),
        ("# rank {rank} exited with code {code}", "RUNNING"),  # a test's report
    ],
)
@pytest.mark.parametrize("code", [137, -11])
def test_a_list_of_exit_codes_tells_who_died(line: str, verdict: str, code: int, tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text(STEPS)
    codes = [line.format(rank=rank, code=code if rank == 2 else 0) for rank in range(4)]
    (tmp_path / "exit_codes.txt").write_text("\n".join(codes) + "\n")
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (verdict, (2,) if verdict == "RANK_DIED" else ())


def test_the_last_line_of_a_wrapper_is_its_ranks_end(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text(
            f"{STEPS}wrapper: python exited with status {137 if rank == 2 else 0}\n"
        )
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


ENDS = [
    "[2026-11-22, 10:19:01 UTC] {local_task_job_runner.py:240} INFO - Task exited with return code 1",  # Airflow
    "005 (4711.000.000) 2026-11-22 10:19:01 Job terminated.\n\t(0) Abnormal termination (signal 9)",  # HTCondor
    "Command exited with non-zero status 139\n\tUser time (seconds): 1020.31",  # GNU time
    "Exited with exit code 1.\n\nResource usage summary:\n\n    CPU time :   1020.00 sec.",  # LSF
    "2026-11-22 10:19:01,123 WARN exited: train (exit status 1; not expected)",  # supervisord
    "train.py exited with 1",
]


@pytest.mark.parametrize("end", ENDS)
def test_a_job_that_ended_with_an_error_does_not_run(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(f"{STEPS}{end}\n")
    assert diagnose(open_run(str(tmp_path)))[0].verdict not in ("RUNNING", "HEALTHY")


def test_a_local_rank_counts_from_the_first_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text(
        "+ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=4 train.py\nstep 0\nstep 1\n"
        'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n    main()\nValueError: no data\n'
        "E0921 14:13:34.111000 77 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 2 "
        "(pid: 806) of binary: /usr/bin/python3\n"
    )
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (6,)


def test_other_exceptions_at_one_line_are_other_faults(tmp_path: Path) -> None:
    """One may be raised for want of the other's rank."""
    for rank, error in ((0, "PeerFailure: peer 3 failed"), (1, ""), (2, ""), (3, "ValueError: shard 12 is empty")):
        raised = f'Traceback (most recent call last):\n  File "/job/train.py", line 7, in step\n    f()\n{error}\n'
        stamp = f"2026-11-22 10:18:0{4 if rank == 0 else 1},000 ERROR failed\n"
        (tmp_path / f"rank_{rank}.log").write_text(f"{STEPS}{stamp}{raised}" if error else STEPS)
    assert diagnose(open_run(str(tmp_path)))[0].culprits != (0, 3)
