"""Runs that are opened early, and a list of runs that changes: what comes is shown, and the cursor stays on its run."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA


async def test_the_cursor_stays_on_its_run_when_another_comes(tmp_path: Path) -> None:
    """Without `f`: a list of runs on this machine is read again by itself."""
    for name in ("b", "c"):
        shutil.copytree(DATA / "run", tmp_path / name)
    app = TitanApp(find_content(str(tmp_path)))
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        assert "f follow" in screen_text(app).splitlines()[-1]
        await press(app, pilot, "G k k")
        chosen = app.pane.copied_text()
        line = app.pane.body.cursor
        shutil.copytree(DATA / "run", tmp_path / "a")
        app._loader._more_s = app._loader._not_before_s = 0.0
        app._loader.judge_if_rested()
        while app.session.runs.value is None or len(app.session.runs.value.found) < 3:
            await settled(app, pilot)
        await settled(app, pilot)
        assert app.pane.copied_text() == chosen
        assert app.pane.body.cursor > line


async def test_a_run_that_is_opened_early_fills(tmp_path: Path) -> None:
    """Without `f`: its first metrics and its first signs of life."""
    shutil.copytree(DATA / "run" / "step-00000020", tmp_path / "step-00000020")
    app = TitanApp(find_content(str(tmp_path)), first_screen=8)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        assert "no metrics.jsonl here" in screen_text(app)
        for folder in ("logs", "debug"):
            shutil.copytree(DATA / "run" / folder, tmp_path / folder)
        app._loader._more_s = app._loader._not_before_s = 0.0
        app._loader.judge_if_rested()
        while app.session.metrics.value is None or app.session.incident.value is None:
            await settled(app, pilot)
        await settled(app, pilot)
        assert "no metrics.jsonl here" not in screen_text(app)
