"""The last looks at a job that ends, and the looks at one whose ranks die: what the screens say of them fits together."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.screen_pictures import screen_text
from tests.tui.test_story import NOW_S, live
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Situation, Verdict
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.standing import Standing, is_unsettled, standing
from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.screens.overview import live_rows, ranks_rows
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


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


async def test_a_job_in_the_folder_of_one_that_ended_well_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "run", tmp_path / "run")
    first = next((tmp_path / "run" / "debug").iterdir())
    app = TitanApp(find_content(str(tmp_path / "run")), clock=lambda: NOW_S)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        assert app.session.incident.value is not None
        shutil.copytree(first, first.parent / "20991231T000000Z")
        app._loader._not_before_s = app._loader._more_s = 0.0
        app._loader.judge_if_rested()
        while app.session.content.incident != "20991231T000000Z" or not app.is_settled:
            await pilot.pause(0.01)
        assert app.session.incident.value.run.incident == "20991231T000000Z"


async def test_recordings_that_vanish_leave_what_was_read(tmp_path: Path) -> None:
    shutil.copytree(DATA / "run", tmp_path / "run")
    app = TitanApp(find_content(str(tmp_path / "run")), clock=lambda: NOW_S)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        before = app.session.incident.value
        shutil.rmtree(tmp_path / "run" / "debug")
        (tmp_path / "run" / "logs" / "rank_00000.log").write_text("step 1\n")
        app._loader.reload()
        while "is gone" not in app._status_text:
            await pilot.pause(0.01)
        assert "what the recorders wrote is gone; shown is what was read before" in app._status_text
        assert app.session.incident.value is before


def test_a_process_that_is_leaving_is_no_hang_for_some_seconds() -> None:
    """Its recorder has stopped in order, and its exit status is not there yet."""
    run = load_incident(str(DATA / "run")).run
    ranks = {
        rank: replace(
            record, heartbeat=replace(record.heartbeat, is_stopped=True, is_leaving=True, status=None), exit=None
        )
        for rank, record in run.ranks.items()
        if record.heartbeat is not None
    }
    last_ns = max(record.heartbeat.alive_ns for record in ranks.values() if record.heartbeat is not None)
    for after_s, kind in ((3, VerdictKind.RUNNING), (60, VerdictKind.INSUFFICIENT_DATA)):
        assert diagnose(replace(run, ranks=ranks, read_ns=last_ns + after_s * 10**9))[0].verdict == kind


def test_a_rank_that_is_shown_as_dead_is_not_counted_as_alive(skip: Incident) -> None:
    """Its last tick is of this second: what its peers tell of it is newer."""
    states = {**skip.states, 1: Situation(rank=1, kind=RankState.DEAD)}
    died = Verdict(verdict=VerdictKind.RANK_DIED, culprits=(1,), confidence=0.7)
    for top, former in ((None, None), (died, None), (died, died)):
        seen = replace(live(skip, top), states=states).confirmed_by(None if former is None else live(skip, former))
        first, *others = [line.text for line in live_rows(seen, NOW_S, 100)]
        assert "3 of 4 ranks alive" in first
        assert ("GONE: the process of rank 1 is gone" in others) == seen.is_unconfirmed
        assert standing(seen, NOW_S).word == ("GONE" if seen.is_unconfirmed else "RANK_DIED")


def test_ranks_that_are_gone_are_told_from_those_that_still_wait(skip: Incident) -> None:
    seen = live(skip)
    waiting = Situation(rank=0, kind=RankState.IN_COLLECTIVE)
    states = {rank: replace(waiting, rank=rank) for rank in seen.run.ranks}
    ranks = {rank: replace(record, is_gone=rank in (0, 3), log=None) for rank, record in seen.run.ranks.items()}
    half = replace(seen, states=states, run=replace(seen.run, ranks=ranks))
    lines = [line.text.strip() for line in ranks_rows(half, 80)]
    assert lines[-2:] == ["w in a collective: 2 ranks (1-2)", "w was in a collective: 2 ranks (0,3)"]


async def test_a_narrow_bar_of_a_live_job_keeps_the_rank(skip: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was looked at for comes before when."""
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: live(skip))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app, bars = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S), {}
    async with app.run_test(size=(60, 16)) as pilot:
        await settled(app, pilot)
        app._loader._load_incident(app.session.content)
        for width in (60, 40, 34):
            await pilot.resize_terminal(width, 16)
            await settled(app, pilot)
            bars[width] = screen_text(app).splitlines()[1].strip()
    assert bars[60].startswith("SKIPPED_COLLECTIVE · rank 2")
    assert bars[60].endswith("looked 0 s ago")
    assert bars[40] == "SKIPPED_COLLECTIVE · rank 2   0 s ago"
    assert bars[34] == "SKIPPED_COLLECTIVE · rank 2"


def test_a_narrow_bar_keeps_the_line_rather_than_the_process() -> None:
    facts = ("rank 1", "stuck for 5.0 s", "python exception", "train.py:306", "vm:2261", "confidence 90% (recorded)")
    found = Standing(word="RANK_DIED", role=Role.BAD, facts=facts, minor=("python exception", "vm:2261"))
    assert found.text(55) == "RANK_DIED · rank 1 · stuck 5.0 s · train.py:306 · 90%"
    assert found.text(68) == "RANK_DIED · rank 1 · stuck for 5.0 s · train.py:306 · vm:2261 · 90%"
    assert found.text(32) == "RANK_DIED · rank 1 · stuck 5.0 s"
