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


COUNTS = (
    "RuntimeError: DDP expects same model across all ranks, but Rank {0} has {1} params, while rank {2} has inconsistent {3} "
    "params."
)


def test_ddp_names_the_rank_with_other_parameters(tmp_path: Path) -> None:
    said = [raised(rank, COUNTS.format(rank, 62, 2, 60)) for rank in (0, 1, 3)] + [
        raised(2, COUNTS.format(2, 60, 0, 62))
    ]
    assert judged(tmp_path, "".join(said)) == ("SIZE_MISMATCH", (2,))


def test_ddp_on_two_ranks_accuses_neither(tmp_path: Path) -> None:
    said = raised(0, COUNTS.format(0, 62, 1, 60)) + raised(1, COUNTS.format(1, 60, 0, 62))
    assert judged(tmp_path, said)[1] == ()


SIZES = (
    "RuntimeError: [{}]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param in process "
    "0."
)


@pytest.mark.parametrize(("raising", "culprits"), [((1,), (1,)), ((1, 2, 3), (0,))])
def test_ddp_compares_with_rank_0(raising: tuple[int, ...], culprits: tuple[int, ...], tmp_path: Path) -> None:
    assert judged(tmp_path, STEPS + "".join(raised(rank, SIZES.format(rank)) for rank in raising))[1] == culprits


def test_accelerate_lists_the_shape_of_every_process(tmp_path: Path) -> None:
    error = (
        "accelerate.utils.operations.DistributedOperationException: Cannot apply desired operation due to shape mismatches. All "
        "shapes across devices must be valid."
    )
    shapes = ["", "Operation: `accelerate.utils.operations.gather`", "Input shapes:"]
    shapes += [f"  - Process {rank}: [8, {117 if rank == 2 else 128}]" for rank in range(4)]
    said = [raised(rank, error) + "".join(f"[rank{rank}]: {line}\n" for line in shapes) for rank in range(4)]
    assert judged(tmp_path, "".join(said)) == ("SIZE_MISMATCH", (2,))


NOTIFY = (
    "EI0002: [PID: 7270] 2026-09-28-03:55:20.645.648 The wait execution of the Notify register times out. Reason: The Notify "
    "register has not received the Notify record from remote rank: [{}]."
)


def test_hccl_waits_are_no_errors_of_the_waiting(tmp_path: Path) -> None:
    error = "RuntimeError: ACL stream synchronize failed, error code:507048"
    said = [raised(rank, error) + f"[rank{rank}]: {NOTIFY.format('unknown')}\n" for rank in range(4)]
    assert judged(tmp_path, STEPS + "".join(said))[1] == ()


def test_hccl_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    said = [raised(rank, f"RuntimeError: {NOTIFY.format(3)}") for rank in range(3)]
    assert judged(tmp_path, STEPS + "".join(said))[1] == (3,)


def test_hccl_counts_ranks_in_groups_of_the_program(tmp_path: Path) -> None:
    in_group = NOTIFY.format(2) + " base information: [streamID:[109], tag[AllReduce_group_name_16]]"
    said = [raised(rank, f"RuntimeError: {in_group}") for rank in (0, 1)]
    assert judged(tmp_path, STEPS + "".join(said))[1] != (2,)


CLOSED = (
    "torch.distributed.DistBackendError: NCCL error in: /p/ProcessGroupNCCL.cpp:3385, remote process exited or there was a "
    "network error"
)
LABELLED = "".join(f"{rank}: rank {rank} of 8 host n{rank // 4}\n" for rank in range(8))


def of_tasks(*ranks: int) -> str:
    return "".join(raised(rank, CLOSED).replace("[rank", "").replace("]:", ":") for rank in ranks)


def test_a_task_killed_alone_after_its_victims_died(tmp_path: Path) -> None:
    ends = "srun: error: n0: tasks 0-3: Exited with exit code 1\nsrun: error: n1: task 6: Killed\n"
    assert judged(tmp_path, LABELLED + of_tasks(0, 1, 2, 3) + ends) == ("RANK_DIED", (6,))


@pytest.mark.parametrize(
    "ends",
    [
        "srun: error: n1: tasks 4-7: Killed\n", "srun: Terminating StepId=7.0\nsrun: error: n1: task 6: Killed\n",
        "srun: error: n1: tasks 4-6: Exited with exit code 1\nsrun: error: n1: task 7: Killed\n",
    ],
)  # fmt: skip
def test_tasks_killed_with_their_step_are_not_accused(ends: str, tmp_path: Path) -> None:
    first = "srun: error: n0: tasks 0-3: Exited with exit code 1\n"
    verdict, culprits = judged(tmp_path, LABELLED + of_tasks(0, 1, 2, 3, 4, 5, 6) + first + ends)
    assert verdict != "RANK_DIED" or culprits == ()


OWN_AT_LAST = raised(1, "KeyError: 'labels'", 21)
CUT_OFF = "".join(
    raised(rank, "RuntimeError: [/p/pair.cc:553] Connection closed by peer [127.0.0.1]:1") for rank in (0, 2)
)


def rows(*codes: int) -> str:
    listed = "".join(f"[{rank}]:\n{ROW.format(rank, code)}" for rank, code in enumerate(codes) if rank != 1)
    return f"{AGENT}Failures:\n{listed}Root Cause (first observed failure):\n[0]:\n{ROW.format(1, codes[1])}"


@pytest.mark.parametrize("codes", [(1, 1, 1), (-15, 1, -15)])
def test_steps_that_waited_in_a_buffer_show_no_life(codes: tuple[int, ...], tmp_path: Path) -> None:
    steps = "".join(f"[rank{rank}]: step {step} loss 2\n" for rank in range(3) for step in range(4))
    assert judged(tmp_path, OWN_AT_LAST + CUT_OFF + steps + rows(*codes)) == ("RANK_DIED", (1,))


def test_a_silent_exit_after_buffered_steps_is_the_first(tmp_path: Path) -> None:
    steps = "".join(f"[rank{rank}]: step {step} loss 2\n" for rank in range(3) for step in range(4))
    assert judged(tmp_path, CUT_OFF + steps + rows(-15, 3, -15))[1] == (1,)


def test_an_error_between_steps_of_a_rank_was_caught(tmp_path: Path) -> None:
    before, after = ("".join(f"[rank1]: step {step} loss 2\n" for step in found) for found in (range(3), range(3, 6)))
    assert judged(tmp_path, before + OWN_AT_LAST + after + STEPS)[1] == ()


def test_intel_mpi_ends_the_others_by_sigterm(tmp_path: Path) -> None:
    block = "=   RANK {0} PID 5{0} RUNNING AT n1\n=   KILLED BY SIGNAL: {1}\n"
    assert judged(tmp_path, STEPS + block.format(3, "9 (Killed)") + block.format(0, "15 (Terminated)")) == (
        "RANK_DIED",
        (3,),
    )
