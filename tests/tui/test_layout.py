"""What a screen does with its room: panes that appear, lists that are as high as they need, columns that a width has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.cli.main import main
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.pictures.curves import with_unit
from titan_ckpt.tui.rows import Role, with_place
from titan_ckpt.tui.screens.incidents import Judged, incident_rows
from titan_ckpt.tui.screens.log_rows import shortened
from titan_ckpt.tui.screens.waits import wait_rows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.part import PartView
from tools.paths import DATA, INCIDENTS

pytestmark = pytest.mark.repeats


def grid_app() -> TitanApp:
    return TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1_795_250_000.0, first_screen=2)


def shown_parts(app: TitanApp) -> list[str]:
    return [view.part.name for view in app.pane.query(PartView) if view.is_shown]


def test_a_list_of_few_incidents_is_low_and_says_when() -> None:
    judged = {
        "a": Judged(text="rank 1 died", role=Role.BAD, moment="2026-11-22 02:18:18", kind="RANK_DIED", confidence="95%")
    }
    lines = [row.text for row in incident_rows(("a", "b"), "a", judged, 120)]
    assert "2026-11-22 02:18:18  RANK_DIED   95%  rank 1 died" in lines[1]
    assert lines[2].endswith("judging ...")
    assert "2026" not in incident_rows(("a",), "a", judged, 60)[1].text


def app_of(case: str, first_screen: int = 1) -> TitanApp:
    return TitanApp(find_content(str(INCIDENTS / case)), clock=lambda: 1_795_250_000.0, first_screen=first_screen)


@pytest.mark.parametrize("case", ["chain", "exception", "order", "size", "straggler"])
async def test_no_screen_cuts_a_number(case: str) -> None:
    """A part of a line's number is the number of another line."""
    app = app_of(case)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for number in "12346":
            await press(app, pilot, number)
            lines = [line for line in screen_text(app).splitlines() if re.search(r"\d…|\.py:…|\.py…", line)]
            assert not lines


@pytest.mark.parametrize(("case", "screen"), [("order", 3), ("skip", 3), ("exception", 1)])
async def test_a_narrow_screen_cuts_no_number(case: str, screen: int) -> None:
    app = app_of(case, screen)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        assert not re.findall(r"\d[.,x]?›", screen_text(app))
        assert "all_reduce     ›" in screen_text(app) or screen != 3


@pytest.mark.parametrize(
    ("case", "screen"), [("exception", 3), ("dataloader", 3), ("size", 6), ("order", 6), ("skip", 6)]
)
async def test_a_title_ends_before_the_frame_beside_it(case: str, screen: int) -> None:
    app = app_of(case, screen)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert " ╭─" in screen_text(app).splitlines()[2]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_waits_keep_the_line_and_drop_the_rest(width: int) -> None:
    incident = load_incident(str(INCIDENTS / "size"))
    for line in wait_rows(incident, width):
        if line.at is not None:
            assert len(line.text) <= width
            assert "faults.py:140" in (line.text if width > 40 else line.whole), line.text
            assert "#7" in line.text or "#" not in line.whole
    assert with_place([("a", 0), (" in group 12", 1)], "/x/y.py:104", 12) == "a  y.py:104"
    assert with_place([("waits #1234", 0)], "/x/y.py:104", 10) == "waits #…"


async def test_narrow_logs_show_their_messages() -> None:
    app = app_of("size", 5)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        text = screen_text(app)
        assert "▸  !1 02:07:37 step 2 done loss=4.000" in text
    torch = "W1121 02:07:38.255000 13183 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 13188"
    assert shortened(torch, 36) == "02:07:38 Sending process 13188"


async def test_details_take_the_lines_that_the_list_leaves() -> None:
    app = app_of("size")
    async with app.run_test(size=(200, 60)) as pilot:
        await settled(app, pilot)
        free = app.pane.size.height - len(app.pane.body.rows) - 1
        (details,) = [view for view in app.pane.query(PartView) if view.part.name == "details"]
        assert details.outer_size.height == free > 20
        assert "stack, innermost call first" in screen_text(app)


async def test_the_line_above_the_grid_is_never_empty() -> None:
    app = app_of("size", 2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert "v #7: all_reduce" in screen_text(app).splitlines()[3]
    app = app_of("pginit", 2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert screen_text(app).splitlines()[3].strip()


async def test_few_ranks_leave_room_for_their_bars_below() -> None:
    app = grid_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert shown_parts(app) == ["details", "bars"]
        text = screen_text(app)
        assert "ranks over time, all groups" in text
        await press(app, pilot, "t")
        assert shown_parts(app) == ["details"]
    app = grid_app()
    async with app.run_test(size=(200, 50)) as pilot:
        await settled(app, pilot)
        lines = screen_text(app).splitlines()
        assert lines[3].split()[:7].count("all_reduce") >= 3
        assert "# differs" in lines[7]


def test_values_have_the_unit_that_their_name_tells() -> None:
    shown = {
        "upload_bytes_per_s": "3.79 MB/s",
        "tokens_per_s": "3.79e+06",
        "step_s": "43 d 20 h",
        "memory, bytes": "3.79 MB",
    }
    assert {title: with_unit(title, 3.79e6) for title in shown} == shown
    assert with_unit("data wait, s", 2.6e-4) == "0.26 ms"
    assert with_unit("checkpoint stall, s (save_stall_s)", float("nan")) == "-"


async def test_the_grid_marks_the_ends_beyond_which_there_is_more() -> None:
    app = TitanApp(find_content(str(DATA / "run")), first_screen=2)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        axis = screen_text(app).splitlines()[4]
        assert "‹ #10 " in axis
        assert "›" not in axis
        await press(app, pilot, "less_than_sign")
        axis = screen_text(app).splitlines()[4]
        assert "‹" not in axis
        assert axis.split()[-2:] == ["#51", "›"]


def test_a_light_theme_of_the_terminals_colours_is_drawn_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picture(theme: str) -> str:
        path = tmp_path / f"{theme}.svg"
        assert main(["tui", str(DATA / "run"), "--theme", theme, "--screenshot", str(path)]) == 0
        return path.read_text()

    assert 'fill="#ffffff"' in picture("ansi-light")
    assert 'fill="#292929"' in picture("ansi-dark")
    monkeypatch.setenv("NO_COLOR", "1")
    assert 'fill="#ffffff"' in picture("light")
