"""What a text ends with: a good end that something follows proves nothing, and no job that ends in errors is running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, STEPS, first_verdict
from titan_ckpt.debug import diagnose, open_run

LABELLED = "".join(f"[rank{rank}]: step {step} loss 2.1\n" for step in range(3) for rank in range(4))
OOM = "".join(
    f"[rank2]: {line}\n"
    for line in (
        "Traceback (most recent call last):", '  File "/job/train.py", line 30, in step', "    loss.backward()",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.",
    )
)  # fmt: skip
WATCHDOG = (
    "[rank{0}]:[E1126 03:03:20.2 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group watchdog "
    "thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketPollConnect: connect to node1<41231> returned No route to host, exceeded error retry count (35)\n"
)


@pytest.mark.parametrize("good", ["exit code: 0", "rc=0", "EXIT=0"])
def test_a_good_end_before_an_error_is_another_commands(tmp_path: Path, good: str) -> None:
    (tmp_path / "job.log").write_text(f"step 1 loss 2\n{good}\n{LABELLED}{OOM}")
    assert first_verdict(tmp_path).culprits == (2,)


def test_a_good_end_before_steps_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"step 1 loss 2\nexit code: 0\n{LABELLED}")
    assert first_verdict(tmp_path).verdict == "RUNNING"


def test_an_exit_code_in_a_ranks_own_file_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(f"{STEPS}exit code: 0\n")
    (tmp_path / "rank1.log").write_text(STEPS + OWN)
    assert first_verdict(tmp_path).culprits == (1,)


def test_a_good_end_in_one_file_is_none_of_errors_in_another(tmp_path: Path) -> None:
    (tmp_path / "prepare.log").write_text("packed 12 shards\nexit code: 0\n")
    (tmp_path / "train.log").write_text(LABELLED + OOM)
    assert first_verdict(tmp_path).verdict != "HEALTHY"


@pytest.mark.parametrize(
    "last",
    [
        "exit code: 1", "exit status 139", "command terminated with exit code 137", "make: *** [Makefile:12: train] Error 137",
        "Process finished with exit code 137 (interrupted by signal 9:SIGKILL)", "ERROR: Job failed: exit code 1",
        "##[error]Process completed with exit code 1.", "Finished: FAILURE", "srun: error: Unable to create step for job 12",
        "ERROR:  One or more process (first noticed rank 11) terminated with signal 15",
    ],
)  # fmt: skip
def test_a_job_that_ended_with_an_error_is_not_running(tmp_path: Path, last: str) -> None:
    (tmp_path / "job.log").write_text(f"{STEPS}{last}\n")
    top = first_verdict(tmp_path)
    assert top.verdict not in ("RUNNING", "HEALTHY")
    assert not top.culprits


def test_a_failure_that_steps_follow_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"srun: error: Unable to create step for job 12: retrying\n{STEPS}")
    assert first_verdict(tmp_path).verdict == "RUNNING"


def test_watchdogs_that_lost_a_node_are_trouble_of_nobody_here(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(LABELLED + "".join(WATCHDOG.format(rank) for rank in range(4)))
    top = first_verdict(tmp_path)
    assert top.verdict not in ("RUNNING", "HEALTHY")
    assert not top.culprits


@pytest.mark.parametrize("prefix", ["({}) ", "<rank={}> ", "r{}> ", "[gpu{}] ", "job-7 || w{} || "])
def test_a_traceback_behind_an_unknown_prefix_is_seen(tmp_path: Path, prefix: str) -> None:
    own = "".join(prefix.format(3) + line + "\n" for line in OWN.splitlines())
    (tmp_path / "job.log").write_text("".join(f"{prefix.format(rank)}step 1 loss 2\n" for rank in range(4)) + own)
    top = first_verdict(tmp_path)
    assert top.verdict not in ("RUNNING", "HEALTHY")
    assert any("KeyError" in item.text for item in top.evidence) or "KeyError" in top.headline


def test_a_traceback_of_error_records_is_its_ranks(tmp_path: Path) -> None:
    peer = "".join(f"2026-11-26 03:00:05,110 [rank {{0}}] ERROR {line}\n" for line in PEER.splitlines())
    own = "".join(f"2026-11-26 03:00:05,101 [rank 3] ERROR {line}\n" for line in OWN.splitlines())
    steps = "".join(f"2026-11-26 03:00:01,000 [rank {rank}] INFO step 1 loss 2\n" for rank in range(4))
    (tmp_path / "job.log").write_text(steps + own + peer.format(0) + peer.format(1))
    assert first_verdict(tmp_path).culprits == (3,)


def test_a_rank_of_many_in_brackets_is_a_rank(tmp_path: Path) -> None:
    own = "".join(f"[rank 3/4] {line}\n" for line in OWN.splitlines())
    (tmp_path / "job.log").write_text("".join(f"[rank {rank}/4] step 1 loss 2\n" for rank in range(4)) + own)
    assert first_verdict(tmp_path).culprits == (3,)


def test_a_pod_that_ended_well_is_not_the_job(tmp_path: Path) -> None:
    ends = "".join(f"Name:  fit-{n}\nReason:  Completed\nExit Code:  {code}\n" for n, code in enumerate((0, 1, 0)))
    (tmp_path / "pods.txt").write_text(ends)
    (tmp_path / "fit-0.log").write_text(f"{STEPS}Training finished\n")
    assert first_verdict(tmp_path).verdict == "INSUFFICIENT_DATA"


@pytest.mark.parametrize(
    "last",
    [
        "error: Job 12 on node n1 failed: node unreachable", "[!] job failed, rc=1", "fatal: unable to allocate memory",
        "yhrun: error: cn112: task 3: Killed", "panic: runtime error", "launcher: cannot reach node003",
    ],
)  # fmt: skip
def test_a_text_that_ends_in_words_of_a_failure_is_not_running(last: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"{STEPS}{last}\n")
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert any(last in item.text for item in top.evidence)


@pytest.mark.parametrize(
    "last",
    [
        "validation error: 0.0213", "upload failed, retrying in 5 s", "errors: 0", "WARNING: could not import apex",
        "no errors found",
    ],
)  # fmt: skip
def test_a_text_that_ends_in_a_number_or_a_retry_is_running(last: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"{STEPS}{last}\n")
    assert first_verdict(tmp_path).verdict == "RUNNING"


def test_an_epilog_after_watchdogs_is_no_good_end(tmp_path: Path) -> None:
    watchdog = "".join(
        f"[rank{rank}]:[E0921 03:11:40.69 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=12, NumelOut=12, Timeout(ms)=600000) ran for 600043 milliseconds.\n"
        for rank in range(3)
    )
    (tmp_path / "job.log").write_text(
        f"{LABELLED}{watchdog}Job finished at Mon Sep 21 03:30:00 UTC 2026\nexit code: 0\n"
    )
    assert first_verdict(tmp_path).verdict not in ("HEALTHY", "RUNNING")


SACCT = (
    "JobID  JobName  Partition  AllocCPUS  State  ExitCode\n------ ------- ------ ---- ------ ------\n"
    "{0}991.batch  batch  64  {1}\n"
)


@pytest.mark.parametrize(
    ("state", "verdict"),
    [("COMPLETED  0:0", "HEALTHY"), ("FAILED  1:0", "INSUFFICIENT_DATA"), ("RUNNING  0:0", "RUNNING")],
)
def test_sacct_tells_how_the_job_ended(state: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "sacct.txt").write_text(SACCT.format(f"991  ft-7b  gpu  64  {state}\n", state))
    (tmp_path / "train.log").write_text(f"{STEPS}training done\n")
    assert first_verdict(tmp_path).verdict == verdict


def newest_first(text: str) -> str:
    lines = text.splitlines()
    dated = [f"2026-03-03T16:00:{n // 2:02d}.000000Z {line}" for n, line in enumerate(lines)]
    return "\n".join(reversed(dated)) + "\n"


def test_newest_line_first_is_read_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "loki.log").write_text(newest_first(LABELLED + OOM))
    run = open_run(tmp_path)
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits, top.line) == ("RANK_DIED", (2,), 30)
    assert [flag.flag for flag in run.flags] == ["NEWEST_FIRST"]


def test_lines_in_their_order_are_not_turned(tmp_path: Path) -> None:
    (tmp_path / "loki.log").write_text("\n".join(reversed(newest_first(LABELLED + OOM).splitlines())) + "\n")
    assert not open_run(tmp_path).flags
