"""Ages on the screens grow by themselves, and a look that finds no change is a look."""

from __future__ import annotations

import pytest

from tests.support.screen_pictures import screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS

ENDED_S = 1_795_247_234.0  # 2026-11-21 07:47:14 UTC


class Clock:
    now_s = ENDED_S + 40

    def __call__(self) -> float:
        return self.now_s


async def test_ages_of_a_job_that_ended_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    clock = Clock()
    app = TitanApp(find_content(str(DATA / "run")), clock=clock)
    async with app.run_test(size=(100, 30)) as pilot:
        for later_s, age in ((0, "39 s ago"), (5, "44 s ago"), (180, "3 min ago"), (7200, "2 h 0 min ago")):
            clock.now_s = ENDED_S + 40 + later_s
            for _ in range(2):  # rows are computed at every second tick
                app._tick()
            await settled(app, pilot)
            assert f"ended well 2026-11-21 07:47:14 UTC, {age}" in screen_text(app)


async def test_a_look_without_a_change_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    clock = Clock()
    app = TitanApp(find_content(str(INCIDENTS / "straggler")), clock=clock)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        await pilot.press("f")
        await settled(app, pilot)
        clock.now_s += 60
        app._paint_bars()
        assert "looked 1 min ago" in screen_text(app)
        app._loader.reload()
        await settled(app, pilot)
        app._paint_bars()
        assert "looked 0 s ago" in screen_text(app)
