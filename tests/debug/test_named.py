"""Ranks that texts of others name, reports of kernels, drivers and schedulers, and evidence that cannot choose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.diagnosis.rank_frozen import frozen
from titan_ckpt.debug.incident.records import Names, RankRecord, Run
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.report.action import action_for

STEPS = "".join(f"2026-11-22 01:0{step}:00,000 INFO train: step {step}\n" for step in range(5))
DEVICE = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default))"


def judged(folder: Path, ranks: dict[int, str], job: str = "", name: str = "job.log") -> Verdict:
    for rank, text in ranks.items():
        (folder / f"rank_{rank}.log").write_text(text)
    if job:
        (folder / name).write_text(job)
    return diagnose(open_run(str(folder)))[0]


def raised(message: str, line: int = 9) -> str:
    return (
        f'{STEPS}Traceback (most recent call last):\n  File "/job/train.py", line {line}, in <module>\n    step()\n'
        f'  File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 48, in monitored_barrier\n'
        f"    return group_to_use.monitored_barrier(timeout)\nRuntimeError: {message}\n"
    )


def differs(own: int, mine: str, other: int, theirs: str) -> str:
    calls = [f"CollectiveFingerPrint(SequenceNumber=8, {call}, {DEVICE})" for call in (mine, theirs)]
    return raised(
        f"Detected mismatch between collectives on ranks. Rank {own} is running collective: {calls[0]}, but Rank {other} is "
        f"running collective: {calls[1]}.Collectives differ in the following aspects:"
    )


PASSED = (
    "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check "
    "rank 0 logs for faulty rank."
)


def test_rank_that_missed_the_monitored_barrier(tmp_path: Path) -> None:
    first = raised("[Rank 0]: Rank 2 failed to pass monitoredBarrier in 60000 ms")
    top = judged(tmp_path, {0: first, 1: raised(PASSED.format(1)), 2: STEPS, 3: raised(PASSED.format(3))})
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (2,), (0,))


CUT_OFF = (
    "[Rank {}] Rank 0 failed to pass monitoredBarrier... Original exception: \n[gloo/transport/tcp/pair.cc:598] closed"
)


def test_who_gave_up_in_the_barrier_had_come_to_it(tmp_path: Path) -> None:
    """ProcessGroupGloo.cpp: rank 0 gives up for rank 2 and ends, rank 1 then names rank 0; rank 3 was ended before it wrote."""
    first = raised("Rank 2 failed to pass monitoredBarrier in 30000 ms")
    top = judged(tmp_path, {0: first, 1: raised(CUT_OFF.format(1)), 2: STEPS, 3: STEPS})
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (2,))


STORE = (
    "[rank{0}]: torch.distributed.DistBackendError: [{0}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
    "via c10d key-value store by key '0', but store->get('0') got error: {1}\n"
)


@pytest.mark.parametrize(
    ("error", "culprits"),
    [
        ("Socket Timeout", (0,)),
        ("wait timeout after 600000ms, keys: /default_pg/0//0", (0,)),
        ("Connection reset by peer", ()),
        ("Broken pipe", ()),
        ("Connection was likely closed. Did the remote server shutdown or crash?", ()),
    ],
)
def test_a_lost_connection_to_the_store_names_no_rank(error: str, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """ProcessGroupNCCL::broadcastUniqueNCCLID, TCPStore.cpp: the store may be the launcher's."""
    told = "".join(STORE.format(rank, error) for rank in (1, 2, 3))
    assert judged(tmp_path, {}, told).culprits == culprits


def test_rank_that_passed_the_monitored_barrier_is_innocent(tmp_path: Path) -> None:
    top = judged(tmp_path, {1: raised(PASSED.format(1)), 2: STEPS})
    assert not {0, 1} & set(top.culprits)


def test_ranks_that_name_each_other_are_not_accused(tmp_path: Path) -> None:
    texts = {rank: raised(f"Ranks {1 - rank} failed to pass monitoredBarrier in 60000 ms") for rank in (0, 1)}
    assert judged(tmp_path, {**texts, 2: STEPS}).culprits not in ((0,), (1,), (0, 1))


def test_rank_that_a_desync_report_misses(tmp_path: Path) -> None:
    report = (
        "[rank{0}]:[E1122 02:07:08.46 ProcessGroupNCCL.cpp:1375] [Rank {0}] Timeout at NCCL work: 8, last enqueued NCCL work: 8, "
        "last completed NCCL work: 7.\n[rank{0}]: \t - [1] finished collective #7, but didn't join collective #8 (count from 1)\n"
        "[rank{0}]: \t - [0, 2, 3] joined but didn't finish collective #8 (count from 1)\n"
    )
    top = judged(tmp_path, {rank: STEPS + (report.format(rank) if rank != 1 else "") for rank in range(4)})
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))


SUM = "OpType=ALLREDUCE, TensorShape=[20, 10], TensorDtypes=Float"
WIDE = SUM.replace("[20", "[40")
HALF = SUM.replace("Float", "Half")
CAST = "OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long"


@pytest.mark.parametrize(
    ("other", "verdict"), [(WIDE, "SIZE_MISMATCH"), (HALF, "DTYPE_MISMATCH"), (CAST, "OP_MISMATCH")]
)
def test_rank_whose_fingerprint_differs_from_most(tmp_path: Path, other: str, verdict: str) -> None:
    texts = {rank: differs(rank, SUM, 3, other) for rank in range(3)}
    top = judged(tmp_path, {**texts, 3: differs(3, other, 0, SUM)})
    assert (top.verdict, top.culprits, top.victims) == (verdict, (3,), (0, 1, 2))


def test_two_fingerprints_name_two_suspects(tmp_path: Path) -> None:
    top = judged(tmp_path, {0: differs(0, SUM, 1, CAST), 1: differs(1, CAST, 0, SUM)})
    assert (top.verdict, top.culprits, top.suspects) == ("OP_MISMATCH", (), (0, 1))


def test_fingerprint_of_an_old_release_counts_by_its_operation(tmp_path: Path) -> None:
    message = (
        f"Detected mismatch between collectives on ranks. Rank {{}} is running collective: "
        f"CollectiveFingerPrint({SUM}, {DEVICE}), but Rank 2 is running collective: REDUCE."
    )
    top = judged(tmp_path, {0: raised(message.format(0)), 1: raised(message.format(1)), 2: STEPS})
    assert (top.verdict, top.culprits) == ("OP_MISMATCH", (2,))


# ---------------------------------------------------------------------------------------------------------- reports

WATCHDOG = (
    "[rank{0}]:[E1122 02:07:08.40 ProcessGroupNCCL.cpp:685] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600060 milliseconds\n"
)


def on_hosts(ranks: int, per_host: int, quiet: tuple[int, ...]) -> dict[int, str]:
    waited = {rank: "" if rank in quiet else WATCHDOG.format(rank) for rank in range(ranks)}
    return {rank: f"node{rank // per_host + 1:03}: [rank{rank}]: up\n{STEPS}{text}" for rank, text in waited.items()}


def test_ranks_of_a_lost_host_are_one_verdict(tmp_path: Path) -> None:
    job = "".join(f"node{rank // 2 + 1:03}: [rank{rank}]: started\n" for rank in range(8))
    job += "srun: error: Node failure on node[003]\n"
    top = judged(tmp_path, on_hosts(8, 2, (4, 5)), job, "slurm-7.out")
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "host", (4, 5))


def test_gpu_that_fell_off_the_bus_by_pid(tmp_path: Path) -> None:
    job = "[rank2]: pid 4712\n(RayTrainWorker pid=4712, ip=10.0.0.4) [rank2]: up\n"
    (tmp_path / "dmesg.txt").write_text(
        "[ 99.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4712, name=python, GPU has fallen off the bus.\n"
    )
    top = judged(tmp_path, {rank: STEPS + WATCHDOG.format(rank) * (rank != 2) for rank in range(4)}, job)
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "device", (2,))


def test_rank_that_logged_on_after_a_report_lives(tmp_path: Path) -> None:
    report = "NVRM: Xid (PCI:0000:3b:00): 13, pid=4712, name=python, Graphics Exception\n"
    later = "2026-11-22 01:09:00,000 INFO train: step 9\n"
    top = judged(tmp_path, {0: STEPS + report + later, 1: STEPS + later})
    assert top.culprits == ()


@pytest.mark.parametrize("xid", [45, 63, 92])
def test_xid_that_ends_no_process_accuses_nobody(tmp_path: Path, xid: int) -> None:
    report = f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=4712, name=python\n"
    top = judged(tmp_path, {rank: STEPS + report * (rank == 1) + WATCHDOG.format(rank) for rank in range(3)})
    assert top.culprits == ()


# ------------------------------------------------------------------------------------------------------- interrupts

WAITED = """\
Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20108
"""
HANDLING = """
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 13, in <module>
    dist.all_reduce(h)
  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 53, in _get_msg_dict
    def _get_msg_dict(func_name, *args, **kwargs):
KeyboardInterrupt
"""
BUSY = """\
Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    h = next_batch(step)
  File "/job/train.py", line 9, in next_batch
    time.sleep(900)
KeyboardInterrupt
"""


def test_interrupt_in_the_handling_of_an_error_hides_it_not(tmp_path: Path) -> None:
    top = judged(tmp_path, {rank: STEPS + (BUSY if rank == 1 else WAITED + HANDLING) for rank in range(4)})
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (1,), (0, 2, 3))
    assert "/job/train.py:9" in top.headline


def test_who_left_a_broadcast_is_no_more_suspect_than_the_others(tmp_path: Path) -> None:
    def timed_out(call: str, line: int) -> str:
        return raised("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for recv", line).replace(
            "monitored_barrier", call
        )

    top = judged(tmp_path, {0: timed_out("broadcast", 7), 1: timed_out("broadcast", 7), 2: timed_out("all_reduce", 8)})
    assert (top.culprits, top.suspects) == ((), (0, 1, 2))


GIL = """\
Current thread 0x00007f0000000001 [MainThread] (most recent call first):
{}  File "/job/train.py", line 3 in <module>
"""
IMPORT = '  File "<frozen importlib._bootstrap_external>", line 1176 in create_module\n'
HASH = '  File "/job/native.py", line 5 in digest\n'


@pytest.mark.parametrize(("inside", "is_held"), [(IMPORT, False), (HASH, True)])
def test_import_that_keeps_the_gil_is_no_verdict(inside: str, is_held: bool) -> None:
    stack = replace(parse_stacks(GIL.format(inside), "rank_00000.gil.stacks", "gil"), reason="gil")
    record = RankRecord(rank=0, stacks=(stack,), has_recorder=True)
    run = Run(url="", incident="", world_size=1, ranks={0: record}, groups=(), names=Names())
    assert (frozen(run, record, False) is not None) == is_held


def test_early_traceback_before_untimed_steps_was_survived(tmp_path: Path) -> None:
    handled = 'Traceback (most recent call last):\n  File "/job/t.py", line 1, in f\nModuleNotFoundError: No module named "x"\n'
    steps = "".join(f"step {step} loss 2.0\n" for step in range(9))
    top = judged(tmp_path, {rank: handled * (rank == 2) + steps + WATCHDOG.format(rank) for rank in range(4)})
    assert top.culprits == ()


def entry(number: int, name: str, state: str) -> dict[str, object]:
    return {
        "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": 0, "is_p2p": True,
        "p2p_seq_id": number + 1,
        "profiling_name": f"nccl:{name}", "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "state": state,
        "retired": state == "completed", "time_created_ns": 10**18 + number * 10**6, "frames": [],
    }  # fmt: skip


def test_send_left_out_of_a_repeated_order_is_the_verdict(tmp_path: Path) -> None:
    orders = {0: ["send 0->1", "recv 0<-1"], 1: ["recv 1<-0", "send 1->0"]}
    for rank, order in orders.items():
        names = (order * 4)[: 7 if rank == 0 else 6]
        names += ["recv 0<-1"] if rank == 0 else ["recv 1<-0", "recv 1<-0"]
        entries = [entry(i, name, "completed" if i < len(names) - 1 else "started") for i, name in enumerate(names)]
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        (tmp_path / f"rank_{rank}.json").write_text(
            json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
        )
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("P2P_MISSING_PEER", (1,))


DUMP = """\
Process {}: python train.py
Python v3.11.9 (/opt/python3.11)

Thread {} (active): "MainThread"
    {}
    <module> (train.py:310)
"""


def test_stacks_of_all_ranks_in_one_file(tmp_path: Path) -> None:
    """As a shell's loop over ranks writes them: the heading above each says whose they are."""
    waits, busy = "all_reduce (torch/distributed/distributed_c10d.py:2806)", "fetch (data/shards.py:44)"
    text = "".join(
        f"=== rank {rank} ===\n" + DUMP.format(5000 + rank, 1, busy if rank == 2 else waits) for rank in range(4)
    )
    (tmp_path / "stacks.txt").write_text(text)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (2,), (0, 1, 3))


LAGS = (
    "\t - To our best knowledge, the lagging ranks that caused the desync are:\n\t   - [{}] joined but didn't finish "
)


@pytest.mark.parametrize(("number", "culprits"), [(5, (1,)), (6, ())])
def test_rank_that_lags_behind_what_timed_out(number: int, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """It joined the collective before; where it joined the one that timed out, it waits like the others."""
    texts = {rank: STEPS + CAUGHT.format(rank) for rank in (0, 2, 3)}
    texts[0] += LAGS.format(1) + f"collective #{number} (count from 1)\n"
    assert judged(tmp_path, {**texts, 1: STEPS}).culprits == culprits


CAUGHT = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, "
    "NumelIn=3, NumelOut=3, Timeout(ms)=1800000) ran for 1800035 milliseconds before timing out.\n"
)
VLLM = "(Worker_TP{0} pid=410{0}) {1}\n"


def test_workers_of_a_server(tmp_path: Path) -> None:
    at = "ERROR 10-23 02:44:30 [multiproc_executor.py:596] "
    lines = [
        "Traceback (most recent call last):",
        '  File "/srv/run.py", line 5, in step',
        "RuntimeError: shapes do not fit",
    ]
    text = "".join(VLLM.format(rank, "INFO 10-23 02:40:10 [gpu_model_runner.py:1500] Loading") for rank in range(4))
    top = judged(tmp_path, {}, text + "".join(VLLM.format(2, at + line) for line in lines))
    assert (top.verdict, top.culprits, top.line) == ("RANK_DIED", (2,), 5)
    died = (
        "ERROR 10-23 02:44:30 [multiproc_executor.py:140] Worker proc VllmWorker-3 died unexpectedly, shutting down.\n"
    )
    top = judged(tmp_path, {}, text + died)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (3,))


@pytest.mark.parametrize(("xid", "subtype", "action"), [(79, "device", "EXCLUDE"), (31, "python_exception", "STOP")])
def test_page_fault_on_a_gpu_is_the_programs(xid: int, subtype: str, action: str, tmp_path: Path) -> None:
    """NVIDIA's list: 13, 31 and 43 come of what a program does on the GPU, 79 of the GPU itself."""
    job = "[rank2]: pid 4712\n(RayTrainWorker pid=4712, ip=10.0.0.4) [rank2]: up\n"
    (tmp_path / "dmesg.txt").write_text(f"[ 99.1] NVRM: Xid (PCI:0000:3b:00): {xid}, pid=4712, name=python\n")
    top = judged(tmp_path, {rank: STEPS + CAUGHT.format(rank) * (rank != 2) for rank in range(4)}, job)
    assert (top.verdict, top.culprits, top.subtype) == ("RANK_DIED", (2,), subtype)
    assert action_for(open_run(str(tmp_path)), top).action == action


KILLED = "[88123.3] Memory cgroup out of memory: Killed process 31 (python3) total-vm:98123456kB, anon-rss:61234567kB\n"
ENDED = (
    "E0302 10:31:02.9 991 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 31) "
    "of binary: python3\n"
)


def test_the_kernel_s_log_says_what_sigkill_was_for(tmp_path: Path) -> None:
    """mm/oom_kill.c, __oom_kill_process; torchrun's table has the number of the process."""
    (tmp_path / "dmesg.log").write_text(KILLED)
    top = judged(tmp_path, {1: STEPS}, ENDED, "console.log")
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "oom", (1,))
    assert any("Killed process 31" in item.text for item in top.evidence)
    assert not any("dmesg" in step for step in top.next_steps)
