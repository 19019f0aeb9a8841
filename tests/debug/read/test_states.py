"""How far a device got, in every form in which dumps say it: states, times and retired works."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import OperationState
from titan_ckpt.debug.incident.records import Operation


def entry(number: int, **changes: Any) -> dict[str, Any]:
    at = 10**18 + number * 10**6
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1, "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
        "state": "completed", "retired": True, "time_created_ns": at, "time_discovered_started_ns": at + 1,
        "time_discovered_completed_ns": at + 2, "timeout_ms": 1000, "frames": [], **changes,
    }  # fmt: skip


def write(path: Path, entries: list[dict[str, Any]], *, as_json: bool) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "pg_config": config, "entries": entries}
    path.write_bytes(json.dumps(dump).encode() if as_json else pickle.dumps(dump, 2))


def newest(folder: Path, *, as_json: bool, name: str = "nccl:all_reduce", **changes: Any) -> Operation:
    """The last of four operations as it was read, the others completed."""
    for rank in range(2):
        entries = [entry(number, profiling_name=name) for number in range(3)]
        write(
            folder / f"rank_{rank}.{'json' if as_json else 'pickle'}",
            [*entries, entry(3, profiling_name=name, **changes)],
            as_json=as_json,
        )
    return open_run(str(folder)).operation(0, -1)


FORMS = pytest.mark.parametrize("as_json", [True, False])
UNENDED = {"time_discovered_completed_ns": None}


@FORMS
@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({**UNENDED, "state": "started"}, OperationState.STARTED),
        ({**UNENDED, "state": "scheduled", "time_discovered_started_ns": None}, OperationState.SCHEDULED),
        ({**UNENDED, "state": "Started"}, OperationState.STARTED),
        ({**UNENDED, "state": "State.STARTED"}, OperationState.STARTED),
        ({**UNENDED, "state": ""}, OperationState.STARTED),
        ({"state": "started"}, OperationState.STARTED),
    ],
)  # fmt: skip
def test_retired_without_completion_is_pending(
    tmp_path: Path, as_json: bool, changes: Any, state: OperationState
) -> None:
    found = newest(tmp_path, as_json=as_json, **changes)
    assert (found.state, found.retired) == (state, False)
    assert diagnose(open_run(str(tmp_path)))[0].verdict != "HEALTHY"


@FORMS
@pytest.mark.parametrize("name", ["all_reduce", "hccl:all_reduce", "xccl:all_reduce", "mine:all_reduce"])
def test_any_backend_that_records_states_is_believed(tmp_path: Path, as_json: bool, name: str) -> None:
    found = newest(tmp_path, as_json=as_json, name=name, state="started", **UNENDED)
    assert (found.state, found.retired) == (OperationState.STARTED, False)


@FORMS
@pytest.mark.parametrize("changes", [{}, {"state": ""}, {"state": "completed", **UNENDED}])
def test_completed_by_state_or_time(tmp_path: Path, as_json: bool, changes: Any) -> None:
    found = newest(tmp_path, as_json=as_json, **changes)
    assert (found.state, found.retired) == (OperationState.COMPLETED, True)


def test_backend_without_states_is_done_when_retired(tmp_path: Path) -> None:
    none = {"state": "scheduled", "time_discovered_started_ns": None, **UNENDED, "profiling_name": "gloo:all_reduce"}
    for rank in range(2):
        write(tmp_path / f"rank_{rank}.json", [entry(number, **none) for number in range(3)], as_json=True)
    found = open_run(str(tmp_path)).operation(0, -1)
    assert (found.state, found.retired) == (OperationState.SCHEDULED, True)
