"""One story on every screen: the verdict bar, the rank at fault, sends and receives, and a verdict that follows a live job."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from rich.color import Color

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Heartbeat, Verdict
from titan_ckpt.tui import bars, editor, terminal, themes
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.bars import tabs_text
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.grid import ABSENT, DIFFERS, FAILED, PENDING
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.standing import confidence_word, standing
from titan_ckpt.tui.goto import link_to, places
from titan_ckpt.tui.rows import Role, RowLink
from titan_ckpt.tui.screens.grid_rows import grid_of
from titan_ckpt.tui.screens.waits import wait_rows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.session.session import Loadable, Session
from titan_ckpt.tui.themes import TEXTS, THEMES
from titan_ckpt.tui.widgets import looks
from tools.paths import DATA, INCIDENTS

NOW_S = 1_795_250_000.0
P2P = DATA / "injected" / "p2p_missing"


@pytest.fixture(scope="module")
def skip() -> Incident:
    return load_incident(str(INCIDENTS / "skip"))


def test_the_examples_hold() -> None:
    assert [doctest.testmod(module).failed for module in (bars, editor, looks, terminal, themes)] == [0] * 5


async def test_every_screen_has_the_verdict_and_marks_the_culprit() -> None:
    app = TitanApp(find_content(str(P2P)), clock=lambda: NOW_S)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        for number in "12345678":
            await press(app, pilot, number)
            assert (
                "P2P_MISSING_PEER · rank 1 · stuck for 5.0 s · faults.py:281 · n0:22332"
                in screen_text(app).splitlines()[1]
            )
        marks = {"1": "! at fault: rank 1", "2": "▸ !    1 ", "3": "▸ !    1 ", "5": "    !1 ", "6": "rank 1 ! culprit"}
        for number, mark in marks.items():
            await press(app, pilot, number)
            assert mark in screen_text(app), screen_text(app)


async def test_enter_on_a_p2p_verdict_opens_its_sends_and_receives() -> None:
    """The number of a send counts per pair; taken for a collective's it opened an innocent broadcast."""
    app = TitanApp(find_content(str(P2P)), clock=lambda: NOW_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "enter")
        assert app.pane.number == 2
        assert "group default_pg send/recv" in screen_text(app)
        assert app.pane.copied_text() == "group default_pg send/recv 3rd: rank 1 absent"
        await press(app, pilot, "6")
        assert "cycle" not in screen_text(app)


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("p2p_missing", {1: ABSENT, 2: FAILED}),
        ("p2p_batch", {1: ABSENT, 2: PENDING}),
        ("p2p_size", {1: DIFFERS, 2: PENDING}),
    ],
)
def test_the_grid_shows_the_missing_and_the_different_half(case: str, codes: dict[int, int]) -> None:
    incident = load_incident(str(DATA / "injected" / case))
    lane = incident.lanes[incident.lane_of("default_pg send/recv")]
    grid = grid_of(incident, lane)
    worst = {int(rank): int(row.max()) for rank, row in zip(grid.members, grid.codes, strict=True)}
    assert {rank: code for rank, code in worst.items() if code >= PENDING} == codes
    assert not any(incident.is_p2p(other) for other in incident.lanes[:-1])


def live(incident: Incident, top: Verdict | None = None) -> Incident:
    """The incident with heartbeats of this moment, no end, and another verdict."""
    now_ns = int(NOW_S * 1e9)
    beat = Heartbeat(step=7, phase="forward", phase_ns=now_ns, alive_ns=now_ns, source="x.box")
    ranks = {rank: replace(record, heartbeat=beat, exit=None) for rank, record in incident.run.ranks.items()}
    verdicts = incident.verdicts if top is None else (top,)
    return replace(incident, run=replace(incident.run, ranks=ranks, launcher=None), verdicts=verdicts)


async def test_a_live_job_is_judged_again_and_one_look_accuses_nobody(
    skip: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No log grows in a hung job: the verdict changes all the same, once two looks agree."""
    healthy = Verdict(verdict=VerdictKind.HEALTHY)
    passing = Verdict(verdict=VerdictKind.STUCK_ON_CPU, culprits=(0,), confidence=0.5)
    looks_at: Iterator[Incident] = iter([live(skip, healthy), live(skip, passing), live(skip), live(skip), live(skip)])
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: next(looks_at))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    bars, firsts = [], []
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        app.session.is_following = True
        for _ in range(4):
            text = screen_text(app).splitlines()
            bars.append(text[1])
            firsts.append(text[3].split()[1])
            app._loader._not_before_s = 0.0
            app._follow()
            await pilot.pause()
            await settled(app, pilot)
    assert [bar.split()[0] for bar in bars] == ["RUNNING", "RUNNING", "RUNNING", "SKIPPED_COLLECTIVE"]
    assert all("rank 0" not in bar for bar in bars)
    assert firsts == ["RUNNING", "RUNNING", "RUNNING", "STUCK"]
    assert "looked 0 s ago" in bars[1]


def test_a_hung_job_says_for_how_long_and_how_sure(skip: Incident) -> None:
    assert [confidence_word(c) for c in (0.97, 0.75, 0.6, 0.5, 0.2)] == [
        "recorded", "likely", "check it first", "one of several readings", "a lead only",
    ]  # fmt: skip
    found = standing(live(skip), NOW_S)
    assert found.word == VerdictKind.SKIPPED_COLLECTIVE
    assert "confidence 95% (recorded)" in found.facts
    assert found.text(30) == "SKIPPED_COLLECTIVE · rank 2"


def test_equal_waiting_ranks_are_one_line(skip: Incident) -> None:
    ranks = range(1, 16_384)
    record, state = skip.run.ranks[0], skip.states[0]
    states = {**{rank: replace(state, rank=rank) for rank in ranks}, 0: skip.states[2]}
    edges = tuple(Edge(waiter=rank, awaited=0, group=0, seq=7) for rank in ranks)
    run = replace(skip.run, ranks=dict.fromkeys(range(16_384), record), world_size=16_384)
    large = replace(skip, run=run, states=states, edges=edges, verdicts=(replace(skip.top, culprits=(0,)),))
    lines = [row.text.strip() for row in wait_rows(large, 120)]
    assert len(lines) == 2
    assert lines[1].startswith("w 16,383 ranks wait for 0: 1-16383 · failed in all_reduce #7 · default_pg")


def session_of(incident: Incident) -> Session:
    content = find_content(str(INCIDENTS / "skip"))
    return Session(content=content, incident=Loadable("dumps", incident))


def test_what_is_typed_after_a_colon_is_found(skip: Incident) -> None:
    session = session_of(skip)
    assert link_to(session, "2", 2) == RowLink(screen=2, rank=2)
    assert link_to(session, "rank 2", 8) == RowLink(screen=6, rank=2)
    assert link_to(session, "#5", 1) == RowLink(screen=3, group="default_pg", seq=5, rank=2)
    assert link_to(session, "4", 1) is link_to(session, "nowhere", 1) is link_to(session, "", 1) is None
    named = replace(skip.run, ranks={**skip.run.ranks, 3: replace(skip.run.ranks[3], host="node3")})
    hosts = session_of(replace(skip, run=named))
    assert link_to(hosts, "node3", 2) == RowLink(screen=2, rank=3)
    assert [text for text, _ in places(hosts, "3")] == ["rank 3", "#3", "node3"]
    assert [text for text, _ in places(hosts, "#3")] == ["#3"]
    assert list(places(hosts, "")) == []


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_current_tab_is_in_sight_at_any_width(width: int) -> None:
    for number in range(1, 9):
        text = tabs_text(number, width)
        assert f"[{number} " in text
        assert len(text) <= width


async def test_a_click_on_a_tab_shows_its_screen() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await pilot.click("#tabs", offset=(screen_text(app).index("6 Waits") + 2, 0))
        await settled(app, pilot)
        assert app.pane.number == 6


async def test_light_and_ascii_terminals_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("titan_ckpt.tui.app.is_ascii_terminal", lambda: True)
    app = TitanApp(find_content(str(DATA / "run")), clock=lambda: NOW_S, theme=terminal.fitting_theme(None))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for number in "12345678":
            await press(app, pilot, number)
            assert screen_text(app).isascii(), screen_text(app)
        assert not app.current_theme.dark
        ground = np.array(app.background_colors[1].rgb)
        assert ground.min() > 200


@pytest.mark.parametrize(
    ("variables", "theme"),
    [
        ({"TERM": "screen"}, "ansi-dark"),
        ({"TERM": "linux"}, "ansi-dark"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "titan-dark"),
        ({"TERM": "tmux-256color"}, "titan-dark"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "ansi-dark"),
    ],
)
def test_a_terminal_of_16_colours_keeps_its_own(
    variables: dict[str, str], theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "COLORTERM", "NO_COLOR", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal.fitting_theme(None) == theme


def test_colours_can_be_read_on_their_backgrounds() -> None:
    """WCAG's contrast of 4.5, also on the cursor's line."""
    for theme in THEMES.values():
        ground = theme.background or "#121212"
        found = looks.looks_of(theme)
        if theme.ansi or found.cursor.bgcolor is None:
            continue  # the terminal's own colours
        for role, style in found.roles.items():
            if style.color is not None:
                ratios = [
                    contrast(style.color.get_truecolor().hex, on)
                    for on in (ground, found.cursor.bgcolor.get_truecolor().hex)
                ]
                assert min(ratios) >= 4.5, (theme.name, role, ratios)
        assert contrast(hex_of(found.tab.color), hex_of(found.tab.bgcolor)) >= 4.5, theme.name


async def test_16_colours_can_be_read_on_white_and_on_black() -> None:
    """Yellow and cyan cannot on white, blue on black; bold black is grey on many terminals."""
    for theme in (theme for theme in THEMES.values() if theme.ansi):
        colours = {style.color.name for style in looks.looks_of(theme).roles.values() if style.color is not None}
        assert colours == {"red", "magenta"}
    app = TitanApp(find_content(str(INCIDENTS / "straggler")), clock=lambda: NOW_S, theme="ansi-dark")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert app.query_one(bars.VerdictBar).has_class("warn")
        assert not app.query_one(bars.VerdictBar).rich_style.bold


def test_texts_that_the_style_sheet_colours_can_be_read() -> None:
    for theme in THEMES.values():
        if not theme.ansi:
            for name in TEXTS:
                assert contrast(theme.variables[name], theme.background or "#121212") >= 4.5, (theme.name, name)


@pytest.mark.parametrize("name", ["solarized-light", "solarized-dark"])
async def test_axis_and_legend_of_the_grid_can_be_read(name: str) -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S, theme=name)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "2")
        for place in ("#axis", "#legend"):
            style = app.screen.query_one(place).rich_style
            assert contrast(hex_of(style.color), hex_of(style.bgcolor)) >= 4.5, place


async def test_a_chosen_cell_keeps_the_colour_of_its_fault() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "2 n")
        spans = [span for at in range(4) for span in app.pane.body.rows.row(at, 100).spans]
        assert [role for text, role in spans if text.startswith("#")] == [Role.SPOT_BAD]


async def test_help_fits_a_narrow_terminal() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "question_mark")
        lines = screen_text(app).splitlines()
        assert lines[1].strip().endswith("╮"), lines
        assert all(len(line.rstrip()) <= 40 for line in lines)


async def test_a_page_of_the_help_is_scrolled_by_one_key_and_back() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "question_mark")
        first = screen_text(app)
        assert "everywhere" in first
        assert "│▸" not in first, "a text has no cursor"
        assert first.splitlines()[-1].split() == ["j", "k", "scroll", "esc", "close"]
        await press(app, pilot, "pagedown")
        assert "this help, quit" in screen_text(app)
        await press(app, pilot, "k")
        await press(app, pilot, "pageup")
        assert screen_text(app) == first


async def test_a_tiny_terminal_shows_no_empty_pane() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "6 w")
        lines = screen_text(app).splitlines()
        assert not any(
            a.lstrip().startswith("╭") and b.lstrip().startswith("╰") for a, b in itertools.pairwise(lines)
        ), lines


def test_the_text_is_never_weaker_than_what_stands_behind_it() -> None:
    for theme in THEMES.values():
        if not theme.ansi:
            found = looks.looks_of(theme)
            assert found.cursor.bgcolor is not None
            assert theme.foreground is not None
            on = found.cursor.bgcolor.get_truecolor().hex
            text = contrast(theme.foreground, on)
            assert text >= 4.5, theme.name
            assert contrast(hex_of(found.roles[Role.DIM].color), on) <= text, theme.name


def hex_of(colour: Color | None) -> str:
    assert colour is not None
    return colour.get_truecolor().hex


def contrast(a: str, b: str) -> float:
    """The ratio of the lighter to the darker luminance (WCAG 2)."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
