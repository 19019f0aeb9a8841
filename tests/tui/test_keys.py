"""Every key of every screen does what its help promises, at 80 x 24."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pytest
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.screen_pictures import press as press_now
from tests.support.screen_pictures import screen_text
from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.commands import Jumps, Palette
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.grid import Order, per_row_to_fit, row_starts
from titan_ckpt.tui.screens import PANES
from titan_ckpt.tui.screens.collective import rank_to_compare
from titan_ckpt.tui.screens.grid import GridPane
from titan_ckpt.tui.screens.grid_rows import GridRows
from titan_ckpt.tui.screens.help import COMMON_KEYS, HelpScreen
from titan_ckpt.tui.screens.log_rows import LogRows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.line_view import LineView
from tools.paths import DATA

SPELLED = {
    "left_square_bracket": "[", "right_square_bracket": "]", "plus": "+", "minus": "-", "less_than_sign": "<",
    "greater_than_sign": ">", "colon": ":", "question_mark": "?", "slash": "/", "escape": "esc",
    "left_curly_bracket": "{", "right_curly_bracket": "}",
}  # fmt: skip


def app_of(case: str, screen: int = 1) -> TitanApp:
    return TitanApp(find_content(str(DATA / case)), clock=lambda: 1.8e9, first_screen=screen)


def pinned(app: TitanApp) -> int | None:
    return app.session.pinned


def is_following(app: TitanApp) -> bool:
    return app.session.is_following


def keys_of(bindings: Iterable[object]) -> set[str]:
    found = [binding.key for binding in bindings if isinstance(binding, Binding)]
    return {SPELLED.get(key, key) for keys in found for key in keys.split(",")}


@pytest.mark.parametrize("pane", PANES)
def test_the_help_names_every_key_of_a_screen(pane: type[GridPane]) -> None:
    named = {key for keys, _ in (*pane.keys, *COMMON_KEYS) for key in keys.replace(" - ", " ").split()}
    assert keys_of(pane.BINDINGS) <= named


def test_the_help_names_every_key_of_all_screens() -> None:
    named = (
        " ".join(f"{keys} {what}" for keys, what in COMMON_KEYS)
        .replace("1 - 8", "1 2 3 4 5 6 7 8")
        .replace(",", " ")
        .split()
    )
    arrows = {"up", "down", "left", "right", "home", "end", "pageup", "pagedown", "ctrl+b", "ctrl+f"}
    assert keys_of([*TitanApp.BINDINGS, *LineView.BINDINGS]) - arrows <= set(named)


async def press(app: TitanApp, pilot: Pilot[None], keys: str) -> None:
    """Press keys once everything is painted, and wait for their effects."""
    await settled(app, pilot)
    await press_now(app, pilot, keys)


async def fill(app: TitanApp, pilot: Pilot[None], key: str, text: str) -> None:
    """Press a key that prompts, and fill in the prompt."""
    await press(app, pilot, key)
    app.query_one("#prompt", Input).value = text
    await press(app, pilot, "enter")


@pytest.mark.parametrize(
    ("keys", "cursor"),
    [("j j k", 1), ("down down up", 1), ("G", 175), ("end", 175), ("G g", 0), ("end home", 0),
     ("pagedown", 19), ("ctrl+f ctrl+f ctrl+b", 19), ("pagedown pageup", 0)],
)  # fmt: skip
async def test_the_cursor_moves(keys: str, cursor: int) -> None:
    app = app_of("flight_recorder/skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, f"g {keys}")
        assert app.pane.body.cursor == cursor


async def test_long_lines_scroll_sideways_and_back() -> None:
    app = app_of("flight_recorder/skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "g l right")
        assert "02:07:01.495 [rank3]" in screen_text(app)
        assert "2026-" not in screen_text(app)
        await press(app, pilot, "h left")
        assert "2026-11-21 02:07:01.495" in screen_text(app)


async def test_numbers_show_screens_and_esc_retraces_the_history() -> None:
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(80, 24)) as pilot:
        for number in "23456781":
            await press(app, pilot, number)
            assert app.pane.number == int(number)
            assert f"[{number} " in screen_text(app).splitlines()[0]
        for former in (8, 7, 6, 5, 4, 3, 2, 1):
            await press(app, pilot, "escape")
            assert app.pane.number == former


async def test_help_covers_any_screen_and_goes() -> None:
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(80, 24)) as pilot:
        for number, own in (("2", "ranks per row"), ("5", "first error"), ("7", "prune preview")):
            await press(app, pilot, f"{number} question_mark")
            assert isinstance(app.screen, HelpScreen)
            assert own in screen_text(app)
            assert "everywhere" in screen_text(app)
            await press(app, pilot, "escape")
            assert app.pane.number == int(number)


async def test_the_palette_leads_to_a_screen() -> None:
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "ctrl+p")
        await pilot.press(*"Waits")
        await pilot.pause()
        while "who waits for whom" not in screen_text(app):
            await pilot.pause(0.05)
        await pilot.press("down", "enter")
        while app.pane.number != 6:
            await pilot.pause(0.05)


async def test_the_palette_leads_to_steps_and_times() -> None:
    app = app_of("run")
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        for query, expected, number, line in (
            ("step 40", "go to step 40", 7, "40"),
            ("step 41", "go to step 41", 8, "step 41  loss "),
            ("07:46:56", "go to the log lines of 07:46:56", 5, "07:46:56"),
        ):
            found = {hit.text: hit.command async for hit in Jumps(app.screen).search(query)}
            assert list(found) == [expected]
            found[expected]()
            await settled(app, pilot)
            assert app.pane.number == number
            assert line in app.pane.text_to_copy()
        assert [hit.text async for hit in Jumps(app.screen).search("step 4000")] == []


async def test_the_palette_knows_ranks_by_the_word() -> None:
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        found = [(hit.text, hit.help) async for hit in Jumps(app.screen).search("rank")]
        assert [text for text, _ in found] == [f"go to rank {rank}" for rank in (2, 0, 1, 3)]
        assert found[0][1] == "culprit: failed in a collective at /srv/job/faults.py:122"


async def test_page_keys_of_the_palette_are_safe() -> None:
    """Textual looks for a page in a list that is not laid out yet."""
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(20, 5)) as pilot:
        await settled(app, pilot)
        await pilot.press("ctrl+p", "pageup", "pagedown", "x", "pageup", "pagedown")
        await settled(app, pilot)
        assert isinstance(app.screen, Palette)
        await press(app, pilot, "escape")
        assert app.is_running


async def test_a_line_is_copied_and_a_rank_pinned_on_every_screen() -> None:
    app = app_of("flight_recorder/skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "y")
        assert app.clipboard.startswith("SKIPPED_COLLECTIVE")
        await press(app, pilot, "2 g j j space")
        assert pinned(app) == 2
        assert "*    2" in screen_text(app)
        await press(app, pilot, "3")
        assert "*    2  failed" in screen_text(app)
        await press(app, pilot, "2 space")
        assert pinned(app) is None
        assert "rank 2 unpinned" in screen_text(app)


async def test_the_grid_zooms_pans_and_changes_order_axis_and_group() -> None:
    app = app_of("run", 2)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "minus")
        assert "2 operations per cell" in screen_text(app)
        await press(app, pilot, "plus")
        assert "operations per cell" not in screen_text(app)
        await press(app, pilot, "less_than_sign less_than_sign less_than_sign")
        assert " #1 " in screen_text(app).splitlines()[4]
        await press(app, pilot, "greater_than_sign")
        assert " #1 " not in screen_text(app).splitlines()[4]
        await press(app, pilot, "t")
        assert re.search(r" \+0[.0]* s ", screen_text(app))
        await press(app, pilot, "t o")
        assert "by dp_shard" in screen_text(app)
        await press(app, pilot, "o")
        assert "by tp" in screen_text(app)
        await press(app, pilot, "right_square_bracket")
        assert "(2 of 7)" in screen_text(app)
        await press(app, pilot, "left_square_bracket left_square_bracket")
        assert "(7 of 7)" in screen_text(app)
        await press(app, pilot, "l h")
        assert isinstance(app.pane, GridPane)
        assert "#2699: rank 2 not recorded" in app.pane.ruler()
        await press(app, pilot, "less_than_sign less_than_sign")
        assert app.pane.ruler().endswith("#2699: rank 2 not recorded ›")
        app.pane._first = (app.pane._spot or 0) + 5
        assert app.pane.ruler().strip() == "‹ #2699: rank 2 not recorded"
        await press(app, pilot, "h")
        await fill(app, pilot, "slash", "3")
        assert len(app.pane.body.rows) == 1
        await fill(app, pilot, "slash", "77")
        assert "no rank of this group matches 77" in screen_text(app)


async def test_rows_of_several_ranks_open_into_them_and_close_again() -> None:
    app = app_of("flight_recorder/skip", 2)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "v v")
        assert "up to 4 ranks per row" in screen_text(app)
        assert "0-3" in screen_text(app)
        await press(app, pilot, "n")
        assert "#7: 1 differs, 3 failed" in screen_text(app)
        await press(app, pilot, "enter")
        assert "ranks per row" not in screen_text(app)
        assert "#7: rank 2 differs" in screen_text(app)
        await press(app, pilot, "escape V")
        assert "up to 2 ranks per row" in screen_text(app)
        assert app.pane.number == 2


async def test_the_outlier_among_5000_ranks_is_two_keys_away() -> None:
    app = app_of("flight_recorder/skip", 2)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "g")
        incident = app.session.incident.value
        assert incident is not None
        ranks, lane = 5_000, incident.lanes[0]
        usual, odd = lane.row[0], np.arange(ranks) == 4_321
        rows = np.where(odd[:, None], lane.row[2], usual)
        large = Lane(group=lane.group, members=tuple(range(ranks)), first_seq=lane.first_seq, row=rows,
                     signature=np.where(odd[:, None], lane.signature[2], lane.signature[0]), codes=lane.codes,
                     last=np.full(ranks, 7), done=np.zeros(ranks, bool), pending=np.full(ranks, 7),
                     is_silent=np.zeros(ranks, bool))  # fmt: skip
        records = {rank: incident.run.ranks[2 if rank == 4_321 else 0] for rank in range(ranks)}
        object.__setattr__(incident.run, "ranks", records)
        object.__setattr__(incident, "lanes", (large,))
        app.session.incident.version += 1
        await press(app, pilot, "1 2")
        assert isinstance(app.pane.body.rows, GridRows)
        assert len(app.pane.body.rows) <= 18
        await press(app, pilot, "n")
        assert screen_text(app).count("#") >= 2
        await press(app, pilot, "enter")
        assert "rank 4321 differs" in screen_text(app)


def test_each_coordinate_begins_a_new_row() -> None:
    keys = np.repeat([0, 1, 2], [5, 3, 8])
    assert row_starts(keys, 4).tolist() == [0, 4, 5, 8, 12]
    assert row_starts(keys, 1).tolist() == list(range(16))
    assert per_row_to_fit(keys, 3) == 8
    assert per_row_to_fit(keys, 1) == 16
    order = Order(name="tp", places=np.arange(16), keys=keys)
    assert order.only(np.arange(16) % 2 == 0).keys.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


async def test_operations_are_stepped_through_and_ranks_compared() -> None:
    app = app_of("flight_recorder/skip", 3)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "less_than_sign less_than_sign")
        assert "operation #5" in screen_text(app)
        await press(app, pilot, "greater_than_sign")
        assert "operation #6" in screen_text(app)
        await press(app, pilot, "greater_than_sign greater_than_sign")
        assert "operation #7" in screen_text(app)
        await press(app, pilot, "n d")
        assert "ranks 0 and 2 at #7" in screen_text(app)
        await press(app, pilot, "n")
        assert app.pane.body.cursor == 2
        await press(app, pilot, "escape enter")
        assert app.pane.number == 6


def test_the_pinned_rank_is_compared_first_then_a_usual_one() -> None:
    def lane(*codes: int) -> Lane:
        row = np.zeros((len(codes), 1), np.int64)
        return Lane(group=0, members=tuple(range(len(codes))), first_seq=7, row=row, signature=np.array(codes)[:, None],
                    codes=np.arange(6), last=row[:, 0], done=row[:, 0] > 0, pending=row[:, 0],
                    is_silent=row[:, 0] > 0)  # fmt: skip

    assert rank_to_compare(lane(3, 5, 5), 7, rank=0, pinned=None) == 1
    assert rank_to_compare(lane(3, 5, 5), 7, rank=1, pinned=0) == 0
    assert rank_to_compare(lane(5, -1), 7, rank=0, pinned=None) == 1  # of two ranks, the one that issued nothing
    assert rank_to_compare(lane(5), 7, rank=0, pinned=None) is None


async def test_a_heading_above_the_first_line_stays_in_sight() -> None:
    app = app_of("flight_recorder/skip", 3)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "G g j k j")
        assert "operation, call site" in screen_text(app)
        await press(app, pilot, "G pageup pageup pageup j")
        assert "operation, call site" in screen_text(app)


async def test_logs_go_to_a_time_and_keep_their_place_under_a_filter() -> None:
    app = app_of("flight_recorder/skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await fill(app, pilot, "t", "02:07:12")
        assert "02:07:12.090" in app.pane.copied_text()
        await fill(app, pilot, "slash", "1,3")
        assert "02:07:12.134" in app.pane.copied_text()
        await press(app, pilot, "escape")
        assert "02:07:12.134" in app.pane.copied_text()
        await fill(app, pilot, "t", "noon")
        assert "'noon' is not a time" in screen_text(app)
        await fill(app, pilot, "slash", "0-2 error gloo")
        assert isinstance(app.pane.body.rows, LogRows)
        assert {app.pane.body.rows.line(i).rank for i in range(len(app.pane.body.rows))} == {0, 1, 2}
        await fill(app, pilot, "slash", "there is no such line")
        assert "0 of 176 lines" in screen_text(app)


async def test_groups_and_waits_lead_on() -> None:
    app = app_of("flight_recorder/chain", 4)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert "rank 1 behind by 1" in screen_text(app)
        await press(app, pilot, "j enter")
        assert app.pane.number == 2
        assert "group tp1 (2 of 2)" in screen_text(app)
        await press(app, pilot, "6 n")
        assert "culprit" in app.pane.copied_text()
        await press(app, pilot, "enter")
        assert app.pane.number == 3


async def test_following_shows_on_the_status_line_and_stops() -> None:
    app = app_of("flight_recorder/skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "f")
        assert is_following(app)
        assert app.pane.body.cursor == 175
        assert "[following: new data every 2 s]" in screen_text(app)
        await press(app, pilot, "f")
        assert not is_following(app)
        assert "not following" in screen_text(app)


async def test_a_key_of_the_bottom_line_is_clickable_all_over() -> None:
    app = app_of("flight_recorder/skip", 5)
    async with app.run_test(size=(120, 24)) as pilot:
        await settled(app, pilot)
        line = screen_text(app).splitlines()[-1]
        await pilot.click("#status", offset=(line.index("fold equal lines") + len("fold equal lines") - 1, 0))
        await settled(app, pilot)
        assert "folded" in screen_text(app)


@pytest.mark.parametrize(("case", "screen", "absent"), [
    ("golden/v1", 2, "zoom"), ("golden/v1", 5, "fold"), ("flight_recorder/skip", 7, "verify"),
    ("flight_recorder/skip", 8, "smooth"), ("flight_recorder/skip", 1, "incidents"),
])  # fmt: skip
async def test_the_bottom_line_names_no_key_that_does_nothing(case: str, screen: int, absent: str) -> None:
    """Where there is nothing to act on: the help still names every key."""
    app = app_of(case, screen)
    async with app.run_test(size=(140, 24)) as pilot:
        await settled(app, pilot)
        line = screen_text(app).splitlines()[-1]
        assert "? help" in line
        assert absent not in line
