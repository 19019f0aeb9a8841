"""NCCL's RAS and inspector: which ranks do not answer, are behind or stand still, and when that accuses them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.debug.read.test_reports import BEHIND_ONE, events, ras, ras_json, ras_rank, read
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import EventKind, VerdictKind


def missing(rank: int, *, unresponsive: bool = True, dead: bool = False, lost: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    host, pid = ("unknown", -1) if lost else (f"10.0.0.{rank}", 100 + rank)
    return {"rank": rank, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status}


@pytest.mark.parametrize(
    ("lost", "kind"),
    [(missing(3), VerdictKind.RANK_FROZEN), (missing(3, dead=True), VerdictKind.RANK_DIED),
     (missing(3, lost=True), VerdictKind.RANK_FROZEN)],
)  # fmt: skip
def test_one_process_that_does_not_answer_ras_is_named(lost: dict[str, Any], kind: VerdictKind, tmp_path: Path) -> None:
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(rank, 64) for rank in range(3)], [lost], 4)})
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits) == (kind, (3,))


def test_half_of_the_job_without_an_answer_accuses_nobody(tmp_path: Path) -> None:
    run = read(tmp_path, {"ras.json": ras_json([ras_rank(0, 4), ras_rank(1, 4)], [missing(2), missing(3)], 4)})
    assert not diagnose(run)[0].culprits


def test_rank_that_left_the_communicator_did_answer(tmp_path: Path) -> None:
    run = read(
        tmp_path, {"ras.json": ras_json([ras_rank(r, 4) for r in range(3)], [missing(3, unresponsive=False)], 4)}
    )
    assert [event.kind for event in events(run)] == [EventKind.DESYNC]
    assert not diagnose(run)[0].culprits


STATUS = """#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different status
  3 ranks have status RUNNING
  Rank 3 has status ABORT -- GPU 3 managed by process 1650386 on node 172.16.64.211
  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation 9
  Rank 1 has launched up to operation 8 -- GPU 1 managed by process 77 on node 172.16.64.210
"""


def test_ras_text_keeps_status_and_counts_apart(tmp_path: Path) -> None:
    found = events(read(tmp_path, {"ras.txt": ras(warnings=STATUS, status="MISMATCH")}))
    assert sorted(event.values["names"] for event in found) == ["1", "3"]


def test_two_ras_reports_with_equal_counts_show_who_is_stuck(tmp_path: Path) -> None:
    report = ras(warnings=BEHIND_ONE, status="MISMATCH")
    read(tmp_path, {"ras.1.txt": report, "ras.2.txt": report})
    os.utime(tmp_path / "ras.1.txt", (1_795_312_000, 1_795_312_000))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.STUCK_ON_CPU, (3,))


def test_copy_of_a_ras_report_is_no_second_look(tmp_path: Path) -> None:
    reports = [json.loads(ras_json([ras_rank(r, 60 if r == 3 else 64) for r in range(4)], [], 4)) for _ in range(2)]
    for report in reports:
        report["timestamp"] = "2026-11-22 02:07:08"
    files = {f"{number}.json": json.dumps(report) for number, report in enumerate(reports)}
    assert not diagnose(read(tmp_path, files))[0].culprits
    reports[1]["timestamp"] = "2026-11-22 02:08:08"
    top = diagnose(read(tmp_path, {"1.json": json.dumps(reports[1])}))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.STUCK_ON_CPU, (3,))


def test_two_ras_reports_with_progress_accuse_nobody(tmp_path: Path) -> None:
    report = ras(warnings=BEHIND_ONE, status="MISMATCH")
    later = report.replace("operation 64", "operation 74").replace("operation 60", "operation 70")
    assert not diagnose(read(tmp_path, {"ras.1.txt": report, "ras.2.txt": later}))[0].culprits


def inspector(rank: int, done: int) -> str:
    header = {"id": "0xfa5d", "comm_name": "unknown", "rank": rank, "n_ranks": 4, "nnodes": 2}
    metadata = {"inspector_output_format_version": "v4.2", "git_rev": "x", "rec_mechanism": "nccl_profiler_interface",
                "dump_timestamp_us": 1795312028000000, "hostname": f"node{rank // 2}", "pid": 100 + rank}  # fmt: skip
    perf = {
        "coll": "AllReduce",
        "coll_algo": "RING",
        "coll_proto": "LL",
        "coll_msg_size_bytes": 4096,
        "coll_exec_time_us": 61,
    }
    lines = [
        {"header": header, "metadata": metadata, "coll_perf": {**perf, "coll_sn": number}} for number in range(done)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_inspector_shows_what_each_rank_completed(tmp_path: Path) -> None:
    files = {f"node{rank // 2}-pid{100 + rank}.log": inspector(rank, 40 if rank == 2 else 57) for rank in range(4)}
    run = read(tmp_path, files)
    [event] = events(run)
    assert (event.kind, event.values["names"]) == (EventKind.DESYNC, "2")
    assert [(run.ranks[rank].host, run.ranks[rank].pid) for rank in (0, 3)] == [("node0", 100), ("node1", 103)]
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits, top.suspects) == (VerdictKind.INSUFFICIENT_DATA, (), (2,))


def test_inspector_of_equal_ranks_says_nothing(tmp_path: Path) -> None:
    assert not events(read(tmp_path, {f"n-pid{rank}.log": inspector(rank, 5) for rank in range(4)}))
