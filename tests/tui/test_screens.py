"""The screens on real incidents and runs, headless: what each shows, and that every key is safe."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.screen_pictures import screen_text
from titan_ckpt.debug.incident.records import Heartbeat
from titan_ckpt.errors import NotFoundError
from titan_ckpt.saving.saver import Saver
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import first_error, load_incident
from titan_ckpt.tui.data.logs.filter import parse_filter
from titan_ckpt.tui.rows import RowLink
from titan_ckpt.tui.screens.checkpoint_rows import saving_rows
from titan_ckpt.tui.screens.grid import GridPane
from titan_ckpt.tui.screenshot import settled
from tools.paths import INCIDENTS

SIZES = [(80, 24), (140, 45)]
FILTERS = [
    ("2", "[rank2]", "[rank1]"),
    ("level error", "Error", "step 0 start"),
    ("overflow", "overflow", "step 0 done"),
    (r"^\S+ \S+ \[rank3\].*start$", "[rank3]", "[rank1]"),
]


def shown(app: TitanApp) -> str:
    """Title, all rows and status line of the current screen."""
    body = app.pane.body
    rows = [body.rows.row(index, body.line_width).text for index in range(len(body.rows))]
    return "\n".join([app.pane.title(), *rows, str(app._status_text)])


async def press(app: TitanApp, pilot: Pilot[None], *keys: str) -> str:
    await pilot.press(*keys)
    await settled(app, pilot)
    return shown(app)


def tap(app: TitanApp, *keys: str) -> None:
    """Press keys without waiting for each to be painted."""
    for key in keys:
        app.simulate_key(key)


@pytest.fixture
def incident() -> TitanApp:
    return TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)


@pytest.fixture
def run(tmp_path: Path) -> TitanApp:
    with Saver(str(tmp_path)) as saver:
        for step in (10, 20):
            saver.save({"model": {"w": torch.full((64, 8), float(step)), "b": torch.zeros(8)}}, step=step)
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "step-00000030" / "x").write_text("begun")
    lines = [{"event": "step", "step": n, "loss": 5 / n, "tokens_per_s": 1000.0 + n} for n in range(1, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{cut\n")
    return TitanApp(find_content(str(tmp_path)), clock=lambda: 1.8e9)


@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_of_an_incident_shows_its_facts(incident: TitanApp, size: tuple[int, int]) -> None:
    async with incident.run_test(size=size) as pilot:
        await settled(incident, pilot)
        overview = shown(incident)
        assert "SKIPPED_COLLECTIVE" in overview
        assert "culprit: rank 2" in overview
        assert "faults.py:122" in overview.replace("\n", "").replace("    ", "")
        assert "#" in await press(incident, pilot, "2")
        assert "broadcast 8 Float" in await press(incident, pilot, "3")
        assert "default_pg" in await press(incident, pilot, "4")
        assert "overflow on this rank" in await press(incident, pilot, "5")
        assert "rank 2" in await press(incident, pilot, "6")
        assert "no checkpoints here" in await press(incident, pilot, "7")
        assert "no metrics.jsonl here" in await press(incident, pilot, "8")


@pytest.mark.repeats
@pytest.mark.parametrize("case", sorted(path.name for path in INCIDENTS.iterdir() if path.is_dir()))
async def test_the_screens_of_every_incident_can_be_painted(case: str) -> None:
    app = TitanApp(find_content(str(INCIDENTS / case)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert await press(app, pilot, *"2346")


@pytest.mark.repeats
async def test_every_key_of_every_screen_is_safe(incident: TitanApp) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        for number in "12345678":
            await pilot.press(number)
            tap(incident, "j", "down", "k", "up", "G", "g", "l", "h", "right", "left", "pagedown", "pageup")
            tap(incident, "n", "N", "space", "y", "[", "]", "+", "-", "<", ">", "t", "t", "o", "c", "escape")
            await pilot.press(number)
            tap(incident, "d", "z", "v", "f", "f")
            await press(incident, pilot, "enter", "escape", "escape", "question_mark", "j", "escape")
        assert incident.return_code is None


async def test_enter_on_the_verdict_leads_to_comparing_two_ranks(incident: TitanApp) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        assert "operation #7" in await press(incident, pilot, "enter")
        assert incident.pane.number == 3
        await press(incident, pilot, "g", "space", "j", "j")
        compared = await press(incident, pilot, "d")
        assert re.search(r"! operation +all_reduce +broadcast", compared)
        assert re.search(r"! call site +faults.py:109 grad_sync +faults.py:122 c_skip", compared)
        await press(incident, pilot, "escape", "escape")
        assert incident.pane.number == 1


async def test_n_steps_through_operations_and_enter_opens_one(incident: TitanApp) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "2", "n")
        pane = incident.pane
        assert isinstance(pane, GridPane)
        while "differs" not in pane.ruler():
            assert "no further problem" not in await press(incident, pilot, "n")
        assert "#7: rank 2 differs" in pane.ruler()
        assert "no further problem to the right" in await press(incident, pilot, "n")
        await press(incident, pilot, "h", "k")
        assert "#6: rank 1 done" in pane.ruler()
        assert "operation #6" in await press(incident, pilot, "enter")
        assert incident.pane.body.current is not None
        assert incident.pane.body.current.link == RowLink(screen=6, rank=1)


async def test_a_mismatch_shows_its_waits_below_the_culprit(incident: TitanApp) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        lines = (await press(incident, pilot, "6")).splitlines()
        assert "3 ranks waited for others, inferred from the verdict" in lines[0]
        assert "rank 2" in lines[1]
        assert "culprit: " in lines[1]
        assert [line.strip()[2:8] for line in lines[2:5]] == ["rank 0", "rank 1", "rank 3"]


async def test_logs_are_filtered_by_rank_level_pattern_and_folded(incident: TitanApp) -> None:
    async with incident.run_test(size=(140, 45)) as pilot:
        await settled(incident, pilot)
        await press(incident, pilot, "5")
        before = len(incident.pane.body.rows)
        assert "x 4 ranks: 0-3" in await press(incident, pilot, "z")
        assert len(incident.pane.body.rows) < before
        await press(incident, pilot, "z")
        for text, expected, other in FILTERS:
            await press(incident, pilot, "slash")
            incident.query_one("#prompt", Input).value = text
            found = await press(incident, pilot, "enter")
            assert expected in found
            assert other not in found
        await press(incident, pilot, "slash")
        incident.query_one("#prompt", Input).value = "(["
        assert "not a regular expression" in await press(incident, pilot, "enter")
        await press(incident, pilot, "escape")
        assert len(incident.pane.body.rows) == before


async def test_the_first_error_is_marked_and_leads_to_its_operation() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "exception")))
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        marked = [line for line in (await press(app, pilot, "5")).splitlines() if "FIRST ERROR" in line]
        assert len(marked) == 1
        assert "tokenizer: bad utf-8" in marked[0]
        await press(app, pilot, "g", "c")
        assert "tokenizer: bad utf-8" in app.pane.copied_text()
        await press(app, pilot, "enter")
        assert app.pane.number == 3
        assert app.session.seq is not None


@pytest.mark.parametrize(
    ("case", "kind"), [("size", None), ("skip", None), ("sigkill", None), ("exception", "exception")]
)
def test_an_error_caused_by_another_rank_is_never_the_first(case: str, kind: str | None) -> None:
    found = first_error(load_incident(str(INCIDENTS / case)))
    assert (found.kind if found is not None else None) == kind


async def test_a_hung_save_is_shown_with_its_ranks() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "ckpt_io")))
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "stuck in checkpoint I/O" in await press(app, pilot, "7")
        found = app.session.incident.value
        assert found is not None
        beats = {rank: Heartbeat(step=3, phase=phase, phase_ns=10**9, alive_ns=3 * 10**9, source="x")
                 for rank, phase in enumerate(("ckpt_upload", "ckpt_commit", "forward", "ckpt_upload"))}  # fmt: skip
        ranks = {rank: replace(record, heartbeat=beats[rank]) for rank, record in found.run.ranks.items()}
        rows = [row.text for row in saving_rows(replace(found, run=replace(found.run, ranks=ranks)))]
        assert "  ckpt_upload  step 3: ranks 0,3, for 2.0 s" in rows
        assert "  elsewhere    rank 2" in rows


async def test_steps_are_listed_opened_verified_compared_and_planned(
    run: TitanApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run.run_test(size=(140, 45)) as pilot:
        await settled(run, pilot)
        listed = await press(run, pilot, "7")
        assert "committed" in listed
        assert "partial" in listed
        await press(run, pilot, "g", "j", "j", "space")  # pin step 20
        await press(run, pilot, "j")  # step 10
        shown_texts: list[str] = []
        monkeypatch.setattr(run, "show_status", shown_texts.append)
        assert "all bytes match what was saved" in await press(run, pilot, "v")
        assert any("(100%)" in text for text in shown_texts)
        await press(run, pilot, "escape")
        await press(run, pilot, "g", "j", "j", "j")
        assert "model.w" in await press(run, pilot, "d")
        await press(run, pilot, "escape", "g", "j", "j", "j")
        assert "64x8" in await press(run, pilot, "enter")
        await press(run, pilot, "g", "j", "enter")
        assert "each cell shows the rank" in shown(run)
        await press(run, pilot, "escape", "escape", "g", "j", "j", "p")
        run.query_one("#prompt", Input).value = "1"
        assert "step-00000010 (committed)" in await press(run, pilot, "enter")
        await press(run, pilot, "escape", "g", "j", "j", "j", "r")
        run.query_one("#prompt", Input).value = "dp_shard=2,nonsense=3"
        assert "unknown mesh axis" in await press(run, pilot, "enter")
        await press(run, pilot, "escape", "g", "j", "j", "j", "r")
        run.query_one("#prompt", Input).value = "dp_shard=2"
        planned = await press(run, pilot, "enter")
        assert "mesh not recorded -> dp_shard=2" in planned or "-> dp_shard=2" in planned
        assert "in 2 files of" in planned


async def test_training_is_plotted_and_damaged_lines_are_counted(run: TitanApp) -> None:
    async with run.run_test(size=(80, 24)) as pilot:
        await settled(run, pilot)
        found = await press(run, pilot, "8")
        assert "loss" in found
        assert "1 damaged line skipped" in found


async def test_the_report_is_exported_and_never_overwrites(incident: TitanApp, tmp_path: Path) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        for expected in ("report written", "not written"):
            await press(incident, pilot, "x")
            incident.query_one("#prompt", Input).value = str(tmp_path / "report.txt")
            assert expected in await press(incident, pilot, "enter")
    assert "SKIPPED_COLLECTIVE" in (tmp_path / "report.txt").read_text()


def test_a_missing_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none: it does not exist; check the path"):
        find_content(str(tmp_path / "none"))


def test_a_filter_is_ranks_or_a_level_or_a_pattern() -> None:
    assert parse_filter("0-2,5").ranks == (0, 1, 2, 5)
    assert parse_filter("warning").level == 2
    assert parse_filter("loss=nan").pattern == "loss=nan"


async def test_damaged_files_are_reported_and_the_rest_is_shown(tmp_path: Path) -> None:
    shutil.copytree(INCIDENTS / "skip", tmp_path / "job" / "debug" / "one")
    (tmp_path / "job" / "debug" / "one" / "rank_1").write_bytes(b"\x80\x04cut")
    (tmp_path / "job" / "debug" / "one" / "rank_1.log.gz").write_bytes(b"not packed at all")
    (tmp_path / "job" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n\x00\x00{"step"\n')
    (tmp_path / "job" / "step-00000007").mkdir()
    (tmp_path / "job" / "step-00000007" / "COMMIT.json").write_text('{"format": ')
    app = TitanApp(find_content(str(tmp_path / "job")))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        assert "1 damaged" in shown(app)
        assert "rank_1.log.gz: damaged" in shown(app)
        assert "COMMIT.json: not JSON" in await press(app, pilot, "7")
        await press(app, pilot, "j", "enter")
        assert "not JSON" in shown(app)
        assert "1 damaged line skipped" in await press(app, pilot, "8")
        assert "1 unreadable" in await press(app, pilot, "5")
        assert "! not readable: debug/one/rank_1.log.gz: damaged" in screen_text(app)


@pytest.mark.parametrize("content", [[], ["notes.md"], ["empty/"]])
def test_a_folder_without_evidence_is_an_error_with_its_files(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("x")
    with pytest.raises(NotFoundError, match=f"contains {content[0]}" if content else "it is empty"):
        find_content(str(tmp_path))


async def test_a_narrow_window_is_painted_too(incident: TitanApp) -> None:
    async with incident.run_test(size=(12, 6)) as pilot:
        await settled(incident, pilot)
        for number in "12345678":
            await press(incident, pilot, number)
        assert incident.return_code is None


async def test_missing_data_is_shown_with_a_hint_where_to_find_it(incident: TitanApp, run: TitanApp) -> None:
    async with incident.run_test(size=(80, 24)) as pilot:
        await settled(incident, pilot)
        assert "save.url" in (await press(incident, pilot, "7")).replace("\n", " ")
        assert "logs/metrics.jsonl" in await press(incident, pilot, "8")
    async with run.run_test(size=(80, 24)) as pilot:
        await settled(run, pilot)
        for number in "12346":
            assert "titan-ckpt debug collect" in (await press(run, pilot, number)).replace("\n", " ")
        assert "rank_00003.log" in await press(run, pilot, "5")
