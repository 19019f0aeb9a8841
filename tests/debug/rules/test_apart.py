"""Watchdogs of ranks that wait in different groups: neither party waits for the other, unless a group holds all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

# torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.4 and later
TIMEOUT = (
    "[rank{0}]:[E1128 10:00:00.100 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600031 milliseconds before timing "
    "out.\n"
    "[rank{0}]:[E1128 10:00:00.101 ProcessGroupNCCL.cpp:2271] [PG ID 3 PG GUID 3({3}) Rank {0}]  failure detected by watchdog at "
    "work sequence id: {1} PG status: last enqueued work: {1}, last completed work: 7\n"
)


@pytest.mark.parametrize(("group", "accused"), [("mesh_dp", ()), ("default_pg", (4,))])
def test_few_that_wait_in_another_group(group: str, accused: tuple[int, ...], tmp_path: Path) -> None:
    most = [TIMEOUT.format(rank, 801, "ALLREDUCE", "mesh_tp" if accused == () else "default_pg") for rank in range(4)]
    (tmp_path / "log.txt").write_text("".join([*most, TIMEOUT.format(4, 55, "_REDUCE_SCATTER_BASE", group)]))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == accused
