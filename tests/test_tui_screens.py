"""The terminal screens on real incidents and runs, headless: what each shows, and that every key does what the help says."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from textual.pilot import Pilot
from textual.widgets import Input

from titan_ckpt.errors import NotFoundError
from titan_ckpt.save import Saver
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data_content import find_content
from titan_ckpt.tui.screen_logs import parse_filter
from titan_ckpt.tui.screenshot import settled

FIXTURES = Path(__file__).parent / "data" / "flight_recorder"
SIZES = [(80, 24), (140, 45)]


def shown(app: TitanApp) -> str:
    """All rows of the screen that is shown, with its title and the bottom line."""
    body = app.pane.body
    rows = [body.rows.row(index, body.line_width).text for index in range(len(body.rows))]
    return "\n".join([app.pane.title(), *rows, str(app._said)])


async def press(app: TitanApp, pilot: Pilot[None], *keys: str) -> str:
    await pilot.press(*keys)
    await settled(app, pilot)
    return shown(app)


@pytest.fixture
def incident() -> TitanApp:
    return TitanApp(find_content(str(FIXTURES / "skip")), clock=lambda: 1.8e9)


@pytest.fixture
def run(tmp_path: Path) -> TitanApp:
    with Saver(str(tmp_path)) as saver:
        for step in (10, 20):
            saver.save({"model": {"w": torch.full((64, 8), float(step)), "b": torch.zeros(8)}}, step=step)
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "step-00000030" / "x").write_text("begun")
    lines = [{"event": "step", "step": n, "loss": 5 / n, "tokens_per_s": 1000.0 + n} for n in range(1, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{cut")
    return TitanApp(find_content(str(tmp_path)), clock=lambda: 1.8e9)


@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_of_an_incident_shows_what_it_is_for(incident: TitanApp, size: tuple[int, int]) -> None:
    async with incident.run_test(size=size) as pilot:
        await settled(incident, pilot)
        overview = shown(incident)
        assert "SKIPPED_COLLECTIVE" in overview
        assert "culprit: rank 2" in overview
        assert "faults.py:122" in overview.replace("\n", "").replace("    ", "")
        assert "#" in await press(incident, pilot, "2")
        assert "broadcast 8 Float" in await press(incident, pilot, "3")
        assert "default_pg" in await press(incident, pilot, "4")
        assert "overflow on this rank" in await press(incident, pilot, "5")
        assert "rank 2" in await press(incident, pilot, "6")
        assert "no checkpoints here" in await press(incident, pilot, "7")
        assert "no metrics.jsonl here" in await press(incident, pilot, "8")


@pytest.mark.parametrize("case", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
async def test_the_screens_of_every_incident_can_be_painted(case: str) -> None:
    app = TitanApp(find_content(str(FIXTURES / case)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert await press(app, pilot, *"2346")


@pytest.mark.parametrize("number", "12345678")
async def test_every_key_of_every_screen_is_safe(incident: TitanApp, number: str) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        await press(
            incident, pilot, number, "j", "down", "k", "up", "G", "g", "l", "h", "right", "left", "pagedown", "pageup"
        )
        await press(incident, pilot, "n", "N", "space", "y", "[", "]", "+", "-", "<", ">", "t", "t", "o", "p", "escape")
        await press(incident, pilot, number, "d", "z", "v", "f", "f", "enter", "escape", "escape")
        await press(incident, pilot, "question_mark", "j", "escape")
        assert incident.return_code is None


async def test_enter_on_the_verdict_opens_its_operation_and_esc_comes_back(incident: TitanApp) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        assert "operation #7" in await press(incident, pilot, "enter")
        assert incident.pane.number == 3
        await press(incident, pilot, "escape")
        assert incident.pane.number == 1


async def test_a_pinned_rank_is_compared_with_another(incident: TitanApp) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "3", "j", "space", "j", "j")
        assert "operation: rank 0 all_reduce, rank 2 broadcast" in await press(incident, pilot, "d")


@pytest.mark.parametrize(
    ("text", "expected", "other"),
    [("2", "[rank2]", "[rank1]"), ("level error", "Error", "step 0 start"), ("overflow", "overflow", "step 0 done")],
)
async def test_logs_are_filtered_by_ranks_level_and_pattern(
    incident: TitanApp, text: str, expected: str, other: str
) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "5", "slash")
        incident.query_one("#prompt", Input).value = text
        found = await press(incident, pilot, "enter")
        assert expected in found
        assert other not in found
        assert other in await press(incident, pilot, "escape") or text == "level error"


async def test_a_pattern_that_is_none_is_said(incident: TitanApp) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "5", "slash")
        incident.query_one("#prompt", Input).value = "(["
        assert "not a regular expression" in await press(incident, pilot, "enter")


async def test_equal_lines_fold_across_ranks(incident: TitanApp) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "5")
        before = len(incident.pane.body.rows)
        assert "x 4 ranks: 0-3" in await press(incident, pilot, "z")
        assert len(incident.pane.body.rows) < before


async def test_checkpoints_are_listed_opened_verified_compared_and_planned(run: TitanApp) -> None:
    async with run.run_test(size=(140, 45)) as pilot:
        await settled(run, pilot)
        listed = await press(run, pilot, "7")
        assert "committed" in listed
        assert "partial" in listed
        await press(run, pilot, "j", "j", "space")  # pin step 20
        await press(run, pilot, "j")  # step 10
        assert "every byte is what was saved" in await press(run, pilot, "v")
        await press(run, pilot, "escape")
        await press(run, pilot, "g", "j", "j", "j")
        assert "model.w" in await press(run, pilot, "d")
        await press(run, pilot, "escape", "g", "j", "j", "j")
        assert "64x8" in await press(run, pilot, "enter")
        await press(run, pilot, "g", "j", "enter")
        assert "each spot shows the rank" in shown(run)
        await press(run, pilot, "escape", "escape", "g", "j", "j", "p")
        run.query_one("#prompt", Input).value = "1"
        assert "step 10" in await press(run, pilot, "enter")
        await press(run, pilot, "escape", "g", "j", "j", "r")
        run.query_one("#prompt", Input).value = "dp_shard=2,nonsense=3"
        assert "unknown mesh axis" in await press(run, pilot, "enter")


async def test_training_is_plotted_and_damaged_lines_are_counted(run: TitanApp) -> None:
    async with run.run_test(size=(80, 24)) as pilot:
        await settled(run, pilot)
        found = await press(run, pilot, "8")
        assert "loss" in found
        assert "1 damaged lines left out" in found


async def test_the_report_is_exported_and_never_overwrites(incident: TitanApp, tmp_path: Path) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        for expected in ("report written", "not written"):
            await press(incident, pilot, "e")
            incident.query_one("#prompt", Input).value = str(tmp_path / "report.txt")
            assert expected in await press(incident, pilot, "enter")
    assert "SKIPPED_COLLECTIVE" in (tmp_path / "report.txt").read_text()


def test_a_place_without_anything_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="neither a run nor an incident"):
        find_content(str(tmp_path / "none"))


def test_a_filter_is_ranks_or_a_level_or_a_pattern() -> None:
    assert parse_filter("0-2,5").ranks == (0, 1, 2, 5)
    assert parse_filter("warning").level == 2
    assert parse_filter("loss=nan").pattern == "loss=nan"


def test_the_program_starts_in_a_real_terminal_and_quits(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "titan_ckpt", "tui", str(FIXTURES / "skip")]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=tmp_path) as process:
        os.close(slave)
        seen, deadline = b"", time.monotonic() + 60
        while b"SKIPPED_COLLECTIVE" not in seen and time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 65536)
        os.write(master, b"q")
        with contextlib.suppress(OSError):  # the terminal is gone when the program is
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([master], [], [], 0.1)[0]:
                    os.read(master, 65536)
        assert process.wait(10) == 0
    os.close(master)
    assert b"SKIPPED_COLLECTIVE" in seen
