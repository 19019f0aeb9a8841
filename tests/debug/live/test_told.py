"""Recorders' folders of jobs that were told to end, or whose ranks left no end: what was last recorded, and what that proves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD, RETURNED
from titan_ckpt.debug.incident.records import RankRecord, Run
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.record.hooks import BoxWriter

START_NS, MS = 1_700_000_000 * 10**9, 10**6
WAITING = 'File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n  '
LEAVING = (
    '  File "/venv/lib/python3.12/site-packages/torch/_dynamo/utils.py", line 9 in compile_times\n'
    '  File "/venv/lib/python3.12/site-packages/torch/_dynamo/utils.py", line 8 in dump_compile_times\n'
)


SIGNALS = 'Current thread 0x0000000000000001 [hears] (most recent call first):\n  File "/h.py", line 3 in hear\n\n'
MAIN = "Thread 0x0000000000000002 [MainThread] (most recent call first):\n  "
PROGRAM = 'File "/job/train.py", line 12 in <module>\n'


def job(folder: Path, last: Mapping[int, int]) -> Run:
    """Ranks that did operations 1 to 5 and wait in operation `last`, or have done with it where it is 5."""
    for rank, newest in last.items():
        box = BoxWriter(folder / f"rank_{rank:05d}.box", rank=rank, world_size=len(last))
        for kind, value in (("op", "all_reduce"), ("dtype", "Float"), ("group", ["0", "default_pg", list(last)])):
            box.add_text(kind, 0, value)
        box.add_text("site", 1, [["/job/train.py", 12, "<module>"]])
        for number in range(newest):
            created, at = START_NS + 100 * number * MS, HEADER_BYTES + number * RECORD.size
            done = 0 if number >= 5 else created + MS
            RECORD.pack_into(
                box.map, at, created, done, 1, number + 1, 1, -1, 0, 0, 0, 0, RETURNED if done else 0, number + 1
            )
        box.count = newest
        box.beat()
    return open_run(str(folder))


def left(
    run: Run, ends: Mapping[int, str], waited_s: float, inner: str = WAITING + PROGRAM, later_s: float = 0.0
) -> Verdict:
    """The verdict where the ranks' recorders left these ends: "told", "stopped" or "" (nothing, `later_s` after the others)."""

    def ended(record: RankRecord, end: str) -> RankRecord:
        assert record.heartbeat is not None
        alive_ns = START_NS + int((0.5 + waited_s + (0.0 if end else later_s)) * 1e9)
        beat = replace(record.heartbeat, alive_ns=alive_ns, moved_ns=START_NS + 500 * MS, is_stopped=end == "stopped")
        told = (parse_stacks(SIGNALS + MAIN + inner, "s", "sigterm"),) if end == "told" else ()
        return replace(record, heartbeat=beat, stacks=told)

    return diagnose(replace(run, ranks={rank: ended(record, ends[rank]) for rank, record in run.ranks.items()}))[0]


@pytest.mark.parametrize("last", [{0: 6, 1: 6, 2: 6}, {0: 6, 1: 6, 2: 5}])
def test_job_that_was_told_to_end_while_it_went_on(last: dict[int, int], tmp_path: Path) -> None:
    top = left(job(tmp_path, last), dict.fromkeys(last, "told"), 0.3)
    assert (top.verdict, top.culprits) == ("RUNNING", ())
    assert "SIGTERM" in top.headline


def test_job_that_was_told_to_end_after_a_long_wait(tmp_path: Path) -> None:
    last = {0: 6, 1: 6, 2: 5}
    assert left(job(tmp_path, last), dict.fromkeys(last, "told"), 900.0).verdict != "RUNNING"


@pytest.mark.parametrize("end", ["told", "stopped"])
def test_rank_without_an_end_among_others_that_ended(end: str, tmp_path: Path) -> None:
    top = left(job(tmp_path, {0: 6, 1: 6, 2: 5}), {0: end, 1: end, 2: ""}, 0.3)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_rank_without_an_end_among_others_that_run_is_not_dead(tmp_path: Path) -> None:
    top = left(job(tmp_path, {0: 6, 1: 6, 2: 5}), {0: "told", 1: "", 2: ""}, 0.3)
    assert top.verdict != "RANK_DIED"


def test_rank_that_outlived_the_others_is_not_dead(tmp_path: Path) -> None:
    """Its dump took longer than the launcher waited before it sent SIGKILL."""
    top = left(job(tmp_path, {0: 6, 1: 6, 2: 5}), {0: "told", 1: "told", 2: ""}, 0.3, later_s=20.0)
    assert top.verdict != "RANK_DIED"


def test_exit_functions_of_libraries_show_no_hang(tmp_path: Path) -> None:
    """torch._dynamo prints its times when the interpreter ends: who is there waits no more, and had waited before."""
    top = left(job(tmp_path, {0: 6, 1: 6, 2: 5}), {0: "told", 1: "told", 2: ""}, 0.3, inner=LEAVING.lstrip())
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_job_of_which_one_rank_was_told_is_not_called_healthy(tmp_path: Path) -> None:
    top = left(job(tmp_path, {0: 5, 1: 5}), {0: "told", 1: "stopped"}, 0.3, inner=PROGRAM)
    assert top.verdict == "INSUFFICIENT_DATA"


MAKES = 'File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 7 in new_group\n  '


@pytest.mark.parametrize(("group", "seq", "culprits"), [("1", 1, ()), ("0", 6, (0,))])
def test_rank_that_made_its_groups_is_not_late_for_them(
    group: str, seq: int, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """Who waits in a group that the others have not made yet is past `new_group`; who waits in an old one left it out."""
    job(tmp_path, {0: 5, 1: 5, 2: 5})
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=3)
    for kind, number, value in (
        ("op", 0, "all_reduce"),
        ("dtype", 0, "Float"),
        ("group", 0, ["0", "default_pg", [0, 1, 2]]),
    ):
        box.add_text(kind, number, value)
    box.add_text("group", 1, ["1", "", [0, 2]])
    box.add_text("site", 1, [["/job/train.py", 12, "<module>"]])
    for row in range(6):
        is_last = row == 5
        done, at = 0 if is_last else START_NS + (100 * row + 1) * MS, HEADER_BYTES + row * RECORD.size
        number, place = (seq, int(group)) if is_last else (row + 1, 0)
        outcome = RETURNED if done else 0
        RECORD.pack_into(
            box.map, at, START_NS + 100 * row * MS, done, 1, number, 1, -1, place, 0, 0, 0, outcome, row + 1
        )
    box.count = 6
    box.beat()
    run = open_run(str(tmp_path))
    inside = {rank: WAITING + PROGRAM if rank == 0 else MAKES + PROGRAM for rank in run.ranks}
    stacks = {rank: (parse_stacks(SIGNALS + MAIN + text, "s", "stall"),) for rank, text in inside.items()}
    top = diagnose(
        replace(run, ranks={rank: replace(record, stacks=stacks[rank]) for rank, record in run.ranks.items()})
    )[0]
    assert (top.verdict, top.culprits) == ("PG_INIT_HANG", culprits)
