"""Progress: a line on a terminal, events for programs, and no cost elsewhere."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.console import progress
from titan_ckpt.console.command import ParserExit
from titan_ckpt.console.output import events_on_stderr, output_words, quiet, write_note
from titan_ckpt.console.progress import ProgressLine
from tools.paths import DATA, DEBUG_CONFIG

RUN = str(DATA / "golden" / "v1")


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
    with ProgressLine("step", unit="steps", stream=terminal) as line:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"
    assert done.stderr == ""


def _events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Every line of stderr as an event."""
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(isinstance(event["event"], str) and event["time_s"] > 1e9 for event in events)
    return events


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["verify", RUN, "--data"], "verify"),
        (["diff", f"{RUN}@1", f"{RUN}@2", "--values"], "diff"),
        (["reshard", f"{RUN}@1", "out", "--mesh", "dp_shard=2"], "reshard"),
        (["cp", f"{RUN}@1", "copy"], "cp"),
    ],
)
def test_long_commands_tell_programs_of_progress(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "EVENT_S", 0.0)
    assert main([*words, "--progress", "json"]) in (0, 1)
    events = _events(capsys)
    assert {(event["event"], event["what"], event["unit"]) for event in events} == {("progress", what, "bytes")}
    assert len(events) >= 2
    done = [event["done"] for event in events]
    assert done == sorted(done)
    assert 0 < done[-1] <= events[-1]["total"]
    assert [event["is_finished"] for event in events] == [False] * (len(events) - 1) + [True]


def test_conversions_of_torch_files_tell_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "EVENT_S", 0.0)
    for words in (["to-torch", f"{RUN}@1", "x.pt"], ["from-torch", "x.pt", "run"]):
        assert main(["convert", *words, "--progress", "json"]) == 0
        events = [event for event in _events(capsys) if event["event"] == "progress"]
        assert {(event["what"], event["unit"]) for event in events} == {("convert", "bytes")}
        assert 0 < events[-1]["done"] == events[-1]["total"]
        assert events[-1]["is_finished"]


def test_a_prune_counts_what_it_reads_and_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    monkeypatch.setattr(progress, "EVENT_S", 0.0)
    assert main(["prune", str(tmp_path / "run"), "--keep-last", "1", "--yes", "--progress", "json"]) == 0
    last = {event["what"]: (event["unit"], event["done"], event["total"]) for event in _events(capsys)}
    assert last["read"] == ("checkpoints", 3, 3)
    unit, done, total = last["delete"]
    assert (unit, done) == ("objects", total)
    assert done > 0


def test_work_that_fails_ends_unfinished(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with events_on_stderr(True), ProgressLine("cp", 10) as line:
            line.add(4)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert [(event["done"], event["is_finished"]) for event in _events(capsys)] == [(4, False), (4, False)]


def test_a_program_gets_no_more_than_an_event_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    with events_on_stderr(True), ProgressLine("cp", 10_000) as line:
        for _ in range(10_000):
            line.add(1)
    events = _events(capsys)
    assert len(events) <= 2 + events[-1]["seconds"]


def test_notes_log_lines_and_errors_are_events_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--progress=json", "ls", "nope/run"]) == 3
    with pytest.raises(ParserExit):
        main(["ls", "--progress", "json"])
    with events_on_stderr(True), ThreadPoolExecutor(1) as pool:
        pool.submit(write_note, "one\ntwo").result()
    events = _events(capsys)
    assert [event["event"] for event in events] == ["error", "error", "note"]
    assert "nope/run" in events[0]["text"]
    assert "URL" in events[1]["text"]
    assert events[2]["text"] == "one\ntwo"


def test_a_quiet_program_gets_errors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", RUN, "--data", "-q", "--progress", "json"]) == 0
    assert _events(capsys) == []
    assert main(["ls", "nope/run", "-q", "--progress", "json"]) == 3
    assert [event["event"] for event in _events(capsys)] == ["error"]


@pytest.mark.parametrize("words", [["ls", RUN, "--progress"], ["--progress", "jsno", "ls", RUN]])
def test_a_wrong_kind_of_progress_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParserExit, match="2"):
        main(words)
    assert "use one of auto, json" in capsys.readouterr().err


def test_child_processes_write_as_their_parent_does() -> None:
    assert output_words() == []
    with events_on_stderr(True), quiet(True):
        assert output_words() == ["--progress=json", "--quiet"]


def test_a_training_run_tells_its_steps_and_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 500)
    sets = {
        "data.source": str(text),
        "train.steps": "2",
        "save.url": str(tmp_path / "run"),
        "data.cache": str(tmp_path / "tokens"),
    }
    words = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    before = logging.getLogger("titan_ckpt").level
    assert main(["train", DEBUG_CONFIG, *words, "--progress", "json"]) == 0
    logging.getLogger("titan_ckpt").setLevel(before)
    events = _events(capsys)
    assert [event["loss"] > 0 for event in events if event["event"] == "step"] == [True, True]
    steps = [event for event in events if event["event"] == "progress"]
    assert (steps[-1]["what"], steps[-1]["unit"], steps[-1]["done"], steps[-1]["total"]) == ("train", "steps", 2, 2)
    assert {"start", "save", "end", "log"} <= {event["event"] for event in events}
