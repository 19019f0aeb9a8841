"""What the recorder writes of a program's end: only an orderly one is called so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from titan_ckpt.debug import open_run
from titan_ckpt.debug.incident.kinds import EventKind

PROGRAM = """
import sys
from titan_ckpt.debug import Recorder
recorder = Recorder.start(sys.argv[1], rank=0, world_size=1)
{}
"""
RAISED = "sys.excepthook = lambda *_: None\n{}['lost']"


@pytest.mark.parametrize(
    ("end", "is_orderly", "error"),
    [
        ("pass", True, ""),
        ("try:\n    {}['lost']\nexcept KeyError:\n    pass", True, ""),
        ("{}['lost']", False, "KeyError"),
        (RAISED, False, "KeyError"),
        ("raise KeyboardInterrupt", False, ""),
    ],
)
def test_uncaught_exception_is_no_orderly_end(end: str, is_orderly: bool, error: str, tmp_path: Path) -> None:
    code = PROGRAM.replace("{}\n", end + "\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    record = open_run(str(tmp_path)).ranks[0]
    assert record.heartbeat is not None
    assert record.heartbeat.is_stopped == is_orderly
    kinds = [(event.kind, event.values["type"]) for event in record.events]
    assert kinds == ([(EventKind.EXCEPTION, error)] if error else [])
