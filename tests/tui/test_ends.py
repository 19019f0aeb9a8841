"""How a job ended, as the screens show it: slow, failed, killed, told to end; and nothing that was taken after the end."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.debug.incident.kinds import RankState
from titan_ckpt.debug.incident.records import COMPLETED
from titan_ckpt.debug.incident.waits import last_sign_ns, logs_ahead_s
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.bars import VerdictBar
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.grid import BLANK, DONE, ENDED, FAILED, LATE, PENDING
from titan_ckpt.tui.data.incident import diagnosed, load_incident
from titan_ckpt.tui.data.standing import standing
from titan_ckpt.tui.data.timeline import BARS, Window
from titan_ckpt.tui.pictures.details import operation_rows, rank_rows
from titan_ckpt.tui.pictures.timeline import axis, bars_rows
from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.screens.grid_rows import grid_of
from titan_ckpt.tui.screens.groups import group_rows
from titan_ckpt.tui.screens.overview import overview_rows
from titan_ckpt.tui.screens.waits import wait_rows
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.looks import to_ascii
from tools.paths import INCIDENTS

NOW_S, EAST_S = 1_795_250_000.0, 9 * 3600.0


def first_dumps(case: str, folder: Path) -> Path:
    """A recording without its dumps in JSON, which are newer than those in pickle."""
    shutil.copytree(INCIDENTS / case, folder / case, ignore=shutil.ignore_patterns("*.json"))
    return folder / case


async def screens_of(case: str | Path, keys: str, size: tuple[int, int] = (120, 36)) -> dict[str, str]:
    app = TitanApp(find_content(str(INCIDENTS / case)), clock=lambda: NOW_S)
    found = {}
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for key in keys:
            await press(app, pilot, key)
            found[key] = screen_text(app)
        found["role"] = " ".join(app.query_one(VerdictBar).classes)
    return found


async def test_a_slow_job_that_ended_well_does_not_look_hung() -> None:
    found = await screens_of("straggler", "123456")
    assert found.pop("role") == "warn"
    for text in found.values():
        assert (
            "STRAGGLER · rank 1 · slow, not stuck · confidence 90% (recorded) · ended 2026-11-21 02:15:43 UTC" in text
        )
        for word in ("faults.py:278", "stopped 2026", "stuck for", "absent", "begins to wait", "holds up"):
            assert word not in text, (word, text)
    assert "ranks 0,2-3 waited for rank 1" in found["1"]
    assert "operation #23 · 4/4 issued" in found["3"]  # the newest late one that all issued
    assert "1  done            797 ms" in found["3"]
    assert "late by 600 ms at 12 collectives" in found["6"]
    culprit = next(line for line in found["2"].splitlines() if "!    1" in line)
    assert culprit.count("+") >= 12  # as many marks as the verdict counts


def test_the_bars_of_a_slow_job_show_who_waited_for_whom() -> None:
    incident = load_incident(str(INCIDENTS / "straggler"))
    bars = {row.link.rank: row.text for row in bars_rows(incident, 120, 40) if row.link is not None}
    assert [rank for rank, bar in bars.items() if "░" not in bar] == [1]
    waits = [bars[rank].count("░") for rank in (0, 2, 3)]
    assert min(waits) > 60  # the others waited nearly all the time


def test_waits_that_a_recorder_knows_the_end_of_are_bars_too() -> None:
    """All of them are done, 98 % of each was waiting, and a rank that comes last waits for nobody."""
    found = load_incident(str(INCIDENTS / "straggler"))
    [lane] = found.lanes
    last_ns, ranks = found.last_issued_ns[lane.group], {}
    for place, (rank, record) in enumerate(found.run.ranks.items()):
        table = record.operations.copy()
        table["completed_ns"][lane.row[place]] = last_ns + found.clock_offsets(lane)[place].astype(int) + 1_000_000
        table["state"] = COMPLETED
        ranks[rank] = replace(record, operations=table)
    incident = replace(found, run=replace(found.run, ranks=ranks))
    bars = {row.link.rank: row.text for row in bars_rows(incident, 120, 40) if row.link is not None}
    assert "░" not in bars[1]
    assert "━" in bars[1]
    assert min(bars[rank].count("░") for rank in (0, 2, 3)) > 60
    waits = [row.text.strip() for row in wait_rows(incident, 120)]
    assert sum("waited for rank 1 again and again · default_pg" in text for text in waits) == 3


async def test_the_wait_for_a_killed_rank_has_a_column(tmp_path: Path) -> None:
    path = first_dumps("sigkill", tmp_path)
    found = await screens_of(path, "126")
    assert "RANK_DIED · rank 1 · killed by SIGKILL · pid 13564" in found["1"]
    assert "v #7: all_reduce" in found["2"]
    assert "rank 0 waited in all_reduce after #6" in found["6"]
    incident = load_incident(str(path))
    lane = incident.lanes[0]
    texts = [row.text for row in operation_rows(incident, lane, 7, 0, 120)]
    assert texts[1] == "operation  not recorded: seen in the stacks of those that wait in it"


async def test_what_ended_later_has_one_wording_everywhere(tmp_path: Path) -> None:
    path = first_dumps("straggler", tmp_path)
    found = await screens_of(path, "2346")
    assert "rank 0 all_reduce #19 ended" in (await screens_of(path, "6", (40, 12)))["6"]
    assert "e ended since" in found["2"]
    assert "pending" not in "".join(found.values())
    assert "0  #19 ended since  f finished" in found["4"]
    assert "default_pg 0-3         #18     #19  ! rank 1 late" in found["4"]
    assert "behind" not in found["4"]
    assert "f rank 0 all_reduce #19 ended since" in found["6"]
    incident = load_incident(str(path))
    for rows in (rank_rows(incident, 0, 120), operation_rows(incident, incident.lanes[0], 19, 0, 120)):
        assert [row.text for row in rows if "open when recorded, ended since" in row.text]


@pytest.mark.parametrize(
    ("case", "line"),
    [("size", "step 2 done"), ("straggler", "step 11 done"), ("chain", "step 3"), ("sigkill", "about to die"),
     ("dataloader", "step 2 done")],
)  # fmt: skip
async def test_logs_open_at_the_last_line_before_the_stop(case: str, line: str) -> None:
    (chosen,) = [text for text in (await screens_of(case, "5", (160, 36)))["5"].splitlines() if text.startswith("▸")]
    assert f"[rank{3 if case == 'dataloader' else 1}] INFO {line}" in chosen


async def test_the_overview_names_one_step() -> None:
    text = (await screens_of("exception", "1"))["1"]
    assert "step 2" in text
    assert "step 3" not in text


async def test_a_failed_operation_is_not_done() -> None:
    incident = load_incident(str(INCIDENTS / "size"))
    assert {rank: incident.word_of(rank, row) for rank, row in incident.failed.items()} == {3: "failed"}
    assert int(grid_of(incident, incident.lanes[0]).codes[3, -1]) == FAILED
    found = await screens_of("size", "1346")
    assert "3  failed" in found["3"]
    assert "3  #7 failed" in found["4"]
    assert "failed in all_reduce #7" in found["6"]
    assert "killed by SIGABRT: rank 0" in found["1"]
    assert "SIGTERM from the launcher: ranks 1-3" in found["1"]
    assert "code 143" not in "".join(found.values())
    assert "scheduled" not in "".join(found.values())


def test_what_all_completed_did_not_fail(tmp_path: Path) -> None:
    """Ranks 0 and 2 lost their peer in the operation after it, which their recorders do not hold."""
    assert load_incident(str(first_dumps("sigkill", tmp_path))).failed == {}
    assert load_incident(str(INCIDENTS / "sigkill")).failed == {0: 6, 2: 6}


async def test_an_exception_is_shown_by_its_own_calls() -> None:
    found = await screens_of("exception", "136")
    for text in found.values():
        assert "faults.py:285" not in text
        assert "_dump" not in text
    assert "stack of its exception" in found["3"]
    assert "faults.py:280 <module>  [0-3]" in found["3"]
    rows = [row.text for row in rank_rows(load_incident(str(INCIDENTS / "exception")), 0, 80)]
    assert "stack of all_reduce #7, innermost call first" in rows


def test_a_wait_is_at_the_call_site_not_in_a_helper() -> None:
    for case, line in (("exception", "faults.py:112"), ("chain", "faults.py:216")):
        texts = [row.text for row in wait_rows(load_incident(str(INCIDENTS / case)), 160)]
        assert not [text for text in texts if "faults.py:74" in text], texts
        assert [text for text in texts if line in text]


@pytest.mark.parametrize("case", ["chain", "ring", "sigkill", "skip"])
def test_each_rank_that_waits_has_a_bar_of_it(case: str) -> None:
    incident = load_incident(str(INCIDENTS / case))
    waiting = {edge.waiter for edge in incident.edges} - set(incident.top.culprits)
    bars = {row.link.rank: row.text for row in bars_rows(incident, 120, 40) if row.link is not None}
    assert waiting
    assert not [rank for rank in waiting if not {"%", "░"} & set(bars[rank])]


@pytest.mark.parametrize("case", ["chain", "dataloader", "exception", "order", "size", "sigstop", "skip"])
def test_others_wait_from_where_the_last_one_begins(case: str) -> None:
    texts = [row.text for row in bars_rows(load_incident(str(INCIDENTS / case)), 120, 40)]
    (marker,) = [text.index("▼") for text in texts if "▼" in text]
    begins = [re.search("[░%]", text) for text in texts[2:-2]]
    last = max(found.start() for found in begins if found is not None)
    assert 0 <= last - marker <= 1  # after the end of its last operation, where that is all that is recorded


@pytest.mark.parametrize(("case", "rank"), [("size", 0), ("sigkill", 1)])
def test_a_rank_without_a_dump_has_no_blank_bar(case: str, rank: int) -> None:
    rows = bars_rows(load_incident(str(INCIDENTS / case)), 120, 40)
    (bar,) = [row for row in rows if row.link is not None and row.link.rank == rank]
    assert ("unknown ", Role.DIM) in bar.spans


def test_an_unknown_rank_is_not_in_the_culprits_colour() -> None:
    rows = list(group_rows(load_incident(str(INCIDENTS / "size")), 120))
    assert ("! rank 1 differs at #7", Role.BAD) in rows[1].spans
    assert ("rank 0 unknown", Role.WARN) in rows[1].spans


@pytest.mark.parametrize("case", ["sigkill", "sigstop"])
def test_what_to_do_has_the_ready_command(case: str) -> None:
    session = Session(find_content(str(INCIDENTS / case)), clock=lambda: NOW_S)
    session.incident.value = load_incident(str(INCIDENTS / case))
    assert [row.text for row in overview_rows(session, 160) if "3. dmesg -T | grep -iE" in row.text]


def test_the_bar_says_when_and_how_sure() -> None:
    killed = standing(load_incident(str(INCIDENTS / "sigkill")), NOW_S).facts
    assert killed[-2:] == ("confidence 95% (recorded)", "stopped 2026-11-21 02:08:11 UTC")
    stuck = standing(load_incident(str(INCIDENTS / "chain")), NOW_S).facts
    assert "stuck for 26.0 s" in stuck  # by the newest line of a log; the recorders saw 10 ms of it


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (38, "SKIPPED_COLLECTIVE · rank 2 · 95%"),
        (78, "SKIPPED_COLLECTIVE · rank 2 · stuck 14.0 s · faults.py:122 · pid 12838 · 95%"),
        (118, "SKIPPED_COLLECTIVE · rank 2 · stuck for 14.0 s · faults.py:122 · pid 12838 · confidence 95% (recorded)"),
    ],
)
def test_the_bar_has_room_for_how_sure_it_is(width: int, text: str) -> None:
    assert standing(load_incident(str(INCIDENTS / "skip")), NOW_S).text(width) == text


async def test_a_recording_that_has_ended_cannot_be_followed() -> None:
    assert "f follow" not in (await screens_of("size", "1"))["1"]


def test_logs_of_another_time_zone_are_set_to_the_recorders() -> None:
    run = load_incident(str(INCIDENTS / "size")).run
    moved = {}
    for rank, record in run.ranks.items():
        assert record.log is not None
        assert record.log.last_time_s is not None
        steps = {step: time_s + EAST_S for step, time_s in record.log.step_times.items()}
        log = replace(record.log, step_times=steps, last_time_s=record.log.last_time_s + EAST_S)
        moved[rank] = replace(record, log=log)
    there = replace(run, ranks=moved)
    assert logs_ahead_s(there) == EAST_S
    assert last_sign_ns(there) == pytest.approx(last_sign_ns(run), abs=1000)
    assert last_sign_ns(run) / 1e9 == pytest.approx(1_795_226_860.347)


def test_the_ranks_at_fault_come_first_among_the_outliers() -> None:
    """A narrow column cuts what comes last."""
    for case, first in (
        ("skip", "! rank 2 differs at #7"),
        ("chain", "! rank 1 behind by 1"),
        ("sigstop", "! rank 1 unknown"),
    ):
        found = load_incident(str(INCIDENTS / case))
        marked = [line for line in group_rows(found, 100) if "!" in line.text]
        assert len(marked) == 1
        outliers = [text for text, role in marked[0].spans if role == Role.BAD]
        assert outliers[0].startswith(first), (case, outliers)


def test_two_frozen_ranks_are_both_at_fault_and_wait_for_nothing() -> None:
    found = load_incident(str(INCIDENTS / "dataloader"))
    held = {rank: replace(found.run.ranks[rank], process_state="T (stopped)", stacks=()) for rank in (1, 3)}

    both = diagnosed(replace(found.run, ranks={**found.run.ranks, **held}))
    assert both.top.culprits == (1, 3)
    assert both.states[1].kind == both.states[3].kind == RankState.FROZEN
    lines = [line.text.strip() for line in wait_rows(both, 100)]
    assert sum(line.startswith("z rank") for line in lines) == 2
    assert not any(line.startswith("z rank") and "waits in" in line for line in lines)


def test_late_and_done_differ_without_colours() -> None:
    assert len({to_ascii(BARS[code].char) for code in (DONE, LATE, ENDED, PENDING, FAILED)}) >= 4
    assert to_ascii(BARS[LATE].char) != to_ascii(BARS[DONE].char)


def test_the_axis_of_a_short_window_has_different_times() -> None:
    for length in (1_000, 40_000, 9_000_000):
        labels = axis(Window(start=0, end=length), 80).split("+")[1:]
        assert len(set(labels)) == len(labels) > 2, labels


async def test_an_operation_that_stacks_alone_show_is_opened(tmp_path: Path) -> None:
    """And not the one before it, which all that wait have done."""
    path = first_dumps("sigkill", tmp_path)
    found = await screens_of(path, "236")
    assert "#7: all_reduce" in found["2"]
    assert "operation #7 · all_reduce · seen in stacks" in found["3"]
    assert re.search(r"^ +3  pending +all_reduce  faults.py:109 ", found["3"], re.MULTILINE)
    assert re.search(r"! +1  unknown, dead", found["3"])
    app = TitanApp(find_content(str(path)), clock=lambda: NOW_S, first_screen=6)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "j enter")
        assert "operation #7" in screen_text(app)
        for key, text in (
            ("less_than_sign", "operation #6 · 3/4 issued, 1 unknown"),
            ("greater_than_sign greater_than_sign", "operation #7"),
            ("d", "no other rank to compare with"),
        ):
            await press(app, pilot, key)
            assert text in screen_text(app)


async def test_a_save_in_progress_is_on_its_screen_first() -> None:
    app = TitanApp(find_content(str(INCIDENTS / "ckpt_io")), clock=lambda: NOW_S, first_screen=7)
    async with app.run_test(size=(40, 12)) as pilot:
        await settled(app, pilot)
        lines = screen_text(app).splitlines()
        assert "save in progress at the stop" in lines[3]
        assert "rank 0 is stuck in checkpoint I/O" in lines[4]
        assert 7 not in app.session.empty_screens
        await press(app, pilot, "6")
        assert "host code  faults.py:156" in screen_text(app)
    other = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: NOW_S)
    async with other.run_test(size=(40, 12)) as pilot:
        await settled(other, pilot)
        assert 7 in other.session.empty_screens


def test_the_bar_of_a_rank_in_host_code_says_so() -> None:
    incident = load_incident(str(INCIDENTS / "dataloader"))
    rows = [row.text for row in bars_rows(incident, 100, 20)]
    (culprit,) = [text for text in rows if text.startswith("!3 ")]
    assert re.fullmatch(r"!3 [━ ]*━c+", culprit)
    assert any("c in host code" in text for text in rows)


def test_a_slow_rank_had_not_issued_what_the_others_wait_in(tmp_path: Path) -> None:
    incident = load_incident(str(first_dumps("straggler", tmp_path)))
    codes = grid_of(incident, incident.lanes[0]).codes
    assert codes[:, -1].tolist() == [ENDED, BLANK, ENDED, ENDED]
