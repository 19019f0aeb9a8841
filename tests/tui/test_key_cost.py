"""What a key may cost, counted and not timed: lines that are painted, panes that are built, passes over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from textual.screen import Screen

from tests.support.screen_pictures import press
from titan_ckpt.debug.incident import waits
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.data.standing import standing
from titan_ckpt.tui.rows import Row
from titan_ckpt.tui.screens.collective import CollectivePane
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.line_view import LineView
from titan_ckpt.tui.widgets.part import Space
from tools.paths import INCIDENTS

SKIP = INCIDENTS / "skip"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often lines of the list were painted, details built, and the screen laid out."""
    found: Counter[str] = Counter()
    paint, build, lay_out = LineView.render_line, CollectivePane.part_rows, Screen._refresh_layout

    def painted(self: LineView, y: int) -> object:
        found["lines"] += type(self) is LineView
        return paint(self, y)

    def built(self: CollectivePane, space: Space) -> Iterable[Row]:
        found["details"] += 1
        return build(self, space)

    def laid_out(self: Screen[None], *args: object, **named: object) -> object:
        found["layouts"] += 1
        return lay_out(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(LineView, "render_line", painted)
    monkeypatch.setattr(CollectivePane, "part_rows", built)
    monkeypatch.setattr(Screen, "_refresh_layout", laid_out)
    return found


async def test_a_step_paints_two_lines_and_then_the_details(counts: Counter[str]) -> None:
    app = TitanApp(find_content(str(SKIP)), first_screen=3)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "g")
        counts.clear()
        await press(app, pilot, "j j j j")
        assert counts["details"] == 1, "once, of the last line"
        assert counts["lines"] <= 8
        counts.clear()
        await press(app, pilot, "k")
        assert counts["details"] == 1
        assert counts["lines"] == 2


async def test_a_key_of_the_grid_lays_nothing_out(counts: Counter[str]) -> None:
    app = TitanApp(find_content(str(SKIP)), first_screen=2)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "h")
        counts.clear()
        await press(app, pilot, "h h l n N j")
        assert counts["layouts"] == 0


def test_the_bar_asks_each_incident_for_its_times_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is painted every second; to find since when the job stands is a pass over all ranks."""
    incident = load_incident(str(SKIP))
    monkeypatch.setattr(waits, "waits", None)
    assert standing(incident, 1.8e9).facts
    assert incident.began_ns
    assert incident.last_sign_ns >= incident.began_ns
