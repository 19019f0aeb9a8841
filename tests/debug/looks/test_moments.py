"""Evidence of other moments: dumps of a job that goes on, copies of a recorder's folder, errors that a rank outlived."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.diagnosis.ends import told_to_end
from titan_ckpt.debug.diagnosis.standstill import _wait
from titan_ckpt.debug.incident.records import Heartbeat

START = 1_700_000_000 * 10**9
SECOND = 10**9


def top(folder: Path) -> Verdict:
    return diagnose(open_run(str(folder)))[0]


def entry(group: int, seq: int, state: str) -> dict[str, Any]:
    at = START + seq * SECOND
    return {
        "record_id": seq, "pg_id": group, "process_group": (str(group), f"tp{group}"), "collective_seq_id": seq, "p2p_seq_id": 0,
        "op_id": seq, "profiling_name": "nccl:all_reduce", "input_sizes": [[64]], "output_sizes": [[64]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": state, "retired": state == "completed",
        "time_created_ns": at, "time_discovered_started_ns": None if state == "scheduled" else at + 1,
        "time_discovered_completed_ns": at + 2 if state == "completed" else None, "is_p2p": False, "timeout_ms": 600_000,
        "frames": [{"name": "main", "filename": "/job/train.py", "line": 41}],
    }  # fmt: skip


def write_dump(folder: Path, rank: int, group: int, members: list[int], states: list[str]) -> None:
    config = {str(group): {"name": str(group), "desc": f"tp{group}", "ranks": str(members)}}
    entries = [entry(group, seq, state) for seq, state in enumerate(states, 1)]
    dump = {"version": "2.9", "pg_config": config, "entries": entries}
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


@pytest.mark.parametrize(("groups", "accused"), [(1, (1,)), (2, ())])
def test_devices_that_wait_apart_from_each_other_accuse_nobody(
    groups: int, accused: tuple[int, ...], tmp_path: Path
) -> None:
    """In each pair one device has begun what the other's has not: in one pair a fault, in two what a running job looks like."""
    for group in range(groups):
        pair = [2 * group, 2 * group + 1]
        write_dump(tmp_path, pair[0], group, pair, ["completed"] * 3 + ["started"])
        write_dump(tmp_path, pair[1], group, pair, ["completed"] * 3 + ["scheduled"])
    found = top(tmp_path)
    assert (found.verdict, found.culprits) == ("SCHEDULED_NOT_STARTED", accused)


def test_what_an_older_dump_shows_unfinished_accuses_nobody(tmp_path: Path) -> None:
    ranks = [0, 1, 2]
    for rank in ranks:
        states = ["completed"] * 3 + ["started"] if rank == 1 else ["completed"] * 20
        write_dump(tmp_path, rank, 0, ranks, states)
    run = open_run(str(tmp_path))
    assert [flag.ranks for flag in run.flags if flag.flag == "DUMP_SKEW"] == [(1,)]
    assert diagnose(run)[0].culprits == ()


CAUGHT = 'Traceback (most recent call last):\n  File "/job/metrics.py", line 5, in push\nConnectionError: gateway 503\n'
LATER = (
    "Traceback (most recent call last):\n  File \"/job/train.py\", line 11, in main\n"
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv "
    "operation to complete\n"
)  # fmt: skip
HANDLED = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("before", "between", "accused"),
    [("", "", ()), ("Exception in thread Thread-1 (up):\n", "", ()), ("", HANDLED, (1,))],
)
def test_an_error_before_a_wait_of_its_own_ended_no_rank(
    before: str, between: str, accused: tuple[int, ...], tmp_path: Path
) -> None:
    """The rank waited with its peers after the first error; only what a handler of it raised belongs to it."""
    for rank in range(3):
        mine = before + CAUGHT + between if rank == 1 else ""
        (tmp_path / f"rank_{rank}.log").write_text(f"step 1\nstep 2\n{mine}{LATER if rank < 2 else ''}")
    found = top(tmp_path)
    assert found.culprits == accused or (not accused and found.culprits == (2,))


@pytest.mark.parametrize("label", ["{}: ", "[rank{}]: "])
def test_another_step_of_slurm_that_failed_killed_no_rank(label: str, tmp_path: Path) -> None:
    steps = [f"{label.format(rank)}step {step}" for step in range(12) for rank in range(2)]
    text = [*steps[:6], "srun: error: n1: task 0: Exited with exit code 127", *steps[6:]]
    (tmp_path / "job.log").write_text("\n".join(text) + "\n")
    assert top(tmp_path).verdict == "RUNNING"
    (tmp_path / "job.log").write_text("\n".join([*steps, text[6]]) + "\n")
    assert top(tmp_path).verdict != "RUNNING"


def test_in_a_copied_folder_a_wait_is_no_longer_than_it_was() -> None:
    """The file of a dump is as old as the copy; the recorder's last tick tells when the job was ended."""
    run = job("0 1: all_reduce@1?")
    record = run.ranks[0]
    issued_ns = int(record.operations["created_ns"].max())
    beat = Heartbeat(step=1, phase="", phase_ns=issued_ns, alive_ns=issued_ns + SECOND, source="rank_00000.box")
    copied = replace(record.dumps[0], reason="sigterm", time_s=issued_ns / 1e9 + 3600)
    changed = replace(record, dumps=(copied,), heartbeat=beat)
    told = told_to_end(replace(run, ranks={0: changed}))
    assert told is not None
    assert _wait(changed, told.first_ns) == 1.0
