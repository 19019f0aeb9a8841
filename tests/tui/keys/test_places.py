"""Places that a click, a zoom or a typed name leads to."""

from __future__ import annotations

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.tui import tasks
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.session.session import Loadable
from tools.paths import DATA, INCIDENTS


async def test_a_click_selects_a_step_of_a_curve() -> None:
    app = TitanApp(find_content(str(DATA / "run")), clock=lambda: 1.8e9, first_screen=8)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await pilot.click(app.pane.body, offset=(30, 4))
        await settled(app, pilot)
        assert "loss   step 20: 3.165" in screen_text(app)


async def test_a_click_selects_a_column_of_the_grid() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for at, column in ((22, "#3"), (28, "#5"), (2, "#5"), (55, "#5")):  # beside the cells it selects a line alone
            await pilot.click(app.pane.body, offset=(at, 1))
            await settled(app, pilot)
            assert app.pane.text_to_copy() == f"group default_pg {column}: rank 1 done"


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


async def test_a_step_is_found_in_the_log_of_the_rank_at_fault() -> None:
    """Other ranks wrote lines in the same millisecond."""
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        app.go_to("step 2")
        await settled(app, pilot)
        assert app.pane.text_to_copy() == "2026-11-21 02:07:01.517 [rank2] INFO step 2 start"


async def test_a_copy_of_the_graph_names_the_waits() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=6)
    async with app.run_test(size=(130, 30)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "tab")
        assert app.pane.text_to_copy() == "ranks 0-1,3 waited for rank 2"


async def test_what_has_one_order_says_so() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert "o order" not in screen_text(app)
        await press(app, pilot, "o")
        assert "by rank is the only order" in screen_text(app)


def test_a_long_reading_tells_its_share() -> None:
    told: list[str] = []
    progress = tasks.ByteProgress(told.append)
    load_incident(str(INCIDENTS / "skip"), on_read=progress.show)
    assert told[-1].endswith("(100%)")
    assert len(told) > 2
    assert Loadable("logs", is_loading=True, share=told[0]).text == f"reading logs, {told[0]} ..."
