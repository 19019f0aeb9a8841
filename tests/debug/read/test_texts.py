"""Logs as launchers, schedulers, container runtimes and kernels write them; the forms are from their own sources and manuals
(named in `debug/read/text`)."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.debug import open_run
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import LogEvent
from titan_ckpt.debug.read.logs import JobLogs, combine
from titan_ckpt.debug.read.text.job_text import JobText, read_text

WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)


def read(text: str, *, is_middle: bool = False) -> JobLogs:
    return combine([read_text(JobText(source="job.log", scope="job.log", year=2026), [(text.encode(), is_middle)])])


def only_event(logs: JobLogs, rank: int) -> LogEvent:
    [log] = logs.ranks[rank] if rank >= 0 else [logs.job]
    assert log is not None
    [event] = log.events
    return event


# -------------------------------------------------------------------------------------------------------- prefixes

# Each makes of a line of rank 3 one that such a launcher, runtime or logger writes.
PREFIXES: dict[str, Callable[[str], str]] = {
    "torchrun --tee": "[default3]:{}".format,
    "torchrun with a role": "[trainer3]:{}".format,
    "torch": "[rank3]: {}".format,
    "srun --label": "3: {}".format,
    "Open MPI": "[1,3]<stderr>:{}".format,
    "Open MPI 5": "[prterun-node1-77@1,3]<stdout>: {}".format,
    "Hydra": "[3] {}".format,
    "kubectl --prefix": "[pod/job-worker-3/pytorch] {}".format,
    "CRI": "2026-11-22T02:07:08.123456789Z stderr F {}".format,
    "Docker": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-22T02:07:08.1Z"}),
    "Ray": "(RayTrainWorker pid=4711, ip=10.0.0.4) {}".format,
    "SkyPilot": "(worker3, rank=3, pid=4711, ip=10.0.0.4) {}".format,
    "pdsh": "node-3: {}".format,
    "docker compose": "worker-3  | {}".format,
    "logger": "2026-11-22 02:07:08,123 {}".format,
    "bracketed time": "[2026-11-22 02:07:08] {}".format,
    "syslog": "Nov 22 02:07:08 node3 kernel: {}".format,
    "fields between bars": "2026-11-22 02:07:08 | ERROR | rank=3 | {}".format,
    "clock": "02:07:08 {}".format,
    "colour": "\x1b[36m{}\x1b[0m".format,
}
WITHOUT_RANK = ("Ray", "logger", "bracketed time", "syslog", "clock", "colour", "CRI", "Docker", "pdsh")
MESSAGES = {
    "watchdog": (f"[E1122 02:07:08.40 ProcessGroupNCCL.cpp:685] [Rank 3] {WATCHDOG}", EventKind.WATCHDOG),
    "store": ("wait timeout after 300000ms, keys: /default_pg/0//cuda//5", EventKind.STORE_WAIT),
    "barrier": ("Ranks 2 failed to pass monitoredBarrier in 2000 ms", EventKind.COMM_TIMEOUT),
    "memory": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", EventKind.OOM),
}


@settings(deadline=None, max_examples=150)
@given(
    stack=st.lists(st.sampled_from([name for name in PREFIXES if name != "Docker"]), max_size=4),
    is_docker=st.booleans(),
    message=st.sampled_from(sorted(MESSAGES)),
)
def test_any_stack_of_prefixes_gives_the_same_record(stack: list[str], is_docker: bool, message: str) -> None:
    line, kind = MESSAGES[message]
    plain = only_event(read(f"[rank3]: {line}\n"), 3)
    for name in ["torch", *stack, *(["Docker"] if is_docker else [])]:
        line = PREFIXES[name](line)
    event = only_event(read(f"{line}\n{line.replace(MESSAGES[message][0], 'bye')}\n" * 1), 3)
    assert (event.kind, event.values) == (kind, plain.values)


@pytest.mark.parametrize("name", [name for name in PREFIXES if name not in WITHOUT_RANK])
def test_each_prefix_alone_gives_the_rank(name: str) -> None:
    lines = "\n".join(
        PREFIXES[name](line) for line in ("start", "Traceback (most recent call last):", "ValueError: bad", "end")
    )
    assert set(read(lines).ranks) == {3}


def test_local_rank_is_a_global_one_where_a_line_says_so() -> None:
    logs = read("[default1]:[rank9]: hello\n[default0]:ValueError\n")
    assert set(logs.ranks) == {8, 9}


@pytest.mark.parametrize("node", ["node_id=ab12, ", ""])
def test_pid_of_a_ray_worker_is_resolved_by_its_start_line(node: str) -> None:
    start = f"(TorchTrainer pid=1) - ({node}ip=10.0.0.7, pid=55) world_rank=2, local_rank=0, node_rank=1\n"
    logs = read(start + "(RayTrainWorker pid=55, ip=10.0.0.7) Traceback (most recent call last):\n"
                '(RayTrainWorker pid=55, ip=10.0.0.7)   File "a.py", line 3, in f\n(RayTrainWorker pid=55, ip=10.0.0.7) '
                'KeyError: 1\n')  # fmt: skip
    assert only_event(logs, 2).kind == EventKind.EXCEPTION


def test_stern_prefix_gives_the_pod_of_a_line() -> None:
    lines = [f"job-worker-{pod} pytorch {text}" for text in ("start", "KeyError", "end") for pod in (0, 1)]
    logs = read("\n".join([*lines, "job-worker-1 pytorch Traceback (most recent call last):",
                           'job-worker-1 pytorch   File "a.py", line 3, in f', "job-worker-1 pytorch KeyError: 1"]))  # fmt: skip
    assert set(logs.ranks) == {0, 1}
    assert [event.kind for log in logs.ranks[1] for event in log.events] == [EventKind.EXCEPTION]
    assert not [event for log in logs.ranks[0] for event in log.events]


def test_json_line_with_nan_is_still_opened() -> None:
    line = json.dumps({"message": "Traceback (most recent call last):\n  File \"a.py\", line 3, in f\nKeyError: 1", "rank": 2,
                       "loss": float("nan")})  # fmt: skip
    assert only_event(read(line + "\n"), 2).kind == EventKind.EXCEPTION


def test_json_line_with_half_a_surrogate_is_kept_as_text() -> None:
    [log] = [read('{"message": "\\ud800 bad", "rank": 2}\n').job]
    assert log is not None
    assert "ud800" in log.tail[0]


def test_all_signals_of_a_launcher_are_kept() -> None:
    asked = "torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5638 closing signal"
    text = read_text(
        JobText(source="c", scope="c"), [(f"{asked} SIGTERM\n{asked} SIGINT\n{asked} SIGTERM\n".encode(), False)]
    )
    assert text.endings.told == {5638: (-15, -2)}


def test_process_numbers_are_kept_by_rank() -> None:
    logs = read("(TorchTrainer pid=1) - (node_id=ab12, ip=10.0.0.7, pid=55) world_rank=2, local_rank=0, node_rank=1\n")
    assert logs.pids == {2: 55}


def test_numbered_lines_are_no_ranks() -> None:
    assert not read("1: apples\n2: pears\n3: plums\n4: cherries\n5: figs\n").ranks


# -------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("line", "rank", "values"),
    [  # torch 1.8, 1.13, 2.0, 2.3, 2.7; as pasted after a progress bar; without the first bracket; with a terminal's line number
        ("[E ProcessGroupNCCL.cpp:566] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
         "Timeout(ms)=1800000) ran for 1803170 milliseconds before timing out.", 2, {"op": "ALLREDUCE", "elapsed": "1803170"}),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15173, "
        "OpType=ALLREDUCE, "
         "TensorShape=[42008576], Timeout(ms)=1800000) ran for 1802710 milliseconds before timing out.", 1,
         {"seq": "15173", "shape": "[42008576]"}),
        ("Epoch 0:   6%|##  | 32040/500150 [6:28:43<94:39:17,  1.37it/s][E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog "
        "caught collective "
         "operation timeout: WorkNCCL(SeqNum=64088, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1 milliseconds "
         "before timing out.", 7,
         {"seq": "64088"}),
        (f"rank7]:[E126 01:17:58.183429932 ProcessGroupNCCL.cpp:616] [Rank 7] {WATCHDOG}", 7, {"seq": "77", "numel_in": "4096"}),
        (f"[80746] [rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] {WATCHDOG}", 0, {"op": "ALLREDUCE"}),
        ("[rank5]:[E1206 18:44:12.715 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 1] Exception (either an error or timeout) "
        "detected by watchdog "
         "at work: 7753, last enqueued NCCL work: 7755, last completed NCCL work: 7752.", 5,
         {"enqueued": "7755", "completed": "7752", "seq": "7753"}),
        ("[rank0]:[E1122 02:07:08.46 ProcessGroupNCCL.cpp:2252] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure "
        "detected by watchdog at work "
         "sequence id: 77 PG status: last enqueued work: 77, last completed work: 76", 0, {"group": "0(default_pg)"}),
    ],
)  # fmt: skip
def test_watchdogs_of_all_releases(line: str, rank: int, values: dict[str, str]) -> None:
    event = only_event(read(line + "\n"), rank)
    assert event.kind == EventKind.WATCHDOG
    assert values.items() <= event.values.items()


def test_message_that_a_terminal_wrapped_is_joined() -> None:
    line = (
        "[rank2]:[E424 01:17:25.031978332 ProcessGroupNCCL.cpp:1895] [Rank 2] Process group watchdog thread "
        f"terminated with exception: {WATCHDOG}"
    )
    wrapped = "\n".join(line[start : start + 90] for start in range(0, len(line), 90))
    assert only_event(read(wrapped + "\n"), 2).values["numel_out"] == "4096"


@pytest.mark.parametrize(
    ("line", "kind", "names"),
    [
        ("RuntimeError: Ranks 1, 2 failed to pass monitoredBarrier in 120000 ms", EventKind.COMM_TIMEOUT, "1,2"),
        ("\t   - [47] joined but didn't finish collective #41207 (count from 1)", EventKind.DESYNC, "47"),
        ("\t     [0, 1, 2] finished collective #41207, but didn't join collective #41208 (from 1)", EventKind.DESYNC, "0,1,2"),
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=3, "
         "OpType=ALLREDUCE, TensorShape=[4]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, "
         "OpType=BROADCAST).",
         EventKind.COMM_MISMATCH, "1"),
    ],
)  # fmt: skip
def test_ranks_that_a_text_names_are_in_the_record(line: str, kind: EventKind, names: str) -> None:
    event = only_event(read(f"[rank0]: {line}\n"), 0)
    assert (event.kind, event.values["names"]) == (kind, names)


def test_last_exception_of_a_chain_is_the_event() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\nConnectionResetError: [Errno 104] '
        "Connection reset by peer\n\n"
        "During handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "/job/a.py", line 9, in g\nRuntimeError: DataLoader worker (pid 970) is killed by signal: Killed. \n'
    )
    event = only_event(read("\n".join(f"[rank1]: {line}" for line in text.split("\n"))), 1)
    assert event.kind == EventKind.EXCEPTION
    assert event.values["causes"] == "ConnectionResetError"
    assert event.frame is not None
    assert event.frame.line == 9


# --------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("srun: error: node003: task 5: Segmentation fault (core dumped)", {5: -11}),
        ("srun: error: node003: task 2: Out Of Memory\nsrun: error: node003: task 3: Terminated", {2: -9, 3: -15}),
        ("srun: error: node003: task 2: Out Of Memory", {}),
        ("srun: error: node[1-3]: tasks 0-2: Exited with exit code 1", {}),
        (
            "x3004c0s7b0n0.hsn: rank 2 died from signal 11\nx3004c0s7b0n0.hsn: rank 0 died from signal 15",
            {2: -11, 0: -15},
        ),
        ("x3004c0s7b0n0.hsn: rank 2 exited with code 7", {2: 7}),
        ("srun: error: node[001-002]: tasks 0-2,7: Exited with exit code 1", {0: 1, 1: 1, 2: 1, 7: 1}),
        (
            "mpirun noticed that process rank 2 with PID 12345 on node node003 exited on signal 11 (Segmentation fault).",
            {2: -11},
        ),
        ("  Process name: [[31415,1],3]\n  Exit code:    7", {3: 7}),
        ("  Process name: [prterun-host-77@1,3]\n  Exit code:    7", {3: 7}),
        ("=   RANK 4 PID 771 RUNNING AT node003\n=   KILLED BY SIGNAL: 9 (Killed)", {4: -9}),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL", {2: -9}),
        (
            "[rank: 1] Child process with PID 77 terminated with code -9. Forcefully terminating all other processes",
            {1: -9},
        ),
        ("run.sh: line 12: 9182 Killed                  RANK=3 python train.py", {3: -9}),
        ("srun: error: n1: task 5: Killed\nsrun: Terminating StepId=1.0\nsrun: error: n1: tasks 0-4: Killed", {5: -9}),
        (
            "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-22T02:11:00 DUE TO TIME LIMIT ***\nmpirun noticed that "
            "process rank 0 with PID 12345 on node n1 exited on signal 9 (Killed).",
            {},
        ),
    ],
)
def test_endings_by_rank(line: str, codes: dict[int, int]) -> None:
    assert {ended.rank: ended.code for ended in read(line + "\n").exits} == codes


def test_number_of_a_communicator_in_a_store_key_is_no_rank() -> None:
    text = "[rank1]: torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
    assert only_event(read(text), 1).values["key"] == "/default_pg/0//cuda//0"
    assert "rank" not in only_event(read(text), 1).values


def test_tasks_of_torchrun_launched_by_srun_are_no_ranks() -> None:
    text = (
        "[default0]:[rank8]: hi\nE1122 01:53:32.1 1 torch/distributed/elastic/agent/server/api.py:9] x\nsrun: error: "
    )
    "n1: task 1: Killed\n"
    assert not read(text).exits


def test_rank_that_torchrun_stopped_is_found_by_elimination() -> None:
    text = (
        "[rank0]: hi\nW1122 01:53:31.924000 1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process "
        "1202 closing signal SIGTERM\n"
        "  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 1203)\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 "
        "(pid: 1201)\n"
    )
    logs = read(text)
    stopped = next(ended for ended in logs.exits if ended.rank == 1)
    assert (stopped.code, stopped.was_told, stopped.pid) == (-15, True, 1202)
    assert logs.ranks[1][0].events == ()


def test_rank_that_torchrun_had_not_to_stop_ended_well() -> None:
    text = (
        "[rank0]: hi\nE1122 01:53:32.1 1 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 1) local_rank: 2 "
        "(pid: 1203) of binary: python\n"
        "  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 1203)\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 "
        "(pid: 1201)\n"
    )
    assert {ended.rank: ended.code for ended in read(text).exits} == {0: 1, 1: 0, 2: 1}


def test_socket_of_a_loader_worker_is_the_ranks_own_error() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\n'
        '  File "/x/torch/utils/data/dataloader.py", line 9, in g\nConnectionResetError: [Errno 104] Connection reset by peer\n'
    )
    assert only_event(read("\n".join(f"[rank1]: {line}" for line in text.split("\n"))), 1).kind == EventKind.EXCEPTION


def test_earlier_attempt_of_an_elastic_job_is_history() -> None:
    text = (
        "[default0]:[rank0]: ValueError: first\n[default0]:[rank0]: Traceback (most recent call "
        "last):\n[default0]:[rank0]: ValueError: x\n"
        "torch/distributed/elastic/agent/server/api.py:9] [default] Worker group FAILED. 2/3 attempts left;  will "
        "restart worker group\n"
        "[default0]:[rank0]: going on\n"
    )
    assert read(text).ranks[0][0].events == ()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            "slurmstepd: error: *** STEP 994.0 ON node001 CANCELLED AT 2026-11-22T02:11:00 DUE TO TIME LIMIT ***",
            EventKind.TIME_LIMIT,
        ),
        (
            "slurmstepd: error: *** JOB 994 ON node001 CANCELLED AT 2026-11-22T02:11:00 DUE TO PREEMPTION ***",
            EventKind.PREEMPTED,
        ),
        ("srun: error: Node failure on node003", EventKind.NODE_LOST),
        ("trainer-worker-2   0/1     OOMKilled   0          12m", EventKind.KILLED),
        (
            "[1234567.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
            EventKind.DEVICE_ERROR,
        ),
        ("[12.5] Out of memory: Killed process 4711 (python) total-vm:9kB", EventKind.KILLED),
    ],
)
def test_scheduler_and_kernel_lines_are_events_of_the_job(line: str, kind: EventKind) -> None:
    job = read(line + "\n").job
    assert job is not None
    assert kind in [event.kind for event in job.events]


def test_killed_pid_is_the_rank_that_had_it() -> None:
    text = "  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 4711)\n[12.5] Out of memory: Killed process 4711 (python)\n"
    assert [event.kind for log in read(text).ranks[2] for event in log.events] == [EventKind.KILLED]


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "name", ["train.log", "job.out", "x.err", "notes.txt", "slurm-123.out", "console", "train.log.1"]
)
def test_folder_with_a_log_is_never_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("2026-11-22 01:00:00 INFO step 3\n")
    assert open_run(str(tmp_path)).job_log is not None


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_packed_log_is_read(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    ending = "gz" if pack is gzip.compress else "zst"
    (tmp_path / f"train.log.{ending}").write_bytes(pack(f"[rank1]: {WATCHDOG}\n".encode()) * 2)
    assert len(open_run(str(tmp_path)).ranks[1].events) == 2


@pytest.mark.repeats
def test_middle_of_a_huge_log_is_searched(tmp_path: Path) -> None:
    filler = b"2026-11-22 01:00:00 INFO train: a line of no interest, again and again and again\n" * 60_000
    (tmp_path / "train.log").write_bytes(
        filler + f"[rank3]:[E ProcessGroupNCCL.cpp:4] [Rank 3] {WATCHDOG}\n".encode() + filler + filler
    )
    events = open_run(str(tmp_path)).ranks[3].events
    assert [event.line for event in events] == [60_001]


@pytest.mark.parametrize(
    "line",
    [
        b"word (a=1, b=[2]) " * 400,
        b"[" * 5000,
        b"(pid=1, " * 700,
        b"9" * 5000,
        b"rank" * 1200,
        b"." * 199,
        b"a/b." * 50,
    ],
    ids=lambda line: line[:8].decode(),
)
def test_long_lines_cost_time_linear_in_their_bytes(line: bytes) -> None:
    data = (line + b"\n") * ((2 << 20) // len(line))
    began = time.process_time()
    read_text(JobText(source="x", scope="x"), [(data, False)])
    assert time.process_time() - began < 4
