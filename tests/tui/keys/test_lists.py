"""Lists and their lines: where `g` goes, what fits beside wide characters, what a wrapped line never cuts, in which order."""

from __future__ import annotations

import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content, opened
from titan_ckpt.tui.data.grid import in_order
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.data.runs import load_steps
from titan_ckpt.tui.pictures.saves import save_rows
from titan_ckpt.tui.rows import Role, wrapped
from titan_ckpt.tui.screens.incidents import Judged, incident_rows
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        shutil.copytree(DATA / "run", tmp_path / "runs" / name)
    return tmp_path / "runs"


async def test_g_in_a_list_goes_to_the_first_line_that_opens(runs: Path) -> None:
    app = TitanApp(find_content(str(runs)))
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        first = app.pane.copied_text()
        await press(app, pilot, "G g")
        assert app.pane.copied_text() == first
        assert app.pane.body.cursor == 1


async def test_the_curves_of_a_folder_of_runs_lead_to_its_list(runs: Path) -> None:
    app = TitanApp(find_content(str(runs)), first_screen=8)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        assert "a folder of runs: press enter to list them" in screen_text(app)
        await press(app, pilot, "enter")
        assert app.pane.number == 7


@pytest.mark.parametrize("width", [34, 76, 116])
def test_incidents_stand_in_columns_beside_wide_characters(width: int) -> None:
    names = ("20261127T200344Z", "ünï 日本語", "日本" * 20, "")
    judged = dict.fromkeys(names, Judged(text="why", role=Role.BAD, kind="STARTED_NOT_COMPLETED", confidence="60%"))
    lines = [each.text for each in incident_rows(names, names[0], judged, width)]
    places = {cell_len(line[: line.index("STARTED_NOT_COMPLETED")]) for line in lines[1:]}
    assert len(places) == 1
    assert places.pop() + len("STARTED_NOT_COMPLETED") <= width


@pytest.mark.parametrize("width", range(16, 40))
def test_a_wrapped_line_never_cuts_a_number(width: int) -> None:
    text = "rank 1 at /srv/a_long_folder/of_the/project/cases.py:30512 waits since 1,234.5 s"
    numbers = [number for line in wrapped(text, width) for number in re.findall(r"\d[\d.,]*", line)]
    assert numbers == ["1", "30512", "1,234.5"]


def test_groups_of_one_name_are_in_the_order_of_their_ranks() -> None:
    incident = load_incident(str(DATA / "injected" / "subset_groups"))
    lanes = [replace(incident.lanes[0], members=members) for members in ((4, 5), (0, 1), (10, 11), (2, 3))]
    assert [lane.members[0] for lane in in_order(incident.run, lanes)] == [0, 2, 4, 10]


def test_a_save_within_a_second_of_the_last_is_not_left_blank() -> None:
    found = load_steps(find_content(str(DATA / "run")).store)
    at_once = [
        replace(step, copies=tuple(replace(copy, written_s=5.0) for copy in step.copies)) for step in found.steps
    ]
    texts = [line.text for line in save_rows(replace(found, steps=tuple(at_once)), None, 80)]
    assert any("under 1 s" in text for text in texts)


async def test_an_archive_is_shown_by_its_own_path(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "skip.tgz", "w:gz") as archive:
        archive.add(INCIDENTS / "skip", arcname="skip")
    with opened(str(tmp_path / "skip.tgz")) as content:
        app = TitanApp(content)
        async with app.run_test(size=(200, 30)) as pilot:
            await settled(app, pilot)
            assert app.pane.title().startswith(f"{tmp_path}/skip.tgz · ")
            app._loader.reload()
            await settled(app, pilot)
            assert app.pane.title().startswith(f"{tmp_path}/skip.tgz · ")


async def test_an_incident_beside_runs_is_listed_judged_and_opened(tmp_path: Path) -> None:
    shutil.copytree(DATA / "run", tmp_path / "run")
    shutil.copytree(INCIDENTS / "skip", tmp_path / "night")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.txt").write_text("nothing of a job\n")
    app = TitanApp(find_content(str(tmp_path)))
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        shown = screen_text(app)
        assert "1 run · 1 incident" in shown
        assert "night  incident" in shown
        assert "SKIPPED_COLLECTIVE" in shown
        assert "notes" not in shown
        rows = app.pane.body.rows
        place = next(i for i in range(len(rows)) if rows.row(i, 90).text.startswith("night"))
        app.pane.body.move_to(place)
        await press(app, pilot, "enter")
        assert "SKIPPED_COLLECTIVE · rank" in screen_text(app)
