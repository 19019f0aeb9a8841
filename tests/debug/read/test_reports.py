"""Reports of other tools: NCCL RAS, nvidia-smi, DCGM, py-spy and gdb, in the forms of their own sources and manuals (named in
`debug/read/reports`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.frames import main_frame, main_thread_state
from titan_ckpt.debug.incident.kinds import EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import LogEvent, Run


def read(folder: Path, files: Mapping[str, str]) -> Run:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return open_run(str(folder))


def events(run: Run) -> list[LogEvent]:
    job = run.job_log.events if run.job_log else ()
    return [*job, *(event for record in run.ranks.values() for event in record.events)]


# --------------------------------------------------------------------------------------------------------------- RAS

RAS_HEAD = """\
NCCL version 2.28.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         2         4         4   RUNNING  {status}

Errors
======

{errors}
Warnings
========

{warnings}
"""
BEHIND_MANY = """#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  2 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.211
"""
BEHIND_ONE = """#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 64
  Rank 3 has launched up to operation 60 -- GPU 3 (NVML 7) managed by process 1650386 on node 172.16.64.211
"""
DEAD = """INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 5 managed by process 3487984 on node 172.16.64.213
"""
ERROR = """#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 1 reported Remote process error -- GPU 1 managed by process 77 on node 10.0.0.1
"""


def ras(*, errors: str = "", warnings: str = "", status: str = "OK") -> str:
    return RAS_HEAD.format(status=status, errors=errors, warnings=warnings)


@pytest.mark.parametrize(
    ("report", "kind", "names"),
    [(ras(warnings=BEHIND_MANY, status="MISMATCH"), EventKind.DESYNC, "0,2"),
     (ras(warnings=BEHIND_ONE, status="MISMATCH"), EventKind.DESYNC, "3"),
     (ras(errors=DEAD, status="INCOMPLETE"), EventKind.UNREACHABLE, "3"),
     (ras(errors=ERROR, status="ERROR"), EventKind.COMM_ERROR, "1")],
    ids=["several behind", "one behind", "incomplete", "error"],
)  # fmt: skip
def test_ras_text_names_the_ranks_in_trouble(report: str, kind: EventKind, names: str, tmp_path: Path) -> None:
    found = events(read(tmp_path, {"ras.txt": report}))
    assert names in [event.values.get("names") for event in found if event.kind == kind]


def test_ras_text_gives_host_and_pid_of_a_rank(tmp_path: Path) -> None:
    run = read(tmp_path, {"ncclras.out": ras(warnings=BEHIND_ONE)})
    assert (run.ranks[3].host, run.ranks[3].pid) == ("172.16.64.211", 1650386)


def test_ras_report_of_a_job_that_runs_accuses_nobody(tmp_path: Path) -> None:
    run = read(tmp_path, {"ras.txt": ras(warnings=BEHIND_MANY, status="MISMATCH")})
    assert not diagnose(run)[0].culprits
    assert diagnose(run)[0].verdict != VerdictKind.HEALTHY


def ras_rank(rank: int, count: int, *, error: int = 0) -> dict[str, Any]:
    status = {
        "init_state": 0,
        "async_error": error,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    return {"rank": rank, "host": f"10.0.0.{rank}", "pid": 100 + rank, "cuda_dev": 0, "nvml_dev": 0, "status": status,
            "collective_counts": {"Broadcast": 2, "AllReduce": count}}  # fmt: skip


def ras_json(ranks: list[dict[str, Any]], missing: list[dict[str, Any]], size: int) -> str:
    small = {"hash": "0x1", "size": 1, "ranks": [ras_rank(0, 9)], "missing_ranks": []}
    large = {"hash": "0x2", "size": size, "ranks": ranks, "missing_ranks": missing}
    return json.dumps({"nccl_version": "2.28.3", "communicators_count": 2, "communicators": [small, large],
                       "ras": {"collection_time_sec": 0.001, "timeouts_count": 0}})  # fmt: skip


def test_ras_json_names_who_is_behind_and_who_is_missing(tmp_path: Path) -> None:
    status = {"unresponsive": True, "considered_dead": True}
    missing = [{"rank": 3, "host": "10.0.0.3", "pid": 103, "cuda_dev": 0, "nvml_dev": 0, "status": status}]
    run = read(
        tmp_path, {"ras.json": ras_json([ras_rank(0, 64), ras_rank(1, 60), ras_rank(2, 64, error=6)], missing, 4)}
    )
    found = {(event.kind, event.values.get("names")) for event in events(run)}
    assert found == {(EventKind.DESYNC, "1"), (EventKind.UNREACHABLE, "3"), (EventKind.COMM_ERROR, "2")}
    assert [run.ranks[rank].pid for rank in range(4)] == [100, 101, 102, 103]


# --------------------------------------------------------------------------------------------------------------- GPUs

SMI = """\
==============NVSMI LOG==============

Timestamp                                 : Sun Nov 22 02:07:08 2026
Driver Version                            : 570.86.15

Attached GPUs                             : 2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : {action}
    Clocks Event Reasons
        Idle                              : Not Active
        HW Slowdown                       : {slow}
            HW Thermal Slowdown           : {slow}
    ECC Errors
        Volatile
            SRAM Correctable              : 3
            DRAM Uncorrectable            : {ecc}
        Aggregate
            DRAM Uncorrectable            : 7
    Remapped Rows
        Correctable Error                 : 0
        Remapping Failure Occurred        : No
    Processes
        GPU instance ID                   : N/A
        Process ID                        : {pid}
            Type                          : C
GPU 00000000:43:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : None
    ECC Errors
        Volatile
            DRAM Uncorrectable            : 0
"""
LOGS = {"rank_0.log": "[rank0]: step 1\n", "job.log": "[default1]:[rank1]: hello\n"}


def test_nvidia_smi_of_sound_gpus_says_nothing(tmp_path: Path) -> None:
    run = read(tmp_path, {**LOGS, "smi.txt": SMI.format(ecc=0, slow="Not Active", action="None", pid=5)})
    assert not events(run)


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"ecc": 2}, EventKind.DEVICE_ERROR), ({"action": "Reset"}, EventKind.DEVICE_ERROR),
     ({"slow": "Active"}, EventKind.DEVICE_SLOW)],
)  # fmt: skip
def test_nvidia_smi_trouble_goes_to_the_process(change: dict[str, Any], kind: EventKind, tmp_path: Path) -> None:
    text = SMI.format(**{"ecc": 0, "slow": "Not Active", "action": "None", "pid": 1650386, **change})
    run = read(tmp_path, {"ras.txt": ras(warnings=BEHIND_ONE), "node3/smi.txt": text})
    found = [event for event in run.ranks[3].events if event.kind == kind]
    assert found
    assert all("00000000:1B:00.0" in event.text for event in found)


def test_dcgm_metric_of_an_xid_is_a_device_error(tmp_path: Path) -> None:
    line = 'DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-1",pci_bus_id="00000000:3B:00.0",Hostname="node3"}'
    run = read(
        tmp_path, {"metrics.txt": f"# HELP DCGM_FI_DEV_XID_ERRORS Value\n{line} 79\n{line.replace('3', '4')} 0\n"}
    )
    [event] = events(run)
    assert (event.kind, event.values["xid"]) == (EventKind.DEVICE_ERROR, "79")


@pytest.mark.parametrize(
    "line",
    ["Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
     "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"],
)  # fmt: skip
def test_lost_gpu_is_a_device_error(line: str, tmp_path: Path) -> None:
    [event] = events(read(tmp_path, {"nvidia-smi.log": line + "\n"}))
    assert event.kind == EventKind.DEVICE_ERROR


# --------------------------------------------------------------------------------------------------------------- stacks

PYSPY = """\
Process {pid}: /usr/bin/python3 -u train.py{arguments}
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    wait (threading.py:324)
    fetch (train.py:31)
    main (train.py:60)
    <module> (train.py:71)
Thread 99 (idle): "pin_memory"
    select (selectors.py:415)
"""


def test_pyspy_dumps_of_many_processes_in_one_file(tmp_path: Path) -> None:
    stacks = "".join(PYSPY.format(pid=100 + rank, arguments="") for rank in (0, 1))
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(0, 4), ras_rank(1, 4)], [], 2), "stacks.txt": stacks})
    assert [(rank, len(run.ranks[rank].stacks), run.ranks[rank].pid) for rank in (0, 1)] == [(0, 1, 100), (1, 1, 101)]


def test_pyspy_short_file_names_are_no_lines_of_the_user(tmp_path: Path) -> None:
    run = read(tmp_path, {"py-spy-100.txt": PYSPY.format(pid=100, arguments=" --local_rank=1")})
    [stack] = run.ranks[1].stacks
    frame = main_frame(stack)
    assert frame is not None
    assert (frame.file, frame.line) == ("train.py", 31)


def test_stacks_of_an_unknown_process_are_flagged(tmp_path: Path) -> None:
    run = read(tmp_path, {**LOGS, "py-spy-100.txt": PYSPY.format(pid=100, arguments="")})
    assert [flag.flag for flag in run.flags if "100" in flag.text] == ["RANK_UNKNOWN"]


def test_pyspy_json_is_read_like_its_text(tmp_path: Path) -> None:
    frames = [{"name": "fetch", "filename": "/job/train.py", "short_filename": "train.py", "line": 31, "locals": None}]
    threads = [{"pid": 100, "thread_id": 1, "thread_name": None, "frames": []},
               {"pid": 100, "thread_id": 2, "thread_name": "MainThread", "frames": frames}]  # fmt: skip
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(0, 4)], [], 1), "dump.json": json.dumps(threads, indent=2)})
    frame = main_frame(run.ranks[0].stacks[0])
    assert frame is not None
    assert frame.place == "/job/train.py:31"


GDB = """\
[New LWP 120]
[Thread debugging using libthread_db enabled]

Thread 2 (Thread 0x7f10 (LWP 120) "pt_autograd_0"):
#0  0x00007f in pthread_cond_wait@@GLIBC_2.3.2 () from /lib/x86_64-linux-gnu/libpthread.so.0
#1  0x00007f in std::condition_variable::wait(std::unique_lock<std::mutex>&) () from /lib/libstdc++.so.6

Thread 1 (Thread 0x7f11 (LWP 100) "python"):
#0  {wait}
#1  {inside}
#2  0x00007f in _PyEval_EvalFrameDefault (f=Frame 0x7f01, for file /job/train.py, line 44, in step (x=1)) at ceval.c:4181
#3  0x00007f in _PyEval_EvalFrameDefault (f=Frame 0x7f02, for file /job/train.py, line 71, in <module> ()) at ceval.c:4181
[Inferior 1 (process 100) detached]
"""
POLL = "0x00007f in __GI___poll (fds=0x1, nfds=1, timeout=-1) at ../sysdeps/unix/sysv/linux/poll.c:29"


@pytest.mark.parametrize(
    ("inside", "state"),
    [("0x01 in c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal(std::chrono::duration<long>) () from /x/libtorch_cuda.so",
      RankState.IN_TORCH),
     ("0x01 in cuStreamSynchronize () from /lib/libcuda.so.1", RankState.IN_TORCH),
     ("0x01 in my_io_wait (fd=3) at src/io.c:12", RankState.ON_CPU)],
)  # fmt: skip
def test_gdb_stack_shows_wait_and_python_line(inside: str, state: RankState, tmp_path: Path) -> None:
    text = GDB.format(wait=POLL, inside=inside)
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(0, 4)], [], 1), "gdb.txt": text})
    [stack] = run.ranks[0].stacks
    assert stack.main is not None
    assert main_thread_state(stack.main)[0] == state
    frame = main_frame(stack)
    assert frame is not None
    assert frame.place == "/job/train.py:44"


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_hostile_reports_take_time_linear_in_bytes(size: int, tmp_path: Path) -> None:
    filler = (
        'Thread 1 (Thread 0x7f11 (LWP 100) "python"):\n'
        + "#0  0x1 in f ("
        + "(" * size
        + "\n"
        + "Process 1: " * (size // 11)
    )
    begin = time.process_time()
    read(
        tmp_path,
        {**LOGS, "a.txt": filler, "b.txt": ras(warnings="  Rank 1 " * (size // 9)), "c.txt": SMI[:60] + " : " * size},
    )
    assert time.process_time() - begin < 5


RAY = "Stack dump for root   100  1.0  ray::TrainWorker.run\nProcess 100: ray::TrainWorker.run\nPython v3.11 (/usr/bin/python3)\n"


def test_ray_stack_is_read_as_pyspy(tmp_path: Path) -> None:
    frames = "    pthread_cond_wait (libc.so.6)\n    fetch (/job/train.py:31)\n    <module> (/job/train.py:71)\n"
    text = RAY + 'Thread 100 (idle): "MainThread"\n' + frames
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(0, 4)], [], 1), "ray_stack.txt": text})
    frame = main_frame(run.ranks[0].stacks[0])
    assert frame is not None
    assert frame.place == "/job/train.py:31"


# ------------------------------------------------------------------------------------------------------- documents


def pod(worker: int, reason: str, env: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": f"fit-worker-{worker}"},
        "spec": {"containers": [{"name": "fit", "env": [{"name": key, "value": value} for key, value in env.items()]}]},
        "status": {"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": reason}}}]},
    }


def test_pods_as_json_name_the_rank_that_was_ended(tmp_path: Path) -> None:
    items = [pod(worker, "OOMKilled" if worker == 2 else "Completed", {"RANK": str(worker)}) for worker in range(3)]
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": items}))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "oom", (2,))


@pytest.mark.parametrize("indent", [None, 4])
def test_pods_without_a_rank_are_facts(tmp_path: Path, indent: int | None) -> None:
    items = [pod(worker, "Error" if worker == 2 else "Completed", {}) for worker in range(3)]
    for worker, item in enumerate(items):
        item["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 139 * (worker == 2)
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": items}, indent=indent))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert any("fit-worker-2" in item.text and "139" in item.text for item in top.evidence)


def test_pod_of_several_ranks_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "pod.json").write_text(json.dumps(pod(1, "OOMKilled", {"PET_NPROC_PER_NODE": "8", "RANK": "1"})))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert any("fit-worker-1" in item.text for item in top.evidence)


def test_export_of_entries_is_read_under_any_name(tmp_path: Path) -> None:
    entries = [
        {"textPayload": f"[rank{rank}]: {line}", "timestamp": f"2026-11-25T01:20:1{n}Z"}
        for n, (rank, text) in enumerate(((1, OWN), (0, PEER)))
        for line in text.splitlines()
    ]
    (tmp_path / "fit.log").write_text(json.dumps(entries))
    assert first_verdict(tmp_path).culprits == (1,)
