"""A rank that has put on its device all that the others wait for is not at fault, whatever its main thread does meanwhile."""

from __future__ import annotations

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import Verdict, diagnose
from titan_ckpt.debug.incident.records import STARTED
from titan_ckpt.debug.incident.waits import pending

MESH = "group a: 0 1\ngroup b: 2 3\ngroup c: 0 2\ngroup d: 1 3\n"
FIRST = "0: all_reduce@9 a:all_reduce@1 c:all_reduce@2?\n1: all_reduce@9 a:all_reduce@1 d:all_reduce@2?\n"


def judged(others: str) -> Verdict:
    """As NCCL records it: the first pending operation of each rank is started, those behind it are scheduled."""
    run = job(f"{MESH}{FIRST}{others}\nat 2: /job/data.py 7 load")
    for record in run.ranks.values():
        record.operations["state"][pending(record.operations).argmax()] = STARTED
    return diagnose(run)[0]


def test_a_stall_in_the_operation_of_its_device_accuses_nobody() -> None:
    top = judged("2: all_reduce@9 b:all_reduce@1? c:all_reduce@2?\n3: all_reduce@9 b:all_reduce@1? d:all_reduce@2?")
    assert (top.verdict, top.culprits, top.suspects) == ("STARTED_NOT_COMPLETED", (), ())
    assert "all_reduce #1 of group b" in top.headline


def test_its_device_waits_for_another_rank() -> None:
    top = judged("2: all_reduce@9 b:all_reduce@1? c:all_reduce@2?\n3: all_reduce@9 d:all_reduce@2?")
    assert 2 not in top.culprits
    assert 2 not in top.suspects


@pytest.mark.parametrize("others", ["2: all_reduce@9\n3: all_reduce@9 b:all_reduce@1?"])
def test_what_it_has_not_issued_it_is_awaited_for(others: str) -> None:
    top = judged(others)
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (2,))
