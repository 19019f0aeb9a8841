"""What the kernel says of a live job's ranks, and what a new look leaves as it was."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tui.test_story import NOW_S, live
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.debug.live import kernel_states
from titan_ckpt.debug.live.processes import Process
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.standing import alarms_now, may_go_on, ticking
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


@pytest.fixture(scope="module")
def skip() -> Incident:
    return load_incident(str(INCIDENTS / "skip"))


def test_a_stopped_process_of_this_machine_is_known(skip: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    run = live(skip).run
    pids = {rank: record.pid or 0 for rank, record in run.ranks.items()}
    found = [
        Process(rank=1, pid=pids[1], stem="", state="T (stopped)"),
        Process(rank=2, pid=pids[2], stem="", state="t (tracing stop)"),
        Process(rank=3, pid=pids[3] + 1, stem="", state="T (stopped)"),
    ]
    monkeypatch.setattr(kernel_states, "find_processes", lambda _: found)
    monkeypatch.setattr("socket.gethostname", lambda: run.ranks[1].host)
    seen = kernel_states.with_kernel_states(run, "/nowhere", NOW_S)
    assert {rank: record.process_state for rank, record in seen.ranks.items() if record.process_state} == {
        1: "T (stopped)"
    }
    assert kernel_states.with_kernel_states(run, "s3://bucket/run", NOW_S) is run
    assert kernel_states.with_kernel_states(run, "/nowhere", NOW_S + 3600) is run
    assert kernel_states.with_kernel_states(skip.run, "/nowhere", NOW_S) is skip.run


def test_killed_ranks_of_this_machine_are_not_alive(skip: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their heartbeats are of the last seconds: only the kernel knows. One in another container, not seen here, ticks on."""
    run = live(skip).run
    run = replace(run, ranks={rank: replace(record, log=None) for rank, record in run.ranks.items()})
    gone = [Process(rank=rank, pid=record.pid or 0, stem="", state="gone") for rank, record in run.ranks.items()]
    monkeypatch.setattr("socket.gethostname", lambda: run.ranks[1].host)
    now_s = NOW_S + 5
    for killed in (gone[1:2], gone):
        monkeypatch.setattr(kernel_states, "find_processes", lambda _, killed=killed: killed)
        seen = replace(
            skip, run=kernel_states.with_kernel_states(run, "/nowhere", now_s), last_sign_ns=int(NOW_S * 1e9)
        )
        assert len(ticking(seen, now_s)) == len(run.ranks) - len(killed)
        assert may_go_on(seen, now_s) == (len(killed) < len(run.ranks))
        assert seen.doing(gone[1].rank).startswith("was ")
        assert [(alarm.kind, alarm.ranks) for alarm in alarms_now(seen, now_s)] == [
            ("GONE", tuple(process.rank for process in killed))
        ]
        assert len(ticking(replace(skip, run=kernel_states.with_kernel_states(run, "/nowhere", NOW_S)), NOW_S)) == 4


def test_a_collected_copy_shows_the_job_as_it_was(
    skip: Incident, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody maps its black boxes, whether the job lives or not; the folder of the job itself goes on after a collection."""
    run = live(skip).run
    gone = [Process(rank=rank, pid=record.pid or 0, stem="", state="gone") for rank, record in run.ranks.items()]
    monkeypatch.setattr(kernel_states, "find_processes", lambda _: gone)
    monkeypatch.setattr("socket.gethostname", lambda: run.ranks[1].host)
    noted = tmp_path / "processes.node1.json"
    noted.touch()
    for later_s, num_gone in ((-60, len(run.ranks)), (1, 0)):
        os.utime(noted, (NOW_S + later_s, NOW_S + later_s))
        seen = kernel_states.with_kernel_states(run, str(tmp_path), NOW_S + 5)
        assert sum(record.is_gone for record in seen.ranks.values()) == num_gone


def test_a_stopped_rank_is_there_and_said_to_be_stopped(skip: Incident) -> None:
    """Also when its recorder has been silent for a while: it may go on at once."""
    held = live(skip)
    ranks = {**held.run.ranks, 1: replace(held.run.ranks[1], process_state="T (stopped)")}
    seen, now_s = replace(held, run=replace(held.run, ranks=ranks)), NOW_S + 45
    assert len(ticking(seen, now_s)) == 1
    assert [(alarm.kind, alarm.ranks) for alarm in alarms_now(seen, now_s)] == [
        ("STOPPED", (1,)),
        ("SILENT", (0, 2, 3)),
    ]
    assert ticking(seen, NOW_S + 3600) == []


async def test_a_group_that_is_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one size may change places from look to look, and calm verdicts do."""
    source = DATA / "injected" / "subset_groups"
    found = load_incident(str(source))
    calm = [live(found, Verdict(verdict=kind)) for kind in (VerdictKind.RUNNING, VerdictKind.HEALTHY)]
    looks = [calm[0], replace(calm[1], lanes=calm[1].lanes[::-1])]
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: looks.pop(0))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app = TitanApp(find_content(str(source)), clock=lambda: NOW_S)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        app.session.lane, app.session.seq = 0, 1
        assert app.session.incident.value is not None
        name = app.session.incident.value.names[0]
        app._loader._load_incident(app.session.content)
        await settled(app, pilot)
        assert (app.session.incident.value.names[app.session.lane], app.session.seq) == (name, 1)


async def test_a_job_whose_ranks_are_gone_is_judged_anew(skip: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher may still have to write how they ended."""
    run = live(skip).run
    gone = replace(run, ranks={rank: replace(record, is_gone=True) for rank, record in run.ranks.items()})
    looks = [replace(skip, run=gone), replace(skip, run=gone), skip]
    monkeypatch.setattr("titan_ckpt.tui.session.loading.load_incident", lambda *_, **__: looks.pop(0))
    monkeypatch.setattr("titan_ckpt.tui.app.FOLLOW_S", 1e9)
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S + 5)
    async with app.run_test(size=(100, 30)) as pilot:
        for left in (2, 1, 0, 0):
            await settled(app, pilot)
            assert len(looks) == left
            app._loader._not_before_s = 0.0
            app._loader.judge_if_rested()
            await pilot.pause()
