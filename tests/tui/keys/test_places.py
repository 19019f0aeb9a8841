"""Places that a click, a zoom or a typed name leads to."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from textual import events

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.incident.records import Heartbeat
from titan_ckpt.tui import tasks
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.screens.training import TrainingPane
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
    """And never moved off what was recorded."""
    app = TitanApp(find_content(str(INCIDENTS / "straggler")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        seen = []
        for keys in ("", "t", "plus", "less_than_sign"):
            await settled(app, pilot)
            await press(app, pilot, keys)
            seen.append(screen_text(app))
        assert len(set(seen)) == len(seen)
        ticks = re.findall(r"\+([\d.]+) s", seen[1].splitlines()[3])
        steps = [round(float(b) - float(a), 1) for a, b in itertools.pairwise(ticks)]
        assert len(set(steps)) <= 2
        assert max(steps) - min(steps) <= 0.11, "equal distances, but for the last digit"
        for keys, end in (("minus minus minus", 1), ("less_than_sign " * 9, 1), ("greater_than_sign " * 9, 1)):
            await press(app, pilot, keys)
            assert screen_text(app) == seen[end]
        await press(app, pilot, "plus plus " + "greater_than_sign " * 20)
        assert "═" in screen_text(app).splitlines()[5]


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


async def test_ctrl_c_asks_also_after_a_double_click() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await pilot.double_click(app.pane.body, offset=(22, 1))
        await settled(app, pilot)
        await press(app, pilot, "ctrl+c")
        assert "press ctrl+c again to quit" in screen_text(app)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-21 02:07:11", "dumped flight recorder"),
        ("2026-11-21 02:07:11 UTC", "dumped flight recorder"),
        ("25:61", "'25:61' is no rank, operation, step, host or time"),
        ("99:99:99", "'99:99:99' is no rank, operation, step, host or time"),
    ],
)
async def test_a_time_is_gone_to_as_the_screens_write_it(text: str, shown: str) -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        app.go_to(text)
        await settled(app, pilot)
        assert shown in (app.pane.text_to_copy() if shown.startswith("dumped") else screen_text(app))


async def test_a_host_is_found_by_its_name_and_the_word() -> None:
    app = TitanApp(find_content(str(DATA / "injected" / "p2p_size")), clock=lambda: 1.8e9)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        app.go_to("host n0")
        await settled(app, pilot)
        assert app.pane.number == 6


async def test_the_line_of_the_fault_is_shown_and_edited() -> None:
    """The sender of a wrong size went on to a barrier; the cursor is on its send, the fifth."""
    app = TitanApp(find_content(str(DATA / "injected" / "p2p_size")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        text = screen_text(app)
        assert "v 5th" in text
        assert "fault at" in text
        assert app.pane.place_to_edit() == ("/srv/train/titan_ckpt/debug/faults.py", 269)


@pytest.mark.parametrize("case", ["sigstop", "dataloader"])
async def test_a_group_of_a_stuck_rank_names_it(case: str) -> None:
    app = TitanApp(find_content(str(INCIDENTS / case)), clock=lambda: 1.8e9, first_screen=4)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        (line,) = [line for line in screen_text(app).splitlines() if "default_pg 0-3" in line]
        assert f"rank {1 if case == 'sigstop' else 3}" in line


async def test_all_lines_of_a_paste_are_taken() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=5)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "slash")
        app.post_message(events.Paste("step 2\nq\n"))
        await settled(app, pilot)
        assert app.prompt.value == "step 2 q"


async def test_a_live_job_is_judged_anew_without_following(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording whose recorders wrote a second ago may go on; an old one is looked at once."""
    found = load_incident(str(DATA / "run"))
    for age_s, is_live in ((1.0, True), (4000.0, False)):
        looks: list[float] = []
        now_s = time.time()
        beat = Heartbeat(step=7, phase="", phase_ns=0, alive_ns=int((now_s - age_s) * 1e9), source="")
        ranks = {rank: replace(record, heartbeat=beat, exit=None) for rank, record in found.run.ranks.items()}
        live = replace(found, run=replace(found.run, ranks=ranks))

        def look(*_: object, live: Incident = live, looks: list[float] = looks, **__: object) -> Incident:
            looks.append(time.time())
            return live

        monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", look)
        app = TitanApp(find_content(str(DATA / "run")), clock=partial(float, now_s))
        async with app.run_test(size=(100, 30)) as pilot:
            await settled(app, pilot)
            await asyncio.sleep(4.5)
            assert (len(looks) > 2) == is_live


async def test_a_smoothed_value_is_called_so() -> None:
    app = TitanApp(find_content(str(DATA / "run")), clock=lambda: 1.8e9, first_screen=8)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert "smoothed" not in screen_text(app)
        await press(app, pilot, "s")
        assert re.search(r"loss +newest [\d.]+, smoothed", screen_text(app))


async def test_a_run_beside_this_one_is_drawn_by_its_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(DATA / "run", tmp_path / name)
    app = TitanApp(find_content(str(tmp_path / "a")), clock=lambda: 1.8e9, first_screen=8)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "o b enter")
        await settled(app, pilot)
        assert app.query_one(TrainingPane)._other is not None


async def test_what_stands_in_place_of_data_is_not_copied() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9, first_screen=2)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "y")
        copied = app.clipboard
        assert copied == "group default_pg #7: rank 2 differs"
        app.session.incident.value, app.session.incident.is_loading = None, True
        app.pane.update_rows(force=True)
        await pilot.press("y")
        assert "reading dumps, stacks or logs" in screen_text(app)
        assert "nothing to copy" in screen_text(app)
        assert app.clipboard == copied
