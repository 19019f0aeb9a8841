"""Lines in which torch names a rank by its place in a process group alone, beside those that it begins with the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

SAID = (
    "[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=129, OpType=_REDUCE_SCATTER_BASE, "
    "NumelIn={size}, NumelOut=1024, Timeout(ms)=600000) ran for 600045 milliseconds before timing out."
)
GROUP = "[PG ID {group} PG GUID {group}({name}) Rank {place}] "
FAILED = " failure detected by watchdog at work sequence id: 129 PG status: last enqueued work: 129, last completed work: 128"
ENDED = "Process group watchdog thread terminated with exception: "


def watchdogs(ranks: range, group: str, name: str, odd: int) -> str:
    """What the watchdogs of a group of these ranks write into one console; rank `odd` has another size."""
    lines = []
    for place, rank in enumerate(ranks):
        said, of = (
            SAID.format(place=place, size=8192 if rank == odd else 4096),
            GROUP.format(group=group, name=name, place=place),
        )
        head = f"[rank{rank}]:[E1128 03:12:05.02 ProcessGroupNCCL.cpp:629] "
        lines += [head + said, head + of + FAILED, f"  what():  {of}{ENDED}{said}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("group", "name", "first"), [("0", "default_pg", 0), ("1", "mesh_fsdp", 0), ("1", "mesh_fsdp", 4)]
)
def test_a_rank_before_a_line_is_one_of_the_job(group: str, name: str, first: int, tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text(watchdogs(range(first, first + 4), group, name, odd=first + 1))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", (first + 1,))


def test_a_place_in_a_group_alone_is_no_rank_of_the_job(tmp_path: Path) -> None:
    text = watchdogs(range(4), "1", "mesh_fsdp", odd=1)
    (tmp_path / "console.log").write_text("".join(f"{line.rpartition(']:')[2]}\n" for line in text.splitlines()))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()
