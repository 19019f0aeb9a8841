"""Who had not come to the start of a job, and whom a service lost, where all the others are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.records import Verdict

C10D = "INFO:torch.distributed.distributed_c10d:"
KEY = "store_based_barrier_key:1"
FORMS = {
    "torch 1.13": "on rank: {}, for key: " + KEY + " (world_size={}, worker_count={}, timeout=0:30:00)",
    "torch 2.1": "on rank {}, for key: " + KEY + " (world_size={}, num_workers_joined={}, timeout=0:30:00 error=x)",
}


def top(folder: Path, **texts: str) -> Verdict:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return first_verdict(folder)


def barrier(joined: list[int], size: int, count: int, form: str = "torch 1.13") -> str:
    added = "".join(f"{C10D}Added key: {KEY} to store for rank: {rank}\n" for rank in joined)
    raised = 'Traceback (most recent call last):\n  File "/w/t.py", line 31, in <module>\n    dist.init_process_group("nccl")\n'
    error = f"RuntimeError: Timed out initializing process group in store based barrier {FORMS[form].format(0, size, count)}\n"
    return added + raised + error


@pytest.mark.parametrize("form", FORMS)
def test_the_one_rank_that_added_no_key_never_came(tmp_path: Path, form: str) -> None:
    found = top(tmp_path, job=barrier([0, 2, 1, 3, 5, 6, 7], 8, 7, form))
    assert (found.verdict, found.culprits) == ("PG_INIT_HANG", (4,))


@pytest.mark.parametrize(
    ("joined", "size", "count"),
    [([0, 1, 2], 8, 3), ([0, 1, 2, 3, 4, 5], 8, 7), ([0, 1, 2, 3, 4, 5, 6], 8, 8), ([0, 1, 2, 3, 4, 5, 6, 7], 8, 7)],
)
def test_counts_that_leave_another_reading_accuse_nobody(
    tmp_path: Path, joined: list[int], size: int, count: int
) -> None:
    assert top(tmp_path, job=barrier(joined, size, count)).culprits == ()


def test_rank_that_timed_out_in_the_barrier_is_a_witness(tmp_path: Path) -> None:
    texts = {f"rank_{rank}": barrier([rank], 4, 3) for rank in (0, 1, 3)}
    assert not {0, 1, 3} & set(top(tmp_path, **texts).culprits)


TASK = "/job:jax_worker/replica:0/task:{}\n"
BARRIER = (
    "XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0. Look at the logs.\n"
    "# of tasks that reached the barrier: {}/8.\n"
    "The first task at the barrier: /job:jax_worker/replica:0/task:0. Some timed out task names:\n"
)


def test_the_one_task_that_jax_waited_for_never_came(tmp_path: Path) -> None:
    found = top(tmp_path, job=BARRIER.format(7) + TASK.format(5))
    assert (found.verdict, found.culprits) == ("PG_INIT_HANG", (5,))


def test_one_of_several_tasks_that_jax_awaited_is_not_accused(tmp_path: Path) -> None:
    assert top(tmp_path, job=BARRIER.format(5) + TASK.format(5) + TASK.format(6)).culprits == ()


def lost(*tasks: int) -> str:
    return (
        "F0303 16:05:00.4 7064 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
        "absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
        + "".join(map(TASK.format, tasks))
        + "The tasks have crashed. Check the task logs for an earlier error, or scheduler events to debug further.\n"
    )


def test_the_one_task_that_jax_lost_died(tmp_path: Path) -> None:
    found = top(tmp_path, **{f"worker-{rank}": lost(3) for rank in range(3)})
    assert (found.verdict, found.culprits) == ("RANK_DIED", (3,))
    assert found.confidence < 0.6


OWN = 'Traceback (most recent call last):\n  File "/w/t.py", line 31, in <module>\n    step()\nKeyError: 7\n'


def test_several_lost_tasks_or_another_error_accuse_no_lost_task(tmp_path: Path) -> None:
    assert top(tmp_path, job=lost(2, 3)).culprits == ()
    assert top(tmp_path, job=lost(3) + "step 9 loss 2.5\n").culprits == ()
    assert 3 not in top(tmp_path, **{"rank-0": OWN, "rank-1": lost(3)}).culprits
