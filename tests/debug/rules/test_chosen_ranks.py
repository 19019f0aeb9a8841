"""Which ranks, lines and members single rules of the analyser choose, where there are several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug.diagnosis.align import _users
from titan_ckpt.debug.diagnosis.from_logs.by_witnesses import _after_error
from titan_ckpt.debug.diagnosis.mismatches.mismatch import _unfit
from titan_ckpt.debug.diagnosis.mismatches.readings import Reading
from titan_ckpt.debug.diagnosis.same_fault import _died_together
from titan_ckpt.debug.diagnosis.waiting.device_order import has_lost_head, has_order
from titan_ckpt.debug.diagnosis.waiting.wait_graph import _unknown_peers, is_queued
from titan_ckpt.debug.incident.kinds import DumpKind, EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import Dump, Frame, Group, LogEvent, RankLog, RankRecord, Run, Situation, Verdict

WORLD = "0 1 2: all_reduce@1 broadcast@2?"


def event(kind: EventKind, rank: int, line: int, time_s: float | None, *, type_: str = "") -> LogEvent:
    frame = Frame(file="train.py", line=line, function="step") if type_ else None
    values = {"type": type_} if type_ else {}
    return LogEvent(
        kind=kind, rank=rank, text=f"text {line}", source="l", line=line, time_s=time_s, frame=frame, values=values
    )


def with_events(*events: LogEvent) -> Run:
    run = job(WORLD)
    logs = {rank: RankLog(source="l", events=tuple(e for e in events if e.rank == rank)) for rank in run.ranks}
    return replace(run, ranks={rank: replace(record, log=logs[rank]) for rank, record in run.ranks.items()})


@pytest.mark.parametrize(
    ("times_s", "line"),
    [((30.0, 20.0, None), 1), ((10.0, 20.0, None), 0), ((None, None, 5.0), 2), ((None, None, None), 0)],
)
def test_the_first_word_of_sizes_is_the_earliest(times_s: tuple[float | None, ...], line: int) -> None:
    run = with_events(*(event(EventKind.COMM_MISMATCH, rank, rank, time_s) for rank, time_s in enumerate(times_s)))
    sizes = Reading(verdict=VerdictKind.SIZE_MISMATCH, alternative=VerdictKind.OP_MISMATCH)
    assert [item.text for item in _unfit(run, sizes)] == [f"text {line}"]
    assert not [*_unfit(run, replace(sizes, verdict=VerdictKind.OP_MISMATCH))]


@pytest.mark.parametrize(("description", "members"), [("default_pg", (0, 1, 2)), ("mesh_tp", (1, 2))])
def test_members_that_nobody_recorded_are_the_users(description: str, members: tuple[int, ...]) -> None:
    run = replace(job(WORLD), groups=(Group(name="0", description=description, members=()),))
    assert _users(run, 0, np.array([1, 2])) == members


def test_ranks_that_died_together_are_no_victims_of_each_other() -> None:
    first, other = (
        Verdict(verdict=VerdictKind.RANK_DIED, headline="", culprits=(rank,), victims=victims, confidence=0.9)
        for rank, victims in ((1, (0, 2, 3)), (3, (0, 1, 2)))
    )
    found = _died_together(first, other)
    assert (found.culprits, found.victims) == ((1, 3), (0, 2))


def test_the_error_that_a_rank_ended_after_is_its_own_last_one() -> None:
    own = event(EventKind.EXCEPTION, 0, 7, None, type_="KeyError")
    peers = event(EventKind.COMM_CLOSED, 0, 9, None, type_="RuntimeError")
    assert _after_error(RankRecord(rank=0, log=RankLog(source="l", events=(own, peers)))) == (
        ", after it logged KeyError at train.py:7,"
    )
    assert _after_error(RankRecord(rank=0, log=RankLog(source="l", events=(peers,)))) == ""
    caught = RankLog(source="l", events=(own,), last_step_line=8)
    assert _after_error(RankRecord(rank=0, log=caught)) == ""


def test_an_unrecorded_peer_is_waited_for_in_a_send_or_recv() -> None:
    groups = (Group(name="1", members=(0, 1)), Group(name="2", members=(2, 3)))
    run = replace(job("0 1 2 3: all_reduce@1"), groups=groups, world_size=4)
    kinds = (RankState.IN_P2P, RankState.IN_P2P, RankState.ON_CPU, RankState.IN_P2P)
    states = {rank: Situation(rank=rank, kind=kind) for rank, kind in enumerate(kinds)}
    assert [(edge.waiter, edge.awaited, edge.is_p2p, edge.is_inferred) for edge in _unknown_peers(run, states)] == [
        (0, 2, True, True)
    ]


@pytest.mark.parametrize(
    ("operations", "row", "queued"),
    [
        ("all_reduce@1 send>1@2? all_reduce@3?", 2, True),
        ("all_reduce@1 all_reduce@2? all_reduce@3?", 2, False),
        ("all_reduce@1 x:all_reduce@2? all_reduce@3?", 2, True),
        ("all_reduce@1 x:all_reduce@2 all_reduce@3?", 2, False),
    ],
)
def test_an_operation_queues_behind_a_pending_one_of_elsewhere(operations: str, row: int, *, queued: bool) -> None:
    assert is_queued(job(f"0 1: {operations}\ngroup x: 0 1"), 0, row) == queued


@pytest.mark.parametrize(
    ("operations", "first_record", "is_lost"),
    [("all_reduce? broadcast?", 7, True), ("all_reduce broadcast?", 7, False), ("all_reduce? broadcast?", 0, False)],
)
def test_a_full_ring_of_pending_operations_has_lost_its_head(
    operations: str, first_record: int, *, is_lost: bool
) -> None:
    record = job(f"0 1: {operations}").ranks[0]
    dump = Dump(
        source="d",
        kind=DumpKind.FLIGHT_RECORDER,
        reason="stall",
        version="2.10",
        num_operations=2,
        first_record_id=first_record,
    )
    assert has_order(record)
    assert has_lost_head(replace(record, dumps=(dump,))) == is_lost
