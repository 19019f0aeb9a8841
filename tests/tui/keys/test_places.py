"""Places that a click, a zoom or a typed name leads to."""

from __future__ import annotations

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


async def test_a_click_selects_a_step_of_a_curve() -> None:
    app = TitanApp(find_content(str(DATA / "run")), clock=lambda: 1.8e9, first_screen=8)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await pilot.click(app.pane.body, offset=(30, 4))
        await settled(app, pilot)
        assert "loss   step 20: 3.165" in screen_text(app)


async def test_a_timeline_is_drawn_again_when_it_is_zoomed_and_moved() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        seen = []
        for keys in ("t", "plus", "less_than_sign", "minus", "minus", "minus"):
            await press(app, pilot, keys)
            seen.append(screen_text(app))
        assert len(set(seen)) == len(seen)
        assert "+-" not in seen[-1]  # times before the first operation have one sign


async def test_numbers_and_steps_are_found_where_they_are() -> None:
    app = TitanApp(find_content(str(DATA / "injected" / "p2p_missing")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for text, shown in (("#7", "operation #7 · 3/4 issued"), ("rank2", "rank 2"), ("step 2", "[5 Logs]")):
            app.go_to(text)
            await settled(app, pilot)
            assert shown in screen_text(app), text
        app.go_to("#999")
        await settled(app, pilot)
        assert "'#999' is no rank, operation, step" in screen_text(app)
