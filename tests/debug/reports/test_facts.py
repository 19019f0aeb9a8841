"""What libraries say of themselves, which an undecided report shows; stacks that a loop or a signal wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.report.text import report_text
from tools.paths import DATA, INCIDENTS

FACTS = {
    "Unreachable": "[1,mpirank:0,algo-1]<stdout>:a:60:190 [0] NCCL WARN NET/OFI Request 0x7 completed with error. RC: 113. "
    "Error: 4 (Unreachable remote)\n",
    "Duplicate GPU": "[1,2]<stdout>:gpu03:29:30 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0\n",
    "task:3": "F1125 10:00:05.001 12 client.h:80] JAX distributed service detected fatal errors: UNAVAILABLE\n"
    "/job:jax_worker/replica:0/task:3\n",
    "worker3": "[W tensorpipe_agent.cpp:726] RPC agent for worker0 encountered error when reading incoming request "
    "from worker3: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)\n",
    "pid 16425": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: W\n"
    "\tactor_id: 17f7\n\tpid: 16425\n",
}


@pytest.mark.parametrize("word", FACTS)
def test_an_undecided_report_shows_what_a_library_said(tmp_path: Path, word: str) -> None:
    (tmp_path / "job.log").write_text("step 1\nstep 2\n" + FACTS[word])
    top = first_verdict(tmp_path)
    assert top.verdict == "INSUFFICIENT_DATA"
    assert any(word in item.text for item in top.evidence)


WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:2806)", "train (train.py:88)")
READS = ("readinto (socket.py:718)", "fetch (data.py:44)", "train (train.py:80)")


def test_headings_with_a_rank_name_the_processes_below(tmp_path: Path) -> None:
    text = ""
    for rank in range(4):
        frames = READS if rank == 3 else WAITS
        text += f"=== node0{rank // 2} rank {rank} ===\nProcess {300 + rank}: python train.py\nPython v3.11.9\n\n"
        text += f'Thread {300 + rank} (idle): "MainThread"\n' + "".join(f"    {frame}\n" for frame in frames) + "\n"
    (tmp_path / "stacks.txt").write_text(text)
    assert first_verdict(tmp_path).culprits == (3,)


def dump(rank: int, frames: tuple[tuple[str, int, str], ...]) -> str:
    lines = [
        "Current thread 0x00007f (most recent call first):",
        *(f'  File "{f}", line {n} in {name}' for f, n, name in frames),
    ]
    return "".join(f"[default{rank}]:{line}\n" for line in lines)


IN_TORCH = (("/opt/torch/distributed/distributed_c10d.py", 2806, "all_reduce"), ("/srv/train.py", 88, "main"))
IN_QUEUE = (
    ("/usr/lib/python3.11/queue.py", 171, "get"),
    ("/srv/data.py", 31, "next_batch"),
    ("/srv/train.py", 80, "main"),
)


def test_stacks_that_a_signal_made_ranks_write_are_read(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("".join(dump(rank, IN_QUEUE if rank == 2 else IN_TORCH) for rank in range(4)))
    assert first_verdict(tmp_path).culprits == (2,)


def test_stacks_after_which_ranks_logged_on_are_history(tmp_path: Path) -> None:
    stacks = "".join(dump(rank, IN_QUEUE if rank == 2 else IN_TORCH) for rank in range(4))
    later = "".join(f"[default{rank}]:step {step} loss 2\n" for step in range(5) for rank in range(4))
    (tmp_path / "console.log").write_text(stacks + later)
    assert not first_verdict(tmp_path).culprits


def test_a_fault_that_cuda_gdb_caught_is_that_of_its_rank(tmp_path: Path) -> None:
    text = 'Thread 1 "python" received signal CUDA_EXCEPTION_14, Warp Illegal Address.\n(cuda-gdb) bt\n'
    (tmp_path / "cuda-gdb-rank2.txt").write_text(text)
    assert first_verdict(tmp_path).culprits == (2,)


@pytest.mark.parametrize(("folder", "words"), [(DATA / "run", "step 60"), (INCIDENTS / "skip", "last logged step 2")])
def test_a_step_that_only_the_log_tells_is_so_called(folder: Path, words: str) -> None:
    """A rank that logged step 2 stands in the next one."""
    run = open_run(str(folder))
    assert f"4 ranks · {words}" in report_text(run, diagnose(run))
