"""An incident of which the operations of one rank alone are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.screenshot import settled
from tools.paths import INCIDENTS


@pytest.mark.parametrize("screen", [2, 3])
async def test_operations_of_one_rank_are_not_denied(screen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_incident(str(INCIDENTS / "skip"))
    run = replace(found.run, ranks={0: found.run.ranks[0]})
    running = Verdict(verdict=VerdictKind.RUNNING, confidence=0.5)
    alone = replace(found, lanes=(), edges=(), states={0: found.states[0]}, run=run, verdicts=(running,))
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: alone)
    app = TitanApp(find_content(str(INCIDENTS / "skip")), first_screen=screen)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert "operations of rank 0 alone are recorded" in screen_text(app)
        await press(app, pilot, "enter")
        assert app.pane.number == 6
