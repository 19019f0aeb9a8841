"""A rank that was killed while all waited in the same operation: the others lost their connections to it, and ended in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import open_run
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.incident.kinds import EventKind, VerdictKind
from titan_ckpt.debug.incident.records import Heartbeat, LogEvent, RankLog, Run
from titan_ckpt.debug.read.text.job_text import NOBODY, JobText, read_text
from titan_ckpt.debug.read.text.writers.of_run import OfRun

ALL_WAIT = "0 1 2 3: all_reduce@1 all_reduce@2?"
NOW_NS = 1_800_000_000_000_000_000


def ended(lost: tuple[int, ...], *, kind: EventKind = EventKind.COMM_CLOSED, later_s: float = -0.3) -> Run:
    """All recorders but those of `lost` left the end of their process, after an error of that kind; those of `lost` ticked so
    many seconds later."""
    run = job(ALL_WAIT)
    ranks = {}
    for rank, record in run.ranks.items():
        is_lost = rank in lost
        alive_ns = NOW_NS + int(later_s * 1e9 * is_lost)
        beat = Heartbeat(
            step=3,
            phase="",
            phase_ns=NOW_NS - 10**11,
            alive_ns=alive_ns,
            source=f"rank_{rank}.box",
            is_stopped=not is_lost,
        )
        closed = LogEvent(
            kind=kind, rank=rank, text="Connection closed by peer", source=f"rank_{rank}.error.json", line=0
        )
        log = None if is_lost else RankLog(source=closed.source, events=(closed,))
        ranks[rank] = replace(record, heartbeat=beat, log=log)
    return replace(run, ranks=ranks, read_ns=NOW_NS + 10**11)


@pytest.mark.parametrize("lost", [(2,), (1, 2)])
def test_a_rank_without_an_end_that_its_peers_lost_died(lost: tuple[int, ...]) -> None:
    top = diagnose(ended(lost))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.RANK_DIED, lost)


@pytest.mark.parametrize(
    "run",
    [
        ended((2,), kind=EventKind.COMM_TIMEOUT),
        ended((2,), later_s=5.0),
        ended((1, 2, 3)),
        replace(ended((2,)), read_ns=NOW_NS),
    ],
    ids=["still connected", "outlived them", "most of them", "may tick on"],
)
def test_a_rank_that_may_live_is_not_called_dead(run: Run) -> None:
    assert all(verdict.verdict != VerdictKind.RANK_DIED for verdict in diagnose(run))


LINE = "2026-11-25 01:00:{second:02d},000 INFO {text}\n"


def test_lines_before_and_after_the_run_are_of_others() -> None:
    lines = "".join(LINE.format(second=second, text=f"step {second}") for second in (5, 20, 25, 40))
    text = JobText(source="rank_0.log", scope="", of_run=OfRun(since_s=1795568410.0, until_s=1795568430.0))
    read_text(text, [(f"{lines}and a line without a time\n".encode(), False)])
    assert (text.writers[NOBODY].last_step, text.began_s) == (25, 1795568405.0)


def test_errors_of_the_next_incident_are_not_of_this_one(tmp_path: Path) -> None:
    names, starts = ("20261125T010010Z", "20261125T010030Z"), (1795568410.0, 1795568430.0)
    for name, started_s in zip(names, starts, strict=True):
        for rank in range(2):
            (tmp_path / "debug" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "debug" / name / f"rank_{rank:05d}.sidecar.json").write_text(
                f'{{"titan_ckpt": "sidecar", "rank": {rank}, "world_size": 2, "host": "a", "pid": {rank + 5}, '
                f'"started_s": {started_s}, "utc_offset_s": 0, "groups": []}}'
            )
    (tmp_path / "logs").mkdir()
    died = 'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\nValueError: later\n'
    said = LINE.format(second=12, text="step 1") + LINE.format(second=32, text="failed") + died
    (tmp_path / "logs" / "rank_00000.log").write_text(said)
    assert not open_run(str(tmp_path), incident=names[0]).ranks[0].events
    assert open_run(str(tmp_path)).ranks[0].events
