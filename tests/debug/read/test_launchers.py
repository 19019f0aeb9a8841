"""Ends of ranks as launchers, schedulers and watchdogs tell them, in texts alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

STEPS = "".join(f"2026-11-22 01:0{step}:00,000 INFO train: step {step}\n" for step in range(5))
TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:06:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 31)
  error_file: <N/A>
"""


def judged(folder: Path, **texts: str) -> Verdict:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return diagnose(open_run(str(folder)))[0]


# -------------------------------------------------------------------------------------------------------- exit codes

ABORTS = [
    ("Epoch 1 step 3\nMPI_ABORT was invoked on rank 6 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n", 6),
    ("Epoch 1 step 3\nAbort(7) on node 2: application called MPI_Abort(MPI_COMM_WORLD, 7) - process 2\n", 2),
    ("Epoch 1 step 3\n[rank: 3] Child process with PID 51 terminated with code 1. Forcefully terminating all others\n", 3),
    ("Epoch 1 step 3\nProcess 1 terminated with exit code 9\n", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rank"), ABORTS)
def test_rank_that_a_launcher_says_to_have_ended(text: str, rank: int, tmp_path: Path) -> None:
    top = judged(tmp_path, console=text)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (rank,))


@pytest.mark.parametrize(("code", "verdict"), [(3, "RANK_DIED"), (1, "INSUFFICIENT_DATA")])
def test_exit_code_1_may_be_a_victims(code: int, verdict: str, tmp_path: Path) -> None:
    top = judged(tmp_path, torchrun=TABLE.format(code))
    assert (top.verdict, top.culprits) == (verdict, (1,) if verdict == "RANK_DIED" else ())


FAILED_TASK = "srun: error: node003: task 3: Exited with exit code 1\n"
LAST_OF_EACH = "".join(f"srun: error: node00{task}: task {task}: Terminated\n" for task in range(3))
RANKS = "".join(f"[rank{rank}]: step {step}\n" for step in range(2) for rank in range(8))
RAISED = (
    'Traceback (most recent call last):\n3:   File "/job/train.py", line 9, in <module>\n3: ValueError: no tokenizer\n'
)
TASKS = {
    "srun alone: what the tasks wrote went elsewhere": (FAILED_TASK, (), ()),
    "nothing shows what a task is": ("Epoch 1 step 3\n" + FAILED_TASK, (), ()),
    "eight ranks in four or eight tasks": (RANKS + FAILED_TASK, (), ()),
    "eight ranks in eight tasks": (RANKS + FAILED_TASK.replace("3:", "5:"), (5,), ()),
    "several tasks on a host": ("Epoch 1\n" + FAILED_TASK + "srun: error: node003: tasks 0-2: Killed\n", (3,), ()),
    "a list of hosts with more tasks": ("Epoch 1\n" + FAILED_TASK + "srun: error: node[1-2]: tasks 0-2: Terminated\n", (3,), ()),
    "a task on each host": (RANKS + FAILED_TASK + LAST_OF_EACH, (), (6, 7)),
    "a task on each host of a list": (RANKS + FAILED_TASK + "srun: error: node[000-002]: tasks 0-2: Killed\n", (), (6, 7)),
    "torchrun": ("W1023 02:40:00.1 10 torch/distributed/run.py:774] OMP\n" + RANKS + FAILED_TASK.replace("3:", "5:"), (), ()),
    "labels that are no ranks": (
        "".join(f"{rank // 2}: [rank{rank}]: step 1\n" for rank in range(8)) + FAILED_TASK, (), (6, 7),
    ),
    "labels with a rank each": ("".join(f"{rank}: [rank{rank}]: step 1\n" for rank in range(4)) + FAILED_TASK, (3,), ()),
    "an exception below a label of several ranks": (
        "".join(f"{rank // 2}: [rank{rank}]: step 1\n" for rank in range(8)) + f"3: {RAISED}", (), (),
    ),
    "an exception below a label": ("".join(f"{rank}: step 1\n" for rank in range(4)) + f"3: {RAISED}", (3,), ()),
    "mpirun of launchers": (
        "python -m torch.distributed.run --nproc_per_node 4 train.py\n" + RANKS + "mpirun noticed that process rank 1 with PID 5 "
        "on node n1 exited on signal 9 (Killed).\n", (), (),
    ),
    "mpirun of ranks": (
        RANKS + "mpirun noticed that process rank 1 with PID 5 on node n1 exited on signal 9 (Killed).\n", (1,), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_task_is_a_rank_where_the_text_shows_it(name: str, tmp_path: Path) -> None:
    text, culprits, suspects = TASKS[name]
    top = judged(tmp_path, slurm=text)
    assert (top.culprits, top.suspects) == (culprits, suspects)
    assert culprits or top.verdict == "INSUFFICIENT_DATA"


def test_exit_code_after_a_wait_is_a_victims(tmp_path: Path) -> None:
    waited = (
        STEPS + "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation\n"
    )
    waited = waited.replace("RuntimeError", "Traceback (most recent call last):\nRuntimeError")
    top = judged(tmp_path, torchrun=TABLE.format(3), rank_1=waited, rank_0=waited)
    assert top.culprits == ()


@pytest.mark.parametrize("prefix", ["train.py: error: ", "Error: "])
def test_refused_arguments_end_the_ranks_that_refused(prefix: str, tmp_path: Path) -> None:
    refused = (
        f"usage: train.py [-h] [--lr LR]\n                [--steps N]\n{prefix}unrecognized arguments: --lr-decay\n"
    )
    top = judged(tmp_path, rank_0="hello\n", rank_1="hello\n" + refused, rank_2="hello\n")
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))


def test_error_word_not_below_the_usage_is_no_end(tmp_path: Path) -> None:
    logged = "usage: see the manual\nstarting\n" + STEPS + "metrics: error: upload failed, will retry\n"
    top = judged(tmp_path, rank_0=STEPS, rank_1=logged)
    assert top.verdict == "RUNNING"


# ------------------------------------------------------------------------------------------------------- who is meant

SPAWNED = """torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "/opt/lib/python3.12/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/job/main.py", line 8, in worker
    int("x")
ValueError: invalid literal for int() with base 10: 'x'
"""
SAGEMAKER = "".join(f"[1,mpirank:{rank},algo-1]<stdout>:step 10 loss 2.0\n" for rank in range(4)) + "".join(
    f"[1,mpirank:3,algo-1]<stderr>:{line}\n"
    for line in (
        "Traceback (most recent call last):", '  File "/job/train.py", line 88, in step',
        "    loss = model(batch)", "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-7'",
    )
)  # fmt: skip
DESCRIBED = """Name:             trainer-worker-3
Status:           Failed
Containers:
  pytorch:
    State:          Terminated
      Reason:       OOMKilled
      Exit Code:    137
    Environment:
      RANK:           3
      WORLD_SIZE:     8
"""
DEEPSPEED = "".join(
    f"[2026-11-21 08:30:01,10{n}] [INFO] [launch.py:256:main] process 300{n} spawned with command: ['python', '-u', 't.py', "
    f"'--local_rank={n}', '--deepspeed']\n"
    for n in range(4)
)
DMESG = "[881212.102] Out of memory: Killed process 3001 (python) total-vm:91234567kB, anon-rss:60123456kB\n"


@pytest.mark.parametrize(
    ("texts", "rank", "subtype"),
    [
        ({"console": SPAWNED}, 2, "python_exception"),
        ({"console": SAGEMAKER}, 3, "python_exception"),
        ({"describe": DESCRIBED}, 3, "oom"),
        ({"console": DEEPSPEED, "dmesg": DMESG}, 1, "oom"),
    ],
)
def test_whose_end_a_text_tells(texts: dict[str, str], rank: int, subtype: str, tmp_path: Path) -> None:
    top = judged(tmp_path, **texts)
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", subtype, (rank,))


@pytest.mark.parametrize(
    ("old", "new"),
    [("RANK:", "NODE:"), ("    Environment:", "    Limits:\n      nvidia.com/gpu:  8\n    Environment:")],
)
def test_pod_without_a_rank_accuses_nobody(old: str, new: str, tmp_path: Path) -> None:
    assert judged(tmp_path, describe=DESCRIBED.replace(old, new)).culprits == ()


def test_names_tell_how_many_ranks_there_are(tmp_path: Path) -> None:
    text = (
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/job/train.py\", line 52, in epoch\n"
        "[rank0]:     dist.monitored_barrier(wait_all_ranks=True)\n"
        "[rank0]: RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms\n"
    )  # fmt: skip
    assert judged(tmp_path, console=text).culprits == (4, 5, 6, 7)
    assert open_run(str(tmp_path)).world_size == 8


def test_process_that_sigterm_did_not_end_is_frozen(tmp_path: Path) -> None:
    waited = (
        STEPS
        + "Traceback (most recent call last):\nRuntimeError: gloo/unbound_buffer.cc:78] Timed out waiting 6000ms\n"
    )
    told = "W1122 01:{}.7100 52 torch/distributed/elastic/multiprocessing/api.py:10] Sending process 56 closing signal SIGTERM\n"
    texts = {"rank_0": waited, "rank_1": STEPS, "rank_2": waited}
    once = judged(tmp_path, torchrun=told.format("05:00"), **texts)
    twice = judged(tmp_path, torchrun=told.format("05:00") + told.format("05:23"), **texts)
    assert [(top.verdict, top.culprits) for top in (once, twice)] == [("STUCK_ON_CPU", (1,)), ("RANK_FROZEN", (1,))]


# --------------------------------------------------------------------------------------------------------- watchdogs

CAUGHT = (
    "[rank{0}]:[E1122 02:07:08.40 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut=1, Timeout(ms)=600000) ran for 600060 milliseconds\n"
)
DUMPED = (
    "[rank{0}]:[E1122 02:07:08.41 ProcessGroupNCCL.cpp:1987] [PG ID 2 PG GUID 9(mesh_tp) Rank {1}] Received a dump signal due to "
    "a collective timeout from rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {2}, last "
    "completed NCCL work: {2}.\n"
)
IN_TP = (
    "[rank{0}]:[E1122 02:07:08.42 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9(mesh_tp) Rank {0}] Exception (either an error or "
    "timeout) detected by watchdog at work: 610, last enqueued NCCL work: 616, last completed NCCL work: 609.\n"
)


def test_watchdogs_tell_whose_size_differs(tmp_path: Path) -> None:
    text = "".join(CAUGHT.format(rank, 101, "ALLREDUCE", 1000 if rank == 2 else 2000) for rank in range(6))
    top = judged(tmp_path, console=text)
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", (2,))


def test_two_sizes_of_two_watchdogs_name_two_suspects(tmp_path: Path) -> None:
    top = judged(tmp_path, console="".join(CAUGHT.format(rank, 101, "BROADCAST", rank) for rank in range(2)))
    assert (top.verdict, top.culprits, top.suspects) == ("SIZE_MISMATCH", (), (0, 1))


@pytest.mark.parametrize("op", ["ALLTOALL_BASE", "GATHER", "SCATTER"])
def test_sizes_that_may_differ_are_no_mismatch(op: str, tmp_path: Path) -> None:
    text = "".join(CAUGHT.format(rank, 101, op, 1000 + rank // 3) for rank in range(4))
    assert judged(tmp_path, console=text).verdict != "SIZE_MISMATCH"


def test_watchdogs_of_unnamed_groups_are_not_compared(tmp_path: Path) -> None:
    """Pipeline stages: rank 2 is rank 0 of its own group."""
    text = "".join(CAUGHT.format(rank, 101, "ALLREDUCE", 1000 * (1 + rank // 2)) for rank in range(6))
    local = text.replace("[rank2]:", "[rank4]:")
    for rank in range(6):
        local = local.replace(f"[Rank {rank}]", f"[Rank {rank % 2}]")
    assert judged(tmp_path, console=local).verdict != "SIZE_MISMATCH"


@pytest.mark.parametrize(("number", "culprits"), [(609, (3,)), (610, ())])
def test_rank_that_enqueued_less_than_the_others_wait_for(
    number: int, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    text = "".join(CAUGHT.format(rank, 610, "ALLREDUCE", 5) + IN_TP.format(rank) for rank in range(3))
    top = judged(tmp_path, console=text + DUMPED.format(3, 3, number))
    assert top.culprits == culprits


# ----------------------------------------------------------------------------------------------- errors that were survived

LOST = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 9, in push\n    send()\nValueError: no metrics\n'
)
WAITED = (
    'Traceback (most recent call last):\n  File "/job/train.py", line {}, in step\n    dist.barrier()\n'
    '  File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 5, in barrier\n    work.wait()\n'
    "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete\n"
)


@pytest.mark.parametrize("trouble", [LOST, "Killed\n"])
def test_trouble_that_training_went_on_after_is_none(trouble: str, tmp_path: Path) -> None:
    more = "2026-11-22 01:09:00,000 INFO train: step 9\n"
    top = judged(tmp_path, rank_0=STEPS + more, rank_1=STEPS + trouble + more)
    assert top.verdict == "RUNNING"


def test_own_exception_before_a_wait_in_finally(tmp_path: Path) -> None:
    own = STEPS + LOST + "\nDuring handling of the above exception, another exception occurred:\n\n" + WAITED.format(30)
    top = judged(tmp_path, rank_0=STEPS + WAITED.format(20), rank_1=own, rank_2=STEPS + WAITED.format(20))
    assert (top.verdict, top.culprits, top.line) == ("RANK_DIED", (1,), 9)


def test_exception_that_all_handle_accuses_nobody(tmp_path: Path) -> None:
    own = STEPS + LOST + "\nDuring handling of the above exception, another exception occurred:\n\n" + WAITED.format(30)
    assert judged(tmp_path, rank_0=own, rank_1=own, rank_2=own).culprits == ()


def test_thread_that_died_leaves_its_process_alive(tmp_path: Path) -> None:
    died = "Exception in thread loader:\n" + LOST
    top = judged(tmp_path, rank_0=STEPS + WAITED.format(20), rank_1=STEPS + died, rank_2=STEPS + WAITED.format(20))
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))


def test_wait_for_a_key_of_the_program_is_no_start_up(tmp_path: Path) -> None:
    lacks = 'Traceback (most recent call last):\n  File "/job/train.py", line 41, in sync\n    store.wait(["go"])\n'
    lacks += "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /go\n"
    top = judged(tmp_path, rank_0=STEPS, rank_1=STEPS + lacks, rank_2=STEPS + lacks)
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (0,))


def test_slurm_task_that_ran_out_of_memory(tmp_path: Path) -> None:
    top = judged(tmp_path, slurm="0: step 1\n1: step 1\n2: step 1\nsrun: error: node003: task 2: Out Of Memory\n")
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "oom", (2,))


def test_slurm_tasks_of_one_line_are_one_verdict(tmp_path: Path) -> None:
    """srun's task_exit (src/srun/libsrun/srun_job.c) puts the tasks of a host that ended alike into one line."""
    steps = "".join(f"{task}: step 1\n" for task in range(6))
    top = judged(
        tmp_path,
        slurm=f"{steps}srun: error: node2: tasks 3-5: Out Of Memory\nsrun: error: node1: tasks 0-2: Terminated\n",
    )
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "oom", (3, 4, 5))


@pytest.mark.parametrize(
    ("ends", "culprits"),
    [
        ("node2: task 1: Exited with exit code 1\nsrun: error: node1: task 0: Terminated", ()),
        ("node2: task 1: Segmentation fault\nsrun: error: node1: task 0: Terminated", (1,)),
        ("node1: task 1: Exited with exit code 1\nsrun: error: node1: task 0: Terminated", (1,)),
    ],
)
def test_one_task_on_each_host_may_hold_several_ranks(ends: str, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """A torchrun on each host ends with 1, too, whatever ended its workers."""
    assert judged(tmp_path, slurm=f"0: step 1\n1: step 1\nsrun: error: {ends}\n").culprits == culprits


# ------------------------------------------------------------------------------------------------------- what is told


def test_undecided_report_says_who_waited_where(tmp_path: Path) -> None:
    sent = WAITED.format(30).replace("barrier", "recv")
    top = judged(tmp_path, rank_0=STEPS + WAITED.format(20), rank_1=STEPS + WAITED.format(20), rank_2=STEPS + sent)
    assert top.verdict == "INSUFFICIENT_DATA"
    said = [item.text for item in top.evidence]
    assert "ranks 0, 1 waited in barrier at /job/train.py:20" in said
    assert "rank 2 waited in recv at /job/train.py:30" in said


@pytest.mark.parametrize(("end", "when"), [("", "now if it still hangs"), (TABLE.format(-6), "the next time it hangs")])
def test_advice_to_collect_fits_a_job_that_is_over(end: str, when: str, tmp_path: Path) -> None:
    sent = WAITED.format(30).replace("barrier", "recv")
    top = judged(
        tmp_path, rank_0=STEPS + WAITED.format(20), rank_1=STEPS + WAITED.format(20), rank_2=STEPS + sent, torchrun=end
    )
    assert when in top.next_steps[0]


def test_one_rank_that_left_nothing_is_a_suspect(tmp_path: Path) -> None:
    text = "".join(CAUGHT.format(rank, 101, "ALLREDUCE", 5) for rank in range(6) if rank != 4)
    top = judged(tmp_path, console=text)
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (4,))


def test_sigkill_is_not_said_to_leave_a_core(tmp_path: Path) -> None:
    top = judged(tmp_path, torchrun=TABLE.format(-9))
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))
    assert not any("ulimit" in step for step in top.next_steps)


@pytest.mark.parametrize(("code", "verdict"), [(-2, "RANK_DIED"), (None, "STUCK_ON_CPU")])
def test_rank_that_was_interrupted_first(code: int | None, verdict: str, tmp_path: Path) -> None:
    """Without its exit nobody can tell an interrupted rank from one that all were interrupted for, since it was stuck."""
    own = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in fetch\n    time.sleep(9)\nKeyboardInterrupt\n'
    closed = WAITED.format(20).replace(
        "Timed out waiting 6000ms for recv operation to complete", "Connection closed by peer"
    )
    table = TABLE.format(code) if code is not None else ""
    top = judged(tmp_path, rank_0=STEPS + closed, rank_1=STEPS + own, rank_2=STEPS + closed, torchrun=table)
    assert (top.verdict, top.culprits) == (verdict, (1,))


# ------------------------------------------------------------------------------------------------ evidence of nothing

SERVER = "[W1122 12:19:15.87 WorkerServer.cpp:144] [c10d] Server shutting down\n"
SERVER += "[W1122 12:19:15.87 WorkerServer.cpp:139] [c10d] Server exited\n"


def test_server_that_ends_with_its_process_shows_no_frozen_peer(tmp_path: Path) -> None:
    ended = STEPS + WAITED.format(20) + SERVER
    top = judged(tmp_path, rank_0=ended, rank_1=STEPS, rank_2=ended)
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))


def test_wait_of_an_unknown_kind_accuses_nobody(tmp_path: Path) -> None:
    """The wait for a send or recv of a batch: its traceback ends in the program's own line."""
    own = STEPS + 'Traceback (most recent call last):\n  File "/job/train.py", line 60, in step\n    work.wait()\n'
    own += "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete\n"
    top = judged(tmp_path, rank_0=STEPS + WAITED.format(20), rank_1=own, rank_2=STEPS + WAITED.format(20))
    assert (top.culprits, top.suspects) == ((), (0, 1, 2))


def test_console_of_all_attempts_does_not_hide_the_last(tmp_path: Path) -> None:
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        folder = tmp_path / "tr" / "job_1" / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(STEPS + (LOST if (attempt, rank) == (0, 1) else ""))
    failed = "E1122 01:05:00.71 52 torch/distributed/elastic/multiprocessing/api.py:10] "
    failed += "failed (exitcode: 1) local_rank: 1 (pid: 5)"
    crashed = "".join(f"[default1]:[rank1]: {line}\n" for line in LOST.splitlines())
    top = judged(tmp_path, console=crashed + failed + "\n")
    assert top.culprits == ()
