"""A job that goes on is drawn as one: nobody is absent, held up or accused. What a folder of runs says of jobs that do not."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from tests.tui.test_story import NOW_S, live
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import RankLog, Verdict
from titan_ckpt.errors import UsageError
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.grid import ABSENT
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.run_folders import LastRecord, Runs, RunSummary
from titan_ckpt.tui.data.standing import standing
from titan_ckpt.tui.export import export_report
from titan_ckpt.tui.pictures.details import rank_rows
from titan_ckpt.tui.pictures.run_list import run_rows
from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.screens.grid_rows import grid_of
from titan_ckpt.tui.screens.groups import group_rows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.session import judged_runs
from tools.paths import DATA, INCIDENTS

RUNNING = Verdict(verdict=VerdictKind.RUNNING, confidence=0.5)


@pytest.fixture(scope="module")
def skip() -> Incident:
    return load_incident(str(INCIDENTS / "skip"))


def test_in_a_running_job_no_operation_is_left_out() -> None:
    late = load_incident(str(INCIDENTS / "dataloader"))
    lane, going_on = late.lanes[0], live(late, RUNNING)
    [culprit] = late.top.culprits
    assert (grid_of(late, lane).codes == ABSENT).any()
    assert not (grid_of(going_on, lane).codes == ABSENT).any()
    behind = [span for line in group_rows(going_on, 100) for span in line.spans if "behind" in span[0]]
    assert [role for _, role in behind] == [Role.PLAIN]
    assert not any(line.is_problem for line in group_rows(going_on, 100))
    names = [line.text.split("  ")[0] for line in rank_rows(going_on, culprit, 60)]
    assert "awaited by" in " ".join(names)
    assert "holds up" not in " ".join(names)


def test_one_look_at_a_live_job_marks_nobody(skip: Incident, tmp_path: Path) -> None:
    first = live(skip).confirmed_by(None)
    assert first.top.culprits == ()
    assert not any("!" in line.text for line in group_rows(first, 100))
    with pytest.raises(UsageError, match="one look"):
        export_report(first, NOW_S, str(tmp_path / "report.md"))
    assert live(skip).confirmed_by(first).top.culprits == (2,)


def test_a_step_that_only_the_logs_tell_is_shown(skip: Incident) -> None:
    """A recorder that no program tells of steps has step -1."""
    going_on = live(skip, RUNNING)
    ranks = {
        rank: replace(
            record, heartbeat=replace(record.heartbeat, step=-1), log=RankLog(source="rank.log", last_step=40 + rank)
        )
        for rank, record in going_on.run.ranks.items()
        if record.heartbeat is not None
    }
    told = replace(going_on, run=replace(going_on.run, ranks=ranks))
    assert standing(told, NOW_S).facts[0] == "last logged step 43"
    untold = {rank: replace(record, log=None) for rank, record in ranks.items()}
    untold_run = replace(going_on, run=replace(going_on.run, ranks=untold))
    assert standing(untold_run, NOW_S).facts[0] == "4 of 4 ranks alive"


# ---------------------------------------------------------------------------------------------- folders of runs


def test_columns_go_where_the_terminal_is_narrow() -> None:
    run = RunSummary(
        name="a-run-with-a-long-name", url="/runs/a", last=LastRecord(step=60, loss=2.5, time_s=NOW_S - 30)
    )
    lines = {width: [line.text for line in run_rows(Runs(found=(run,)), NOW_S, width)] for width in (140, 76, 36)}
    assert lines[140][0].split() == ["run", "state", "step", "loss", "whole", "size", "age", "mesh"]
    assert lines[76][0].split() == ["run", "state", "step", "loss", "whole", "size", "age"]
    assert lines[36][0].split() == ["run", "state", "step"]
    for width, found in lines.items():
        assert max(map(len, found)) <= width
    assert "30.0 s" in lines[76][1]


def unwhole(folder: Path) -> Path:
    """A run none of whose steps is whole: one commit is no JSON, one is cut, one step has none."""
    shutil.copytree(DATA / "run", folder, ignore=shutil.ignore_patterns("step-00000020"))
    (folder / "step-00000040" / "COMMIT.json").write_text("{")
    return folder


async def test_that_no_step_can_be_resumed_from_is_said(tmp_path: Path) -> None:
    folder = unwhole(tmp_path / "runs" / "broken")
    said = "no step can be resumed from"
    app = TitanApp(find_content(str(folder)), clock=lambda: NOW_S)
    async with app.run_test(size=(200, 30)) as pilot:
        await settled(app, pilot)
        assert said in screen_text(app).splitlines()[1], "the bar"
        await press(app, pilot, "1")
        assert f"2 steps not usable: 40,60; not committed: 80; {said}" in screen_text(app)
    app = TitanApp(find_content(str(tmp_path / "runs")), clock=lambda: NOW_S)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        assert f"(and 1 more damaged step); {said}" in " ".join(screen_text(app).split())


async def test_damage_has_a_bar_without_an_incident_too(tmp_path: Path) -> None:
    folder = unwhole(tmp_path / "broken")
    shutil.rmtree(folder / "debug")
    shutil.rmtree(folder / "logs")
    app = TitanApp(find_content(str(folder)), clock=lambda: NOW_S, first_screen=1)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        assert screen_text(app).splitlines()[1].split(" · ")[:2] == [" CHECKPOINTS", "2 damaged steps"]
        await pilot.click("#verdict")
        await settled(app, pilot)
        assert app.pane.number == 7


def test_a_running_job_whose_processes_are_gone_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its metrics it runs for five more minutes."""
    folder = tmp_path / "runs" / "one"
    shutil.copytree(DATA / "run", folder)
    [place] = (folder / "debug").iterdir()
    for path in place.glob("*.sidecar.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": socket.gethostname(), "pid": os.getpid()}))
    last = LastRecord(step=60, time_s=NOW_S - 10)
    listed = Runs(found=(RunSummary(name="one", url=str(folder), last=last),))
    fault = replace(load_incident(str(INCIDENTS / "skip")), is_unconfirmed=False)
    monkeypatch.setattr(judged_runs, "load_incident", lambda *_, **__: fault)
    [text] = judged_runs.find_verdicts(listed, NOW_S, ()).values()
    assert text.startswith("SKIPPED_COLLECTIVE: ")
    shown = [*run_rows(listed.with_verdicts({listed.found[0].key: text}), NOW_S, 120)]
    assert "stopped" in shown[1].text
    for path in place.glob("*.sidecar.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
    assert judged_runs.find_verdicts(listed, NOW_S, ()) == {}, "its ranks are on another machine"
