"""The campaign of programs that users write: its register, and how it scores a verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Verdict
from tools.hangs.incident import INCIDENTS
from tools.hangs.rank import PROGRAMS
from tools.hangs.score import Outcome, has_line, outcome


def test_each_fault_has_its_culprits_and_its_line() -> None:
    assert {each.program.__module__ for each in INCIDENTS.values()} == {module.__name__ for module in PROGRAMS}
    assert sum(each.is_healthy for each in INCIDENTS.values()) >= 11
    for each in INCIDENTS.values():
        assert each.culprits <= set(range(each.ranks)), each.name
        assert not (each.is_healthy and each.lines), each.name


@pytest.mark.parametrize(
    ("verdict", "culprits", "expected"),
    [
        (VerdictKind.STUCK_ON_CPU, (2,), Outcome.RIGHT),
        (VerdictKind.RANK_FROZEN, (2,), Outcome.KIND),
        (VerdictKind.STUCK_ON_CPU, (1,), Outcome.ACCUSED),
        (VerdictKind.STUCK_ON_CPU, (1, 2), Outcome.ACCUSED),
        (VerdictKind.WAIT_CHAIN, (), Outcome.UNDECIDED),
        (VerdictKind.RUNNING, (), Outcome.UNDECIDED),
        (VerdictKind.HEALTHY, (), Outcome.HEALTHY),
    ],
)
def test_outcome_of_a_hang(verdict: VerdictKind, culprits: tuple[int, ...], expected: Outcome) -> None:
    hang = INCIDENTS["open_of_a_dead_mount"]
    assert outcome(hang, Verdict(verdict=verdict, culprits=culprits)) == expected


def test_a_healthy_job_may_run_and_may_have_a_straggler() -> None:
    well = INCIDENTS["noisy_steps"]
    assert outcome(well, Verdict(verdict=VerdictKind.RUNNING)) == Outcome.RIGHT
    assert outcome(well, Verdict(verdict=VerdictKind.STRAGGLER, culprits=(1,))) == Outcome.RIGHT
    assert outcome(well, Verdict(verdict=VerdictKind.STUCK_ON_CPU, culprits=(1,))) == Outcome.ACCUSED


def test_the_line_may_be_in_the_headline_or_in_the_evidence() -> None:
    hang = INCIDENTS["open_of_a_dead_mount"]
    (line,) = hang.lines
    plain = Verdict(verdict=VerdictKind.STUCK_ON_CPU, culprits=(2,), headline="rank 2 is stuck")
    assert has_line(hang, plain) is False
    assert has_line(hang, replace(plain, headline=f"stuck at /x/programs_waits.py:{line}")) is True
    assert has_line(hang, replace(plain, evidence=(Evidence(text="", line=line),))) is True
    assert has_line(INCIDENTS["stopped_inside_a_collective"], plain) is None
