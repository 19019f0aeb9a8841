"""Dumps that are older than the others' by what those completed, and stragglers of a job that then stood still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.incident.records import SCHEDULED, STARTED, Run

SECOND = 10**9


@pytest.mark.parametrize(("op", "accused"), [("all_reduce", ()), ("broadcast", (2,))])
def test_what_others_completed_a_rank_had_come_to(op: str, accused: tuple[int, ...]) -> None:
    """An all_reduce ends on no rank before all have come; the root of a broadcast waits for nobody."""
    run = job(f"0 1 3: all_reduce@1 {op}@2 all_reduce@3?\n2: all_reduce@1")
    top = diagnose(run)[0]
    assert top.culprits == accused
    assert top.culprits or 2 in top.suspects


def timed(run: Run, *, stalled: int) -> Run:
    """The run as NCCL records it: one operation is started and does not end, those behind it are scheduled."""
    for record in run.ranks.values():
        record.operations["started_ns"] = record.operations["created_ns"] + 1
        record.operations["started_ns"][stalled + 1 :] = 0
        record.operations["state"][stalled] = STARTED
        record.operations["state"][stalled + 1 :] = SCHEDULED
        record.operations["retired"][stalled:] = False
    return run


@pytest.mark.parametrize("queued", [0, 1])
def test_who_was_late_before_is_not_why_the_network_stalls(queued: int) -> None:
    """Also if the next operation stands in the queue behind the one that does not end."""
    words = " ".join(["all_reduce@1"] * 12 + ["all_reduce@1?"] * (1 + queued))
    run = job(f"0 1 2 3: {words}")
    run.ranks[2].operations["created_ns"][:12] += SECOND * 95 // 100
    run = timed(run, stalled=12)
    top = diagnose(replace(run, read_ns=int(run.ranks[0].operations["created_ns"].max()) + 600 * SECOND))[0]
    assert (top.verdict, top.culprits) == ("STARTED_NOT_COMPLETED", ())
