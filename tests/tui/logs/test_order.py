"""Lines of one moment stand in the order of their ranks, however their files are called."""

from __future__ import annotations

from pathlib import Path

from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.index import load_logs


def test_lines_of_one_moment_are_ordered_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"rank_{rank}.log").write_text(f"2026-11-21 07:46:55,442 INFO at work as {rank}\n")
    (tmp_path / "launcher.log").write_text("2026-11-21 07:46:55,442 INFO starts\n")
    content = find_content(str(tmp_path))
    logs = load_logs(LogFiles(content.store, content.logs))
    assert [logs.read(position).rank for position in logs.order.tolist()] == [None, 0, 2, 10]
