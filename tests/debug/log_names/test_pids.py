"""In containers the ranks of all hosts may have the same process number: what a kernel says counts on its own host."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

WAITS = (
    "[E1127 10:15:00.000123 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=481, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600017 milliseconds "
    "before timing out.\n"
)
KILLED = "Nov 27 10:05:12 {host} kernel: Out of memory: Killed process {pid} (python) total-vm:90000000kB, anon-rss:64000000kB\n"


def job(folder: Path, *, silent: int, pids: tuple[int, ...] = (4101,) * 4) -> None:
    """Ranks on a host each; all but one run into the watchdog."""
    for rank, pid in enumerate(pids):
        steps = "".join(f"2026-11-27 10:0{step}:00,000 INFO step {step}\n" for step in range(5))
        end = "" if rank == silent else WAITS.format(rank=rank)
        who = f"2026-11-27 10:00:00,000 INFO rank {rank}/4 host node-{rank} pid {pid}\n"
        (folder / f"rank_{rank}.log").write_text(who + steps + end)


def top(folder: Path) -> Verdict:
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_a_process_is_its_ranks_on_its_own_host(tmp_path: Path, silent: int) -> None:
    job(tmp_path, silent=silent)
    (tmp_path / "syslog.txt").write_text(KILLED.format(host=f"node-{silent}.cluster", pid=4101))
    found = top(tmp_path)
    assert (found.verdict, found.culprits) == ("RANK_DIED", (silent,))


def test_the_name_of_a_file_tells_the_host(tmp_path: Path) -> None:
    job(tmp_path, silent=2)
    (tmp_path / "dmesg_node-2.txt").write_text(f"[ 91.2] {KILLED.partition('kernel: ')[2].format(pid=4101)}")
    found = top(tmp_path)
    assert (found.verdict, found.culprits) == ("RANK_DIED", (2,))


@pytest.mark.parametrize(
    ("host", "pid", "pids"),
    [
        ("login-7", 4101, (4101,) * 4),  # no host of the job
        ("node-0", 4103, (4100, 4101, 4102, 4103)),  # rank 3's number, on another host
        ("node-0", 977, (4101,) * 4),  # another process there
    ],
)
def test_another_process_is_no_ranks(tmp_path: Path, host: str, pid: int, pids: tuple[int, ...]) -> None:
    job(tmp_path, silent=1, pids=pids)
    (tmp_path / "syslog.txt").write_text(KILLED.format(host=host, pid=pid))
    assert top(tmp_path).culprits in ((), (1,))


def test_stacks_are_of_the_rank_on_the_host_of_their_file(tmp_path: Path) -> None:
    job(tmp_path, silent=1)
    for rank in range(4):
        call = "read (/job/data.py:44)" if rank == 1 else "all_reduce (torch/distributed/distributed_c10d.py:2501)"
        (tmp_path / f"pyspy_node-{rank}.txt").write_text(
            "Process 4101: python /job/train.py\nPython v3.12.4 (/usr/bin/python3.12)\n\n"
            f'Thread 4101 (idle): "MainThread"\n    {call}\n    main (/job/train.py:188)\n'
        )
    run = open_run(str(tmp_path))
    assert [len(run.ranks[rank].stacks) for rank in range(4)] == [1, 1, 1, 1]
    assert diagnose(run)[0].verdict != "RUNNING"
