"""torchrun's console beside recorders of a later attempt: as many failures as there were restarts are history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.debug.endings.test_attempts import CLOSING, FAILED, RAISED, STEPS
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.record.hooks import BoxWriter

START_NS = 1_700_000_000 * 10**9
FIRST = STEPS + RAISED + CLOSING.format(1, 41) + CLOSING.format(1, 43) + FAILED.format(2, 1, 42)


def write_recorders(folder: Path, restart: int) -> None:
    for rank in range(3):
        box = BoxWriter(folder / f"rank_{rank:05d}.box", rank=rank, world_size=3)
        box.beat()
        side = {
            "titan_ckpt": "sidecar", "rank": rank, "world_size": 3, "coordinates": {}, "host": "n0", "pid": 51 + rank,
            "groups": [], "launch": {"run": "a", "restart": str(restart), "parent": "15973"},
        }  # fmt: skip
        (folder / f"rank_{rank:05d}.sidecar.json").write_text(json.dumps(side))


@pytest.mark.parametrize(
    ("restart", "console", "accused"),
    [(1, FIRST, ()), (0, FIRST, (1,)), (1, FIRST + RAISED + FAILED.format(9, 1, 52), (1,))],
    ids=["of the attempt before", "of this attempt", "of this one, too"],
)
def test_failures_before_a_recorded_restart(
    restart: int, console: str, accused: tuple[int, ...], tmp_path: Path
) -> None:
    write_recorders(tmp_path, restart)
    (tmp_path / "launcher.log").write_text(console)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == accused
