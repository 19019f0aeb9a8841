"""A job of more ranks than the panes have room for: the rank at fault is in sight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.screen_pictures import screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled

RANKS, TP, CULPRIT, T0 = 320, 8, 201, 1_795_226_821_000_000_000


def dump(rank: int) -> dict[str, object]:
    """Flight Recorder's dump of a rank of a mesh: the culprit leaves out the last reduction of its tp group."""
    begin = rank // TP * TP
    groups = {
        "default_pg": [*range(RANKS)],
        "mesh_tp": [*range(begin, begin + TP)],
        "mesh_dp": [*range(rank % TP, RANKS, TP)],
    }
    entries: list[dict[str, object]] = []
    for number in range(1, 5):
        is_last, is_beside = number == 4, begin <= CULPRIT < begin + TP
        for group, name in (("mesh_tp", "all_reduce"), ("mesh_dp", "reduce_scatter")):
            if is_last and (rank == CULPRIT or (is_beside and group == "mesh_dp")):
                break
            is_done = not is_last or (group == "mesh_tp" and not is_beside)
            at = T0 + len(entries) * 100_000_000
            entries.append({
                "frames": [{"name": "step", "filename": "loop.py", "line": 100}], "record_id": len(entries), "p2p_seq_id": 0,
                "pg_id": [*groups].index(group), "process_group": [str([*groups].index(group)), group], "op_id": len(entries),
                "collective_seq_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": at,
                "input_sizes": [[64]], "input_dtypes": ["Float"], "output_sizes": [[64]], "output_dtypes": ["Float"],
                "state": "completed" if is_done else "started", "time_discovered_started_ns": at + 1000,
                "time_discovered_completed_ns": at + 2_000_000 if is_done else None, "retired": is_done,
                "timeout_ms": 600_000, "is_p2p": False,
            })  # fmt: skip
    config = {
        str(i): {"name": str(i), "desc": name, "ranks": json.dumps(of)} for i, (name, of) in enumerate(groups.items())
    }
    return {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": {}, "nccl_comm_state": {}}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for rank in range(RANKS):
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump(rank)))
    return folder


@pytest.mark.parametrize(("screen", "mark"), [(1, "w!wwwwww"), (4, "201!")])
async def test_the_mesh_has_the_rank_at_fault_in_sight(large: Path, screen: int, mark: str) -> None:
    app = TitanApp(find_content(str(large)), first_screen=screen)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        [line] = [line for line in screen_text(app).splitlines() if mark in line]
        assert len(line) <= 120


async def test_a_row_of_the_mesh_uses_all_of_the_width(large: Path) -> None:
    app = TitanApp(find_content(str(large)), first_screen=4)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        [line] = [line for line in screen_text(app).splitlines() if "201!" in line]
        assert "200w 201! 202w 203w 204w 205w 206w 207w │" in line
