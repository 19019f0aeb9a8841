"""Ranks that ended because another did: aborted after its exception, or raising what a library says of a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict

STEPS = "".join(f"[rank{rank}]: step {step} loss 2.1\n" for step in range(3) for rank in range(4))
ROW = "  time      : 2026-11-26_03:01:40\n  host      : h\n  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 471{0})\n"
AGENT = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"


def raised(rank: int, error: str, line: int = 66) -> str:
    lines = (
        "Traceback (most recent call last):",
        f'  File "/w/train.py", line {line}, in main',
        "    loss.backward()",
        error,
    )
    return "".join(f"[rank{rank}]: {text}\n" for text in lines)


def judged(folder: Path, text: str) -> tuple[str, tuple[int, ...]]:
    (folder / "job.log").write_text(text)
    top = first_verdict(folder)
    return top.verdict, top.culprits


@pytest.mark.parametrize("code", [-6, -11, -9, -7])
def test_a_signal_after_the_root_cause_is_a_consequence(tmp_path: Path, code: int) -> None:
    own = raised(2, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.")
    table = (
        f"{AGENT}Failures:\n[1]:\n{ROW.format(0, code)}Root Cause (first observed failure):\n[0]:\n{ROW.format(2, 1)}"
    )
    assert judged(tmp_path, STEPS + own + table) == ("RANK_DIED", (2,))


def test_tasks_that_srun_lists_as_aborted_later_are_victims(tmp_path: Path) -> None:
    own = raised(3, "KeyError: 'labels'")
    ends = "srun: error: n2: task 3: Exited with exit code 1\nsrun: error: n1: tasks 0-1: Aborted (core dumped)\n"
    labelled = "".join(f"{rank}: [rank{rank}]: step 1 loss 2\n" for rank in range(4))
    assert judged(tmp_path, labelled + own + ends) == ("RANK_DIED", (3,))


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CCL timeout: allreduce did not complete", "RuntimeError: SMDDP: peer disconnected",
        "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure",
    ],
)  # fmt: skip
def test_most_ranks_with_one_error_of_a_library_are_witnesses(tmp_path: Path, error: str) -> None:
    assert judged(tmp_path, STEPS + "".join(raised(rank, error) for rank in (0, 1, 3)))[1] == ()


def test_most_ranks_with_one_mistake_of_the_program_died_of_it(tmp_path: Path) -> None:
    text = STEPS + "".join(raised(rank, "ValueError: 7 is not a batch size") for rank in (0, 1, 3))
    assert judged(tmp_path, text) == ("RANK_DIED", (0, 1, 3))


def test_a_save_that_failed_on_one_rank_accuses_no_other(tmp_path: Path) -> None:
    error = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2])"
    assert not set(judged(tmp_path, STEPS + "".join(raised(rank, error) for rank in range(4)))[1]) & {0, 1, 3}
