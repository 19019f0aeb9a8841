"""What was typed is not lost, a report says what it replaces, and the cursor follows the verdict until it is moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key
from textual.widgets import Input

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Heartbeat, Situation, Verdict
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.pictures.details import rank_rows
from titan_ckpt.tui.pictures.timeline import bars_rows
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS

NOW_S = 1_795_250_000.0


async def test_a_refused_name_is_there_to_be_corrected(tmp_path: Path) -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        prompt = app.query_one("#prompt", Input)
        for typed, said in (
            (f"{tmp_path}/a.pdf", "ends with"),
            (f"{tmp_path}/a.md", "report written"),
            ("", "in place of"),
        ):
            await press(app, pilot, "x")
            prompt.value = typed or prompt.value
            await press(app, pilot, "enter")
            assert said in screen_text(app).splitlines()[-1]
            await press(app, pilot, "x")
            assert prompt.value == (typed or f"{tmp_path}/a.md")
            await press(app, pilot, "escape")


async def test_a_filter_is_edited_and_one_that_is_gone_is_offered() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=5)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for keys, offered in (("", ""), ("s t e p enter", "step"), ("escape escape", "step")):
            await press(app, pilot, keys)
            await press(app, pilot, "slash")
            assert app.query_one("#prompt", Input).value == offered


def stopped(incident: Incident, rank: int, kind: RankState) -> Incident:
    """The incident with a rank that stopped where it was, with its last sign of life in the middle of the last wait."""
    table = incident.run.ranks[rank].operations
    beat = Heartbeat(step=7, phase="", phase_ns=0, alive_ns=int(table["created_ns"].max()) + 1_000_000, source="")
    ranks = {**incident.run.ranks, rank: replace(incident.run.ranks[rank], heartbeat=beat, exit=None, log=None)}
    states = {**incident.states, rank: Situation(rank=rank, kind=kind)}
    return replace(incident, run=replace(incident.run, ranks=ranks), states=states)


@pytest.mark.parametrize(("kind", "mark"), [(RankState.FROZEN, "z"), (RankState.DEAD, "x")])
def test_a_rank_that_is_frozen_or_dead_is_not_drawn_as_waiting(kind: RankState, mark: str) -> None:
    found = stopped(load_incident(str(INCIDENTS / "skip")), 0, kind)
    lines = [line.text for line in bars_rows(found, 90, 20)]
    bars = {line.split()[0]: line for line in lines if line.strip()}
    assert bars["0"].rstrip().endswith(mark)
    assert mark not in bars["1"]
    assert any(f"{mark} {kind.value}" in line for line in lines)
    details = [line.text for line in rank_rows(found, 0, 60)]
    assert any(line.startswith("stopped in all_reduce #7") for line in details)
    assert not any(line.startswith("waits in") for line in details)


def test_a_rank_without_a_stack_is_seen_in_its_step() -> None:
    found = stopped(load_incident(str(INCIDENTS / "skip")), 0, RankState.UNKNOWN)
    assert found.doing(0) == "seen in step 7"


@pytest.mark.parametrize("is_moved", [False, True])
async def test_the_cursor_follows_the_verdict_until_it_is_moved(
    monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    skip = load_incident(str(INCIDENTS / "skip"))
    looks: Iterator[Incident] = iter(
        replace(skip, verdicts=(Verdict(verdict=VerdictKind.RANK_FROZEN, culprits=(rank,), confidence=0.9),))
        for rank in (2, 1)
    )
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: next(looks))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S, first_screen=2)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        assert app.pane.body.cursor == 2
        await press(app, pilot, "j" if is_moved else "")
        app._loader._load_incident(app.session.content)
        await settled(app, pilot)
        assert "rank 1" in screen_text(app).splitlines()[1]
        assert app.pane.body.cursor == (3 if is_moved else 1)


def test_a_group_that_was_never_formed_has_its_last_sign_of_life() -> None:
    from titan_ckpt.tui.data.standing import standing

    found = standing(load_incident(str(DATA / "flight_recorder" / "pginit")), NOW_S)
    assert found.facts[-1] == "last sign of life 2026-11-21 02:10:20 UTC"


async def test_keys_that_arrive_with_letters_are_obeyed_in_their_order() -> None:
    """As tmux send-keys and fast typing deliver them: what is cleared is what stood there before."""
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for key, character in (("colon", ":"), ("1", "1"), ("ctrl+u", "\x15"), ("3", "3"), ("left", None), ("4", "4")):
            app.post_message(Key(key, character))
        await settled(app, pilot)
        assert app.query_one("#prompt", Input).value == "43"


async def test_a_time_beyond_the_logs_says_where_they_end() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=5)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for typed, said in (("23:59:59", "the lines end at 2026-"), ("0:00", "the lines begin at 2026-")):
            await press(app, pilot, "t")
            app.query_one("#prompt", Input).value = typed
            await press(app, pilot, "enter")
            assert said in screen_text(app).splitlines()[-1]
