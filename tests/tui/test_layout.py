"""What a screen does with its room: panes that appear, lists that are as high as they need, columns that a width has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.cli.main import main
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.pictures.curves import with_unit
from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.screens.incidents import Judged, incident_rows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.part import PartView
from tools.paths import DATA, INCIDENTS


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
