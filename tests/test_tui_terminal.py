"""The program in real terminals: a bare pseudo-terminal, and tmux where it is installed; with and without colour."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "data" / "flight_recorder"
DEADLINE_S = 60
_COLOUR = re.compile(rb"\x1b\[[\d;]*\b[34]8;[25];")


def shown_by(seen_until: bytes, keys: bytes, environment: dict[str, str], folder: Path) -> bytes:
    """Bytes that the program writes to a pseudo-terminal until `seen_until` is among them; `keys` end it."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "titan_ckpt", "tui", str(FIXTURES / "skip")]
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables = {**plain, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **environment}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=variables, cwd=folder) as process:
        os.close(slave)
        seen, deadline = b"", time.monotonic() + DEADLINE_S
        with contextlib.suppress(OSError):  # the terminal is gone when the program is
            while seen_until not in seen and time.monotonic() < deadline:
                if select.select([master], [], [], 1)[0]:
                    seen += os.read(master, 65536)
            os.write(master, keys)
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([master], [], [], 0.1)[0]:
                    os.read(master, 65536)
        assert process.wait(10) == 0, seen
    os.close(master)
    return seen


def test_the_program_starts_in_a_pseudo_terminal_and_quits(tmp_path: Path) -> None:
    seen = shown_by(b"SKIPPED_COLLECTIVE", b"q", {}, tmp_path)
    assert b"SKIPPED_COLLECTIVE" in seen
    assert _COLOUR.search(seen)


def test_without_colour_every_mark_is_still_there(tmp_path: Path) -> None:
    seen = shown_by(b"waiting in a collective", b"q", {"NO_COLOR": "1"}, tmp_path)
    hues = {match.group(1) for match in re.finditer(rb"38;2;(\d+;\d+;\d+)", seen)}
    assert all(len(set(hue.split(b";"))) == 1 for hue in hues), "greys only"
    for mark in ("▸ ", "[1 Overview]", "wwww", "culprit: rank 2"):
        assert mark.encode() in re.sub(rb"\x1b\[[\d;]*m", b"", seen)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[list[str]]:
    """The command of a tmux server of our own."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed; the pseudo-terminal's tests stand for it")
    command = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "socket")]
    yield command
    subprocess.run([*command, "kill-server"], check=False, capture_output=True)


def test_a_hang_is_followed_to_its_line_in_tmux(tmux: list[str], tmp_path: Path) -> None:
    """As a user does over ssh: the verdict, the operation, two ranks side by side, the waits, out again."""

    def run(*arguments: str) -> str:
        return subprocess.run([*tmux, *arguments], check=True, capture_output=True, text=True).stdout

    def see(text: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while text not in (screen := run("capture-pane", "-p", "-t", "job")):
            assert time.monotonic() < deadline, screen
        return screen

    program = shlex.join([sys.executable, "-m", "titan_ckpt", "tui", str(FIXTURES / "skip")])
    shell = f"cd {shlex.quote(str(tmp_path))}; {program}; echo ended with $?; cat"
    run(
        "new-session",
        "-d",
        "-s",
        "job",
        "-x",
        "80",
        "-y",
        "24",
        "env",
        "-u",
        "COLUMNS",
        "-u",
        "LINES",
        "LC_ALL=C.UTF-8",
        "sh",
        "-c",
        shell,
    )
    see("SKIPPED_COLLECTIVE")
    run("send-keys", "-t", "job", "Enter")
    assert "broadcast 8 Float" in see("operation #7")
    run("send-keys", "-t", "job", "d")
    assert "faults.py:122 c_skip" in see("ranks 0 and 2")
    run("send-keys", "-t", "job", "Escape")
    see("where they are")
    run("send-keys", "-t", "job", "6")
    assert "rank 2 culprit" in see("3 waits")
    run("resize-window", "-t", "job", "-x", "120", "-y", "30")
    see("7 Checkpoints")
    run("send-keys", "-t", "job", "q")
    see("ended with 0")
