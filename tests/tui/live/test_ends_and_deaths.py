"""The last looks at a job that ends, and the looks at one whose ranks die: what the screens say of them fits together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.screen_pictures import screen_text
from tests.tui.test_story import NOW_S, live
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.standing import is_unsettled
from titan_ckpt.tui.screenshot import settled
from tools.paths import INCIDENTS


@pytest.fixture(scope="module")
def skip() -> Incident:
    return load_incident(str(INCIDENTS / "skip"))


def with_beats(incident: Incident, **changes: object) -> Incident:
    """The incident with changed heartbeats."""
    ranks = {
        rank: replace(record, heartbeat=replace(record.heartbeat, **changes))  # type: ignore[arg-type]
        for rank, record in incident.run.ranks.items()
        if record.heartbeat is not None
    }
    return replace(incident, run=replace(incident.run, ranks=ranks))


async def test_the_end_is_looked_at_until_it_is_settled(skip: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process writes its exit status a moment after its recorder has stopped."""
    running = live(skip, Verdict(verdict=VerdictKind.RUNNING, confidence=0.5))
    unsure = Verdict(verdict=VerdictKind.INSUFFICIENT_DATA, confidence=0.3)
    leaving = replace(with_beats(running, is_stopped=True, is_leaving=True), verdicts=(unsure,))
    well = Verdict(verdict=VerdictKind.HEALTHY, confidence=0.9)
    ended = replace(with_beats(running, is_stopped=True, status=0), verdicts=(well,))
    looks: Iterator[Incident] = itertools.chain([running, leaving], itertools.repeat(ended))
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: next(looks))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S + 3)
    seen = []
    async with app.run_test(size=(100, 30)) as pilot:
        for _ in range(4):
            await settled(app, pilot)
            seen.append(screen_text(app).splitlines()[1].split()[0])
            app._loader._not_before_s = 0.0
            app._loader.judge_if_rested()
            await pilot.pause()
    assert seen == ["RUNNING", "INSUFFICIENT_DATA", "HEALTHY", "HEALTHY"]
    assert is_unsettled(leaving, NOW_S + 60)
    assert not is_unsettled(ended, NOW_S + 60)
    assert not is_unsettled(leaving, NOW_S + 3600)
