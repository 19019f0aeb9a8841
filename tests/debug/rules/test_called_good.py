"""A traceback in a job that a scheduler, a service or a shell calls good makes a suspect; a failure changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

RAISED = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/job/train.py", line 88, in step\n'
    "[rank1]:     loss = criterion(out, y)\n[rank1]: ValueError: sample 9 has no label\n"
)
GOOD = (
    "Successfully completed.",
    "2026-11-12 08:12:01,225 sagemaker-training-toolkit INFO  Done waiting for a return code. Received 0 from exiting process.",
    "2026-11-12 08:12:01,225 SUCC cli.py:64 -- Job 'raysubmit_x1' succeeded",
    "I 11-12 10:20:13 cloud_vm_ray_backend.py] Job 3 finished (status: SUCCEEDED).",
    "INFO:composer.cli.launcher:All processes exited with code 0",
    "\tExit status: 0",
    "I1129 08:30:03.100000 70 torch/distributed/elastic/agent/server/api.py:923] [default] worker group successfully finished. "
    "Waiting 300 seconds for other agents to finish.",
)
PARTLY = (  # of a part of the job, or of another one
    "[2026-02-02 10:00:05,300] [INFO] [launch.py:351:main] Process 7002 exits successfully.",
    '[INFO] 2026-04-14 10:00:00,000 api: {"name": "torchelastic.worker.status.SUCCEEDED", "source": "WORKER"}',
    "State: COMPLETED (exit code 0)", "srun: n1: tasks 0-3: Completed", "    Exit_status = 0", "exit_status  0",
    "\t(1) Normal termination (return value 0)", "Apr 14 10:00:00 n1 systemd[1]: train.service: Deactivated successfully.",
    "Run exited with code 0", "✓ Job finished (status: SUCCEEDED).", "Run status: COMPLETED", "Job succeeded",
    "torchx 2026-04-14 10:00:00 INFO     Job finished: SUCCEEDED", "Status:              Succeeded",
    "ft-worker-0   0/1     Completed   0          2h", "Job completed with result: Succeeded",
    "[exiting program at iteration 500] datetime: 2026-04-14 10:00:10",
)  # fmt: skip
OF_SHELLS = (  # which may hide the end of what ran in a pipe
    "exit status 0", "exit code 0", "rc=0", "$ echo $?\n0", "+ exit 0", "$ docker wait trainer\n0",
    "[1]+  Done                    torchrun --nproc-per-node 4 train.py > train.log 2>&1",
    "2026-05-12 10:31:00 launcher: all processes exited with 0",
)  # fmt: skip
GOES_ON = (  # what follows the traceback is of no rank, or of its own
    "Epoch 1:  30%|###       | 300/1000 [03:00<07:00, 1.66it/s]", "`Trainer.fit` stopped: `max_steps=100` reached.",
    "{'train_runtime': 8812.1, 'train_samples_per_second': 11.2, 'train_loss': 1.2, 'epoch': 1.0}",
    "Run completed: kind-otter-8Fz", "[rank1]: Saving model checkpoint to /out/checkpoint-500", "[rank1]: sample skipped",
)  # fmt: skip
NO_PROOF = (
    "",
    "$ echo $?\n1",
    "$ docker wait trainer\n137",
    "0",
    "step 3 loss 2.1",
    "✗ Job finished (status: FAILED).",
    "Epoch 1:   0%|          | 0/1000 [00:00<?, ?it/s]",
    "[rank1]: the run crashed before it finished",
    "[rank1]:   a message of two lines",
    "[rank1]: cleaning up",
    "2026-11-12 08:12:01,225 ERR cli.py:64 -- Job 'raysubmit_x1' failed",
    "I 11-12 10:20:13 cloud_vm_ray_backend.py] Job 3 finished (status: FAILED).",
    "llm-sft   Running   3/4           41m        50m",
)


def culprits(last: str, folder: Path) -> tuple[int, ...]:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (folder / "log.txt").write_text(f"{steps}{RAISED}{last}\n")
    return diagnose(open_run(str(folder)))[0].culprits


@pytest.mark.parametrize("last", [*GOOD, *PARTLY, *OF_SHELLS, *GOES_ON])
def test_nobody_is_accused_where_the_job_is_called_good(last: str, tmp_path: Path) -> None:
    assert culprits(last, tmp_path) == ()


@pytest.mark.parametrize("last", NO_PROOF)
def test_the_rank_is_accused_where_nothing_proves_a_good_end(last: str, tmp_path: Path) -> None:
    assert culprits(last, tmp_path) == (1,)


def test_completed_pods_beside_the_log(tmp_path: Path) -> None:
    table = "NAME      STATUS     COMPLETIONS   DURATION   AGE\nllm-sft   {}   {}/4           41m        50m\n"
    (tmp_path / "job.txt").write_text(table.format("Complete", 4))
    assert culprits("", tmp_path) == ()
    (tmp_path / "job.txt").write_text(table.format("Failed", 3))
    assert culprits("", tmp_path) == (1,)


def test_another_job_that_is_complete_makes_no_job_well(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text(
        "NAME      STATUS     COMPLETIONS\nprep      Complete   1/1           2m\ntrain     Running    0/4           9h\n"
    )
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (tmp_path / "log.txt").write_text(steps)
    assert diagnose(open_run(str(tmp_path)))[0].verdict != "HEALTHY"


KERNEL = (
    "Nov 12 08:00:21 gpu-a kernel: Out of memory: Killed process 4102 ({}) total-vm:88123112kB, anon-rss:61223112kB"
)
SEGFAULT = "Nov 12 08:00:21 gpu-a kernel: {}[4102]: segfault at 8 ip 00007f12 sp 00007ffd error 4 in lib.so[7f12+200]"


@pytest.mark.parametrize("line", [KERNEL, SEGFAULT])
@pytest.mark.parametrize(
    ("program", "expected"), [("python3.11", (2,)), ("pt_main_thread", (2,)), ("ffmpeg", ()), ("backup-agent", ())]
)
def test_a_process_of_another_name_is_no_rank(
    line: str, program: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    pids = "".join(f"rank {rank} pid {4100 + rank}\n" for rank in range(4))
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (tmp_path / "train.log").write_text(pids + steps)
    (tmp_path / "dmesg.txt").write_text(line.format(program) + "\n")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == expected


WATCHDOG = (
    "[rank{0}]:[E1112 08:41:0{0}.111 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group watchdog "
    "thread terminated with exception: CUDA error: {1}\n"
)


@pytest.mark.parametrize(("ranks", "expected"), [((0, 1, 2, 3), ()), ((2,), (2,))])
def test_one_error_on_the_watchdogs_of_all(ranks: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path) -> None:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    felt = "".join(WATCHDOG.format(rank, "unspecified launch failure") for rank in ranks)
    (tmp_path / "log.txt").write_text(steps + felt)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == expected


def test_a_job_of_slurm_that_completed_beside_the_log(tmp_path: Path) -> None:
    """Rows of `sacct` whose last column is none of ExitCode; a step that failed is no part of its job's end."""
    row = "77                train  {}  {}  n01\n77.0             python  {}  {}  n01\n"
    (tmp_path / "sacct.txt").write_text(row.format("COMPLETED", "0:0", "COMPLETED", "0:0"))
    assert culprits("", tmp_path) == ()
    (tmp_path / "sacct.txt").write_text(row.format("FAILED", "1:0", "FAILED", "1:0"))
    assert culprits("", tmp_path) == (1,)


def test_json_lines_of_metrics_that_go_on_after_a_traceback(tmp_path: Path) -> None:
    of_step = '{{"rank": {0}, "step": {1}, "loss": 1.0}}\n'
    after = "".join(of_step.format(rank, step) for step in range(3, 9) for rank in range(4))
    (tmp_path / "log.txt").write_text(RAISED + after)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()


@pytest.mark.parametrize("last", [*PARTLY, *GOES_ON])
def test_a_good_end_of_a_part_proves_none_of_the_job(last: str, tmp_path: Path) -> None:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (tmp_path / "log.txt").write_text(f"{steps}{last}\n")
    assert diagnose(open_run(str(tmp_path)))[0].verdict != "HEALTHY"


def test_the_error_of_a_rank_after_a_good_word_is_its_own(tmp_path: Path) -> None:
    assert culprits("", tmp_path) == (1,)
    (tmp_path / "log.txt").write_text(f"{PARTLY[0]}\n[rank0]: step 1\n[rank1]: step 1\n{RAISED}")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (1,)
