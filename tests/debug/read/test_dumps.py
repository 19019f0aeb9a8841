"""Flight Recorder dumps and TorchComms' by version. The keys of 2.2, 2.3, 2.4, 2.7 and 2.10 are those of torch's sources
(torch/csrc/distributed/c10d: TraceUtils.h, FlightRecorder.hpp, FlightRecorderDetail.hpp) and of meta-pytorch/torchcomms,
comms/torchcomms/hooks/fr; the versions between are made from their neighbours, and 2.0 and 2.1 are a guess."""

from __future__ import annotations

import json
import pickle  # to write dumps as torch does
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import OperationState, VerdictKind

START = 1_700_000_000_000_000_000
FRAMES = [
    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 2806},
    {"name": "main", "filename": "/job/train.py", "line": 41},
]
# What a release added, or named otherwise, beside what all have.
VERSIONS = ("2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10")


def number(version: str) -> int:
    return int(version.partition(".")[2])


def entry(version: str, seq: int, *, is_done: bool = True, **more: Any) -> dict[str, Any]:
    minor = number(version)
    state = "completed" if is_done else "started"
    found: dict[str, Any] = {
        "record_id": seq - 1, "pg_id": 0, "profiling_name": "nccl:all_reduce", "time_created_ns": START + seq * 10**9,
        "input_sizes": [[64, 32]], "output_sizes": [[64, 32]], "state": state, "retired": is_done, "frames": FRAMES,
        "time_discovered_started_ns": START + seq * 10**9 + 1,
        "time_discovered_completed_ns": START + seq * 10**9 + 2 if is_done else None,
    }  # fmt: skip
    if minor == 0:
        return {**found, "seq_id": seq, **more}
    found |= {"op_id": seq, "process_group": ("0", "default_pg") if minor >= 2 else "0"}
    found |= {"collective_seq_id": seq, "p2p_seq_id": 0} if minor >= 1 else {}
    if minor >= 2:
        found |= {"input_dtypes": ["Float"], "output_dtypes": ["Float"], "is_p2p": False, "timeout_ms": 600_000}
    if minor >= 10:
        found |= {"thread_id": "140", "thread_name": "python"}
    return {**found, **more}


def dump(version: str, entries: list[dict[str, Any]], *, ranks: Any = "[0, 1, 2]") -> dict[str, Any]:
    minor = number(version)
    found: dict[str, Any] = {"version": version, "entries": entries}
    if minor >= 1:
        found["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        found["nccl_comm_state"] = {"0x55d0": {"rank": "0", "id": "77"}}
    if minor >= 3:
        found["pg_status"] = {
            "0": {"last_enqueued_collective": 3, "last_started_collective": 3, "last_completed_collective": 2}
        }
    if minor >= 9:
        found |= {"comm_lib_version": "2.27.5", "host_name": "node3"}
    return found


def write(
    folder: Path, version: str, *, as_json: bool, stem: str = "nccl_trace_rank_", ranks: Any = "[0, 1, 2]"
) -> Path:
    """Ranks 0 and 1 wait in #3, which rank 2 has not issued."""
    folder.mkdir(exist_ok=True)
    for rank in range(3):
        entries = [entry(version, seq) for seq in (1, 2)]
        entries += [entry(version, 3, is_done=False)] if rank < 2 else []
        value = dump(version, entries, ranks=ranks)
        path = folder / f"{stem}{rank}"
        path.write_bytes(json.dumps(value).encode() if as_json else pickle.dumps(value, protocol=2))
    return folder


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
@pytest.mark.parametrize("version", VERSIONS)
def test_dump_of_each_version_names_the_absent_rank(version: str, as_json: bool, tmp_path: Path) -> None:
    run = open_run(str(write(tmp_path / "d", version, as_json=as_json)))
    assert not [flag for flag in run.flags if flag.flag == "DUMP_CORRUPT"]
    assert [len(run.ranks[rank].operations) for rank in range(3)] == [3, 3, 2]
    last = run.operation(0, -1)
    assert (last.seq, last.op, last.state, last.sizes, last.frames[-1].line) == (
        3, "all_reduce", OperationState.STARTED, "64x32", 41,
    )  # fmt: skip
    top = diagnose(run)[0]
    assert top.verdict == VerdictKind.STUCK_ON_CPU
    assert top.culprits == (2,) or top.suspects == (2,)


@pytest.mark.parametrize("ranks", ["[0, 1, 2]", "[0,1,2]", [0, 1, 2], (2, 1, 0), ["0", "1", "2"], "0, 1, 2", "0,1,2"])
def test_members_of_a_group_in_each_spelling(ranks: Any, tmp_path: Path) -> None:
    run = open_run(str(write(tmp_path / "d", "2.10", as_json=False, ranks=ranks)))
    assert {group.members for group in run.groups} == {(0, 1, 2)}


@pytest.mark.parametrize(
    "stem", ["torchcomm_fr_trace_", ".torchcomm_fr_trace_", "rank_", "nccl_trace_", "hang", "node3-dump-", "job77.fr."]
)
def test_rank_of_a_dump_ends_its_name(stem: str, tmp_path: Path) -> None:
    run = open_run(str(write(tmp_path / "d", "2.10", as_json=False, stem=stem)))
    assert [len(run.ranks[rank].operations) for rank in range(3)] == [3, 3, 2]


def test_torchcomms_dump_has_no_sends_and_no_backend_name(tmp_path: Path) -> None:
    for rank in range(2):
        entries = [entry("2.10", 1, profiling_name="all_reduce", process_group=["main_comm", ""])]
        entries += [entry("2.10", 2, is_done=False, profiling_name="all_gather", process_group=["main_comm", ""])] * (
            rank == 0
        )
        value = {"version": "2.10", "comm_lib_version": "", "entries": entries,
                 "pg_config": {"main_comm": {"name": "main_comm", "desc": "", "ranks": "[0, 1]"}}}  # fmt: skip
        (tmp_path / f"torchcomm_fr_trace_{rank}").write_text(json.dumps(value))
    run = open_run(str(tmp_path))
    assert [run.operation(0, row).op for row in (0, 1)] == ["all_reduce", "all_gather"]
    top = diagnose(run)[0]
    assert top.culprits == (1,) or top.suspects == (1,)


def test_members_of_a_batch_share_its_state_and_number(tmp_path: Path) -> None:
    p2p: dict[str, Any] = {"is_p2p": True, "collective_seq_id": 0, "p2p_seq_id": 1}
    for rank, (send, receive) in enumerate([("send 0->1", "recv 0<-1"), ("send 1->0", "recv 1<-0")]):
        entries = [
            entry("2.4", 1, is_done=False, **p2p, profiling_name=f"nccl:{send}"),
            entry("2.4", 2, is_done=False, **p2p, profiling_name=f"nccl:{receive}"),
            entry("2.4", 3, **p2p, profiling_name="nccl:coalesced"),
        ]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump("2.4", entries, ranks="[0, 1]"), protocol=2))
    run = open_run(str(tmp_path))
    assert len(run.ranks[0].operations) == 2
    assert all(run.operation(0, row).state == OperationState.COMPLETED for row in (0, 1))


@pytest.mark.parametrize(
    "missing",
    ["state", "retired", "input_dtypes", "output_sizes", "frames", "timeout_ms", "p2p_seq_id", "time_discovered_started_ns",
     "time_discovered_completed_ns", "is_p2p", "record_id", "pg_id", "op_id", "input_sizes", "time_created_ns"],
)  # fmt: skip
def test_entry_without_a_field_is_still_read(missing: str, tmp_path: Path) -> None:
    found = entry("2.10", 1)
    del found[missing]
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump("2.10", [found], ranks="[0]"), protocol=2))
    run = open_run(str(tmp_path))
    assert [run.operation(0, 0).op] == ["all_reduce"]


def test_dump_of_pending_operations_only_is_not_whole(tmp_path: Path) -> None:
    entries = [entry("2.10", 1, is_done=False), entry("2.10", 7, is_done=False)]
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump("2.10", entries)))
    run = open_run(str(tmp_path))
    assert run.ranks[0].dumps[0].is_truncated
    assert "RING_TRUNCATED" in {flag.flag for flag in run.flags}


def in_folders(folder: Path, name: str, folders: Sequence[str]) -> None:
    """Dumps of four ranks, of which the third left out the last operation, each in a folder of this name."""
    for rank, place in enumerate(folders):
        entries = [entry("2.9", seq, is_done=seq < 3) for seq in range(1, 3 if rank == 2 else 4)]
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        found = {"version": "2.9", "entries": entries, "pg_config": config}
        (folder / place).mkdir()
        data = json.dumps(found).encode() if name.endswith("json") else pickle.dumps(found)
        (folder / place / name).write_bytes(data)


@pytest.mark.parametrize("name", ["nccl_trace", "trace.pickle", "dump.json"])
def test_dumps_in_folders_named_by_ranks(name: str, tmp_path: Path) -> None:
    in_folders(tmp_path, name, ("0", "1", "2", "3"))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.STUCK_ON_CPU, (2,))


def test_a_folder_with_another_number_is_no_rank(tmp_path: Path) -> None:
    in_folders(tmp_path, "nccl_trace", ("0", "1", "2", "48213"))
    run = open_run(str(tmp_path))
    assert run.world_size == 4
    assert any("no group has rank 48213" in flag.text for flag in run.flags)


@pytest.mark.parametrize(("has_come", "told"), [(True, ("STARTED_NOT_COMPLETED", ())), (False, ("STRAGGLER", (2,)))])
def test_a_late_rank_that_has_come_is_not_why_all_wait(
    has_come: bool, told: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """Rank 2 comes 0.9 s late to every operation but the last, in which all stand, or which it has yet to come to."""
    for rank in range(3):
        entries = []
        for seq in range(1, 13 + (rank < 2 or has_come)):
            is_done, at = seq < 13, START + seq * 1_200_000_000
            late = 900_000_000 * (rank == 2 and is_done)
            times: dict[str, Any] = {"time_created_ns": at + late + rank, "time_discovered_started_ns": at + late + 10}
            times["time_discovered_completed_ns"] = at + 950_000_000 if is_done else None
            entries.append(entry("2.9", seq, is_done=is_done, **times))
        status = {"last_enqueued_collective": 13, "last_started_collective": 13, "last_completed_collective": 12}
        value = {**dump("2.9", entries), "pg_status": {"0": status} if has_come else {}}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(value, protocol=2))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == told


@pytest.mark.parametrize(("hours", "is_old"), [(16, True), (14, False)])
def test_dumps_from_long_before_the_logged_steps_are_old(hours: int, is_old: bool, tmp_path: Path) -> None:
    """Rank 2 skipped #3 in yesterday's dumps; a zone of 14 h may explain the times of the log."""
    write(tmp_path, "2.9", as_json=False)
    begin = datetime.fromtimestamp(START / 1e9, UTC) + timedelta(hours=hours)
    lines = [
        f"{begin + timedelta(seconds=n):%Y-%m-%d %H:%M:%S} [rank{r}]: step {n}" for n in range(5) for r in range(3)
    ]
    (tmp_path / "console.log").write_text("\n".join(lines) + "\n")
    run = open_run(str(tmp_path))
    assert any(flag.flag == "EARLIER_ATTEMPT" for flag in run.flags) == is_old
    assert (diagnose(run)[0].verdict == "RUNNING") == is_old


def test_a_dump_in_json_that_is_newer_than_its_pickle(tmp_path: Path) -> None:
    """The same operations are not read twice; further ones are not lost."""
    folder = write(tmp_path / "d", "2.10", as_json=False, stem="rank_")
    same, more = [entry("2.10", seq) for seq in (1, 2)], [entry("2.10", seq) for seq in (1, 2, 3)]
    (folder / "rank_2.json").write_text(json.dumps(dump("2.10", same)))
    assert len(open_run(str(folder)).ranks[2].dumps) == 1
    (folder / "rank_2.json").write_text(json.dumps(dump("2.10", more)))
    assert open_run(str(folder)).ranks[2].operations["seq"].tolist() == [1, 2, 3]
