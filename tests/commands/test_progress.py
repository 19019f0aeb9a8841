"""The progress line: its output on a terminal, and no cost elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from titan_ckpt.console import progress
from titan_ckpt.console.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_terminal_gets_one_line_that_is_erased(terminal: Terminal) -> None:
    with ProgressLine("cp", 4_000_000, stream=terminal) as line:
        for _ in range(4):
            line.add(1_000_000)
    written = terminal.getvalue()
    assert "cp" in written
    assert "25%" in written
    assert "2.0/4.0 MB" in written
    assert "\n" not in written.rpartition("100%")[0]
    assert written.endswith("\x1b[2K")


def test_text_is_printed_above_the_line(terminal: Terminal) -> None:
    with ProgressLine("step", is_bytes=False, stream=terminal) as line:
        line.print("[before]")
        line.show(1, 4)
        line.print("[after] " + "x" * 200)
    lines = [part.split("\x1b[2K")[-1] for part in terminal.getvalue().split("\n")]
    assert lines[0] == "[before]"
    assert lines[1] == "[after] " + "x" * 200
    assert "1/4" in terminal.getvalue()


def test_without_a_terminal_it_only_counts() -> None:
    out = io.StringIO()
    with ProgressLine("verify", 10, stream=out) as line, ThreadPoolExecutor(4) as pool:
        list(pool.map(line.add, [1] * 1000))
    assert line.done == 1000
    assert out.getvalue() == ""


def test_without_a_terminal_rich_is_not_imported() -> None:
    code = (
        "import sys\nfrom titan_ckpt.console.progress import ProgressLine\n"
        "with ProgressLine('cp', 10) as line: line.add(10)\nprint('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    assert done.stderr == ""
