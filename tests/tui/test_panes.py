"""Panes beside the lists, themes, the palette, back and forward, the picker of incidents, curves and saves."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.records import OPERATION
from titan_ckpt.trainer.report.goodput import goodput
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.commands import Jumps
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.grid import ABSENT, DONE, PENDING
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.metrics import parse_metric_lines
from titan_ckpt.tui.data.run_folders import LastRecord
from titan_ckpt.tui.data.timeline import Window, rank_codes, time_codes
from titan_ckpt.tui.editor import open_in_editor
from titan_ckpt.tui.pictures.braille import BRAILLE, dots
from titan_ckpt.tui.pictures.curves import smoothed
from titan_ckpt.tui.pictures.graph import graph_rows
from titan_ckpt.tui.pictures.mesh import mesh_rows
from titan_ckpt.tui.pictures.run_list import run_state
from titan_ckpt.tui.screens.incidents import IncidentsScreen
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.terminal import lightness
from titan_ckpt.tui.widgets.part import PartView
from titan_ckpt.tui.widgets.prompt import Prompt
from tools.paths import DATA, INCIDENTS

NOW_S = 1_795_250_000.0
SKIP = INCIDENTS / "skip"


def app_of(path: Path, screen: int = 1) -> TitanApp:
    return TitanApp(find_content(str(path)), clock=lambda: NOW_S, first_screen=screen)


@pytest.fixture(scope="module")
def skip() -> Incident:
    return load_incident(str(SKIP))


def shown_parts(app: TitanApp) -> list[str]:
    return [view.part.name for view in app.pane.query(PartView) if view.is_shown]


async def test_panes_appear_with_the_width_of_the_terminal() -> None:
    app = app_of(SKIP)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert shown_parts(app) == []
        assert "ranks by state" in screen_text(app)
        await press(app, pilot, "w")
        assert "details" in shown_parts(app)
        await press(app, pilot, "w")
        await pilot.resize_terminal(120, 36)
        await settled(app, pilot)
        assert shown_parts(app) == ["ranks", "time", "details"]
        assert "the last rank begins to wait" in screen_text(app)
        await press(app, pilot, "w")
        assert shown_parts(app) == []
        await pilot.resize_terminal(40, 12)
        await settled(app, pilot)
        assert app.is_running


@pytest.mark.repeats
@pytest.mark.parametrize("size", [(40, 12), (80, 24), (120, 36), (200, 60)])
async def test_no_screen_is_wider_than_its_terminal(size: tuple[int, int]) -> None:
    app = app_of(DATA / "run")
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for number in "12345678":
            await press(app, pilot, number)
            lines = screen_text(app).splitlines()
            assert len(lines) == size[1]
            assert max(map(len, lines)) <= size[0]
            assert f"[{number} " in lines[0]


async def test_a_small_terminal_shows_what_matters() -> None:
    app = app_of(SKIP)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        assert "culprit: rank 2" in screen_text(app)
        for number, text in (("2", "# differs"), ("3", "# broadcast 8"), ("4", "2 differs")):
            await press(app, pilot, number)
            assert text in screen_text(app)


async def test_the_cursor_starts_on_a_rank_where_none_is_at_fault() -> None:
    app = app_of(DATA / "run", 3)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for number in "36":
            await press(app, pilot, number)
            assert "n0:9271" in screen_text(app), "details of rank 0"
        await press(app, pilot, "g k")
        assert "nothing more about this line" in screen_text(app)


async def test_details_follow_the_cursor_and_tab_moves_the_focus() -> None:
    app = app_of(SKIP, 3)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "g")
        assert "rank 0" in screen_text(app)
        await press(app, pilot, "j j")
        assert "rank 2 ! culprit" in screen_text(app)
        await press(app, pilot, "tab")
        assert isinstance(app.focused, PartView)
        await press(app, pilot, "j")
        assert app.pane.text_to_copy().startswith("process")
        assert app.pane.body.cursor == 3, "the list's cursor stays"
        await press(app, pilot, "tab")
        assert app.focused is app.pane.body


async def test_back_and_forward_return_to_the_same_line() -> None:
    app = app_of(SKIP)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "enter")
        place = (app.pane.number, app.session.seq, app.pane.body.cursor)
        await press(app, pilot, "6 backspace")
        assert (app.pane.number, app.session.seq, app.pane.body.cursor) == place
        await press(app, pilot, "escape")
        assert app.pane.number == 1
        await press(app, pilot, "right_curly_bracket right_curly_bracket right_curly_bracket")
        assert app.pane.number == 6


async def test_a_click_on_a_key_presses_it_and_on_the_verdict_opens_it() -> None:
    app = app_of(SKIP)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        bottom = screen_text(app).splitlines()[-1]
        await pilot.click("#status", offset=(bottom.index("? help"), 0))
        await settled(app, pilot)
        assert len(app.screen_stack) == 2
        await press(app, pilot, "escape")
        await pilot.click("#verdict", offset=(5, 0))
        await settled(app, pilot)
        assert (app.pane.number, app.session.seq) == (3, 7)


async def test_the_palette_jumps_and_changes_the_theme() -> None:
    app = app_of(SKIP)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        found = {hit.text: hit.command async for hit in Jumps(app.screen).search("rank 2")}
        assert list(found) == ["go to rank 2"]
        found["go to rank 2"]()
        await settled(app, pilot)
        assert (app.pane.number, app.pane.body.current and app.pane.body.current.link.rank) == (6, 2)  # type: ignore[union-attr]
        themes = [hit async for hit in Jumps(app.screen).search("theme nord")]
        themes[0].command()
        await settled(app, pilot)
        assert app.theme == "nord"
        assert "rank 2" in screen_text(app)


# ------------------------------------------------------------------------------------------------ incidents


@pytest.fixture
def several(tmp_path: Path) -> Path:
    for name, case in (("a", "gil_held"), ("b", "p2p_missing")):
        shutil.copytree(DATA / "injected" / case, tmp_path / "jobs" / name)
    return tmp_path / "jobs"


async def judged(app: TitanApp, pilot: Pilot[None]) -> None:
    while "judging" in screen_text(app):
        await pilot.pause()
    await settled(app, pilot)


async def test_one_of_several_incidents_is_picked_and_left(several: Path) -> None:
    app = app_of(several)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        first = app.session.content.incident
        assert "2 incidents here" in screen_text(app)
        await press(app, pilot, "i")
        await judged(app, pilot)
        assert isinstance(app.screen, IncidentsScreen)
        assert re.search(r"P2P_MISSING_PEER +\d+%  rank 2 waits", screen_text(app))
        assert "STUCK_ON_CPU · rank 1" in screen_text(app)
        await press(app, pilot, "j enter")
        await settled(app, pilot)
        assert app.session.content.incident == {"a": "b", "b": "a"}[first]
        assert app.pane.number == 1
        await press(app, pilot, "escape")
        assert app.session.content.incident == first


# --------------------------------------------------------------------------------------------------- timeline


def operations(*spans: tuple[int, int]) -> np.ndarray:
    """Issued and completed at these ns; 0: did not end."""
    table = np.zeros(len(spans), OPERATION)
    for row, (begin, end) in zip(table, spans, strict=True):
        row["created_ns"], row["completed_ns"], row["retired"] = begin, end, end > 0
    return table


def test_bars_reach_from_issue_to_end_and_waits_to_the_edge() -> None:
    codes = rank_codes(operations((10, 20), (40, 0)), Window(start=0, end=100), 10)
    assert codes.tolist() == [0, DONE, DONE, 0, *[PENDING] * 6]
    assert not rank_codes(operations((500, 600)), Window(start=0, end=100), 10).any()
    assert rank_codes(operations((1, 0)), Window(start=50, end=100), 4).tolist() == [PENDING] * 4


def test_of_overlapping_operations_the_worst_is_drawn() -> None:
    created, ended = np.array([1, 20], np.int64), np.array([90, 40], np.int64)
    codes = time_codes(created, ended, np.array([DONE, ABSENT], np.uint8), Window(start=0, end=100), 10)
    assert codes.tolist() == [1, 1, ABSENT, ABSENT, ABSENT, 1, 1, 1, 1, 1]


def test_a_window_zooms_about_a_moment_and_moves() -> None:
    window = Window(start=0, end=100_000).zoomed(0.5, 80_000)
    assert (window.start, window.end) == (40_000, 90_000)
    assert window.moved(0.5) == Window(start=65_000, end=115_000)


# ------------------------------------------------------------------------------------------------- pictures


def drawing(incident: Incident, *pairs: tuple[int, int]) -> list[str]:
    edges = [Edge(waiter=a, awaited=b, group=0, seq=1) for a, b in pairs]
    return [row.text.rstrip() for row in graph_rows(incident, edges, 60)]


def test_the_graph_joins_waiting_ranks_before_the_awaited_one(skip: Incident) -> None:
    assert drawing(skip, (0, 2), (1, 2), (3, 2)) == ["0 ─┐", "1 ─┼▶ !2", "3 ─┘", ""]
    assert drawing(skip, (1, 0), (0, 2)) == ["1 ──▶ 0 ──▶ !2", ""]
    assert drawing(skip, *((rank, 2) for rank in range(3, 20)))[0] == "3-19 ──▶ !2"
    assert any("again" in line for line in drawing(skip, (0, 1), (1, 0))), "a cycle ends"


def test_the_mesh_has_a_cell_for_each_rank() -> None:
    incident = load_incident(str(DATA / "run"))
    texts = [row.text for row in mesh_rows(incident, 60)]
    assert texts[0].startswith("dp_shard 2 x tp 2")
    assert texts[1].strip() == "0f 1f  2f 3f"


def test_dots_stay_within_their_cells() -> None:
    cells = dots(np.array([0.0, 5, 10]), np.array([1.0, -4, 9]), rows=3, columns=8, x_range=(0, 10), y_range=(-4, 9))
    assert cells.shape == (3, 8)
    assert 0 <= cells.min() <= cells.max() < 256
    assert chr(BRAILLE + int(cells[0, 7])) != chr(BRAILLE), "the last point is at the top right"


# ------------------------------------------------------------------------------------------------- training


def test_a_smoothed_curve_keeps_gaps_and_constants() -> None:
    found = smoothed(np.array([2.0, math.nan, 2.0, 2.0]), 0.9)
    assert np.isnan(found[1])
    assert np.allclose(found[[0, 2, 3]], 2.0)


def records(seed: int) -> Iterator[dict[str, object]]:
    """A run of up to three attempts, each resuming from an earlier step."""
    chance, now, step = random.Random(seed), 1000.0, 0
    for _ in range(chance.randint(1, 3)):
        step = chance.randint(0, step)
        yield {"event": "start", "launched_s": now, "time_s": now + 2, "step": step}
        now += 2
        for _ in range(chance.randint(1, 5)):
            step, now = step + 1, now + 3
            yield {
                "event": "step",
                "time_s": now,
                "step": step,
                "step_s": 2.5,
                "data_wait_s": chance.random(),
                "steps": 1,
            }
            if chance.random() < 0.3:
                yield {"event": "save", "time_s": now, "step": step, "stall_s": 0.25}
            if chance.random() < 0.1:
                now += 0.5
                yield {"event": "validation", "time_s": now, "step": step, "seconds": 0.5}


@pytest.mark.parametrize("seed", range(8))
def test_goodput_is_what_the_trainer_reports(seed: int) -> None:
    written = list(records(seed))
    mine = parse_metric_lines("\n".join(map(json.dumps, written)).encode(), "m").goodput
    theirs = goodput(written)
    assert mine is not None
    assert mine.total_s == pytest.approx(theirs.total_s)
    assert mine.seconds["steps"] == pytest.approx(theirs.productive_s)
    assert mine.seconds["data"] == pytest.approx(theirs.data_wait_s)
    assert mine.seconds["recomputed"] == pytest.approx(theirs.recomputed_s)
    assert mine.seconds["downtime"] == pytest.approx(theirs.downtime_s)
    assert mine.seconds["validation"] == pytest.approx(theirs.validation_s)


def test_an_upload_lasts_from_the_stall_to_the_commit() -> None:
    """Also of a step that is saved again after a resume; not of one that no record calls committed."""
    lines = [
        {"event": "save", "step": 4, "time_s": 10.0},
        {"event": "step", "step": 5, "time_s": 12.0, "committed_step": 4, "commit_age_s": 0.5},
        {"event": "save", "step": 6, "time_s": 13.0},
        {"event": "start", "step": 4, "time_s": 20.0},
        {"event": "save", "step": 4, "time_s": 21.0},
        {"event": "step", "step": 5, "time_s": 23.0, "committed_step": 4, "commit_age_s": 1.75},
        {"event": "step", "step": 6, "time_s": 24.0, "committed_step": 4, "commit_age_s": 2.75},
    ]
    assert parse_metric_lines("\n".join(map(json.dumps, lines)).encode(), "m").uploads == {4: 0.25}


async def test_a_step_is_chosen_smoothed_and_overlaid() -> None:
    app = app_of(DATA / "run", 8)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "h h h")
        assert "step 58: " in screen_text(app)
        assert "goodput 72% of 25.5 s" in screen_text(app)
        await press(app, pilot, "s")
        assert "smoothed by 0.6" in app.pane.title()
        for answer, expected in ((str(DATA / "run"), f"over {DATA / 'run'}"), ("", "60 steps")):
            await press(app, pilot, "o")
            app.query_one(Prompt).value = answer
            await press(app, pilot, "enter")
            assert expected in app.pane.title()
        await press(app, pilot, "colon")
        app.query_one(Prompt).value = "step 12"
        await press(app, pilot, "enter")
        assert "step 12:" in screen_text(app)


# ---------------------------------------------------------------------------------------------- checkpoints


async def test_what_is_in_a_step_stands_beside_the_list() -> None:
    app = app_of(DATA / "golden" / "v1", 7)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert "dp_shard=2" in screen_text(app)
        assert "largest tensors" in screen_text(app)
        await press(app, pilot, "enter j j j j")
        assert "each cell shows" in screen_text(app), "the cut of the tensor under the cursor"


def test_a_run_is_running_silent_or_ended() -> None:
    assert run_state(LastRecord(time_s=NOW_S - 10), NOW_S)[0] == "running"
    assert run_state(LastRecord(time_s=NOW_S - 1000), NOW_S)[0] == "silent"
    assert run_state(LastRecord(time_s=NOW_S, reason="completed"), NOW_S)[0] == "completed"
    assert run_state(LastRecord(), NOW_S)[0] == ""


# ------------------------------------------------------------------------------------------------- terminal


def test_answers_of_terminals_are_read() -> None:
    assert lightness(b"\x1b]11;rgb:1e1e/1e1e/2e2e\x07") == pytest.approx(0.12, abs=0.01)
    assert lightness(b"\x1b]11;rgb:ff/ff/ff\x1b\\\x1b[?62;c") == 1.0
    assert lightness(b"j\x1b[?1;2c") is None


async def test_a_line_that_is_not_here_is_not_edited(tmp_path: Path) -> None:
    app = app_of(SKIP, 3)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "e")
        assert "faults.py is not on this machine" in screen_text(app)
        here = tmp_path / "a.py"
        here.write_text("x\n")
        assert open_in_editor(app, str(here), 1) == "this terminal cannot be handed to an editor"
