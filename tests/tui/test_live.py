"""A running job on the first screen, and a run that changes while it is shown."""

from __future__ import annotations

import doctest
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.incident.records import Exit, Heartbeat
from titan_ckpt.errors import StoreError
from titan_ckpt.tui import rows
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.screens import log_rows
from titan_ckpt.tui.screens.log_rows import shortened
from titan_ckpt.tui.screens.overview import live_rows
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS

NOW_S = 1_795_250_000.0


def test_the_examples_of_rows_hold() -> None:
    assert doctest.testmod(rows).failed == doctest.testmod(log_rows).failed == 0


@pytest.fixture(scope="module")
def finished() -> Incident:
    return load_incident(str(DATA / "run"))


def lines_of(
    incident: Incident, ages_s: Sequence[float], *, steps: Sequence[int] = (7, 7, 7, 7), stopped: bool = False
) -> list[str]:
    """First lines of the overview with heartbeats of these ages."""
    records = incident.run.ranks
    beats = [
        Heartbeat(step=step, phase="forward", phase_ns=int((NOW_S - age) * 1e9), alive_ns=int((NOW_S - age) * 1e9),
                  source="", is_stopped=stopped)
        for step, age in zip(steps, ages_s, strict=True)
    ]  # fmt: skip
    ranks = {rank: replace(records[rank], heartbeat=beats[rank]) for rank in records}
    live = replace(incident, run=replace(incident.run, ranks=ranks))
    return [row.text for row in live_rows(live, NOW_S, 78)]


def test_a_running_job_is_shown_as_running_without_a_verdict(finished: Incident) -> None:
    assert lines_of(finished, (0, 1, 2, 3)) == [
        "RUNNING   step 7 (forward) · 4 of 4 ranks alive",
        "no fault so far; press f to follow the job",
    ]


def test_who_follows_is_not_told_to_follow(finished: Incident) -> None:
    beat = Heartbeat(step=7, phase="forward", phase_ns=int(NOW_S * 1e9), alive_ns=int(NOW_S * 1e9), source="")
    ranks = {rank: replace(record, heartbeat=beat) for rank, record in finished.run.ranks.items()}
    live = replace(finished, run=replace(finished.run, ranks=ranks))
    assert "press f" not in " ".join(row.text for row in live_rows(live, NOW_S, 78, is_following=True))


async def test_the_bar_of_a_live_job_says_when_it_was_looked_at(
    finished: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to who does not follow: what was seen of the job is never shown as what it does now."""
    beat = Heartbeat(step=7, phase="forward", phase_ns=int(NOW_S * 1e9), alive_ns=int(NOW_S * 1e9), source="")
    ranks = {rank: replace(record, heartbeat=beat) for rank, record in finished.run.ranks.items()}
    live = replace(finished, run=replace(finished.run, ranks=ranks))
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: live)
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)  # another look would begin its age anew
    now = [NOW_S]
    app = TitanApp(find_content(str(DATA / "run")), clock=lambda: now[0])
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        for later_s, age in ((0, "looked 0 s ago"), (20, "looked 20 s ago"), (70, "looked 1 min ago")):
            now[0] += later_s
            app._paint_bars()
            await settled(app, pilot)
            bar = screen_text(app).splitlines()[1]
            assert bar.split()[0] == "RUNNING"
            assert age in bar


def test_a_silent_rank_raises_an_alarm_in_a_running_job(finished: Incident) -> None:
    first, alarm, *_ = lines_of(finished, (0, 1, 2, 100))
    assert "3 of 4 ranks alive" in first
    assert alarm.startswith("SILENT: rank 3 silent for 1 min 40 s")


def test_a_job_that_ended_or_is_gone_is_not_running(finished: Incident) -> None:
    assert lines_of(finished, (0, 0, 0, 0), stopped=True) == []
    assert lines_of(finished, (3600, 3600, 3600, 3600)) == []


def test_a_job_whose_ranks_were_killed_just_now_is_not_running(finished: Incident) -> None:
    """The recorder of a killed process writes no end; the launcher's log has its exit code."""
    killed = {
        rank: replace(record, exit=Exit(rank=rank, code=-9, source="launcher.log"))
        for rank, record in finished.run.ranks.items()
    }
    assert lines_of(replace(finished, run=replace(finished.run, ranks=killed)), (0, 0, 0, 0)) == []


def test_only_lines_of_our_trainer_are_shortened_when_narrow() -> None:
    ours = "2026-11-21 07:46:55,442 WARNING [rank 0 dp_shard0 tp0] titan_ckpt.trainer.job.loop: step 3: slow"
    assert shortened(ours, 78) == "07:46:55,442 WARNING loop: step 3: slow"
    assert shortened(ours, 138) == ours
    for other in ("2026-11-21 02:07:01.495 [rank3] INFO step 0 start", "[W1121 11:09:46.106 x.cpp:113] [c10d] y", ""):
        assert shortened(other, 78) == other


async def test_copying_a_shortened_line_copies_all_of_it() -> None:
    app = TitanApp(find_content(str(DATA / "run")), first_screen=5)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "g y")
        assert app.clipboard.startswith("2026-11-21 07:46:55,440 INFO [rank 2 dp_shard1 tp0] titan_ckpt.trainer.")
        assert "07:46:55,440 INFO setup: " in screen_text(app)


@pytest.mark.parametrize(
    ("source", "keys", "copied"),
    [
        (
            INCIDENTS / "skip",
            "j j j y",
            "rank 2 skipped all_reduce #7 of group default_pg: it issued broadcast while",
        ),
        (DATA / "run", "7 j y", "step-00000080 is not committed: it has no COMMIT.json"),
    ],
    ids=["wrapped", "indented"],
)
async def test_copying_a_wrapped_line_copies_all_of_it(source: Path, keys: str, copied: str) -> None:
    app = TitanApp(find_content(str(source)))
    async with app.run_test(size=(40, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, keys)
        assert app.clipboard.startswith(copied)


async def visit(app: TitanApp, pilot: Pilot[None]) -> None:
    """Visit all screens."""
    for number in "12345678":
        await press(app, pilot, f"{number} G n g")


async def test_a_run_that_changes_and_vanishes_never_ends_the_program(
    tmp_path: Path,
) -> None:
    """Logs grow and shrink, metrics end in half a line, steps come and go, dumps are damaged, the folder is deleted."""
    source, run = DATA / "run", tmp_path / "run"
    shutil.copytree(source, run)
    app, chance = TitanApp(find_content(str(run))), random.Random(1)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "f")
        for turn in range(4):
            with (run / "logs" / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"event": "step", "step": 61 + turn, "loss": 1.0})[: chance.randrange(5, 60)])
            log = run / "logs" / "rank_00001.log"
            log.write_bytes(log.read_bytes()[: chance.randrange(1, 4000)] + b"\xff\x00 no line end")
            box = run / "debug" / "20261121T074655Z" / f"rank_0000{turn % 4}.box.zst"
            box.write_bytes(box.read_bytes()[: chance.randrange(0, 200)])
            shutil.copytree(run / "step-00000040", run / f"step-000001{turn}0", dirs_exist_ok=True)
            shutil.rmtree(run / "step-00000020", ignore_errors=True)
            app._follow()
            await visit(app, pilot)
        shutil.rmtree(run)
        app._follow()
        await visit(app, pilot)
        assert app.return_code is None


def test_an_unreadable_folder_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "private"))

    (tmp_path / "a.log").write_text("x")
    monkeypatch.setattr("titan_ckpt.tui.data.content.evidence_files", refuse)
    with pytest.raises(StoreError, match=r"Permission denied .*private.*; open a folder"):
        find_content(str(tmp_path))


async def test_what_ends_while_the_program_ends_is_not_shown(tmp_path: Path) -> None:
    """The folder of a followed run is gone, the program is closed, and only then the look ends."""
    shutil.copytree(DATA / "run", tmp_path / "run")
    app = TitanApp(find_content(str(tmp_path / "run")))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await app.screen.query("*").remove()
        app.show_status("not reloaded: it is gone")
        assert not app.query("Prompt")
