"""Single rules of the analyser, on records that hold no more than each rule looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.diagnosis.align import lanes
from titan_ckpt.debug.diagnosis.diagnose import _is_known_gone, _unless_died_before, _without_reason
from titan_ckpt.debug.diagnosis.from_logs.at_the_start import _has_ended, at_the_start
from titan_ckpt.debug.diagnosis.from_logs.by_witnesses import _was_ended_at_work
from titan_ckpt.debug.diagnosis.from_logs.cross_checks import is_contradicted
from titan_ckpt.debug.diagnosis.from_logs.exit_codes import _by_the_clock, _ended_for_a_hang, by_exit_codes
from titan_ckpt.debug.diagnosis.from_logs.lost_rank import ended_first
from titan_ckpt.debug.diagnosis.from_logs.named_ranks import _comparable, _is_history
from titan_ckpt.debug.diagnosis.from_logs.odd_one import _is_alone
from titan_ckpt.debug.diagnosis.mismatches.meeting import Meeting, sides_at
from titan_ckpt.debug.diagnosis.mismatches.mismatch import _is_new, _strangeness
from titan_ckpt.debug.diagnosis.mismatches.one_too_many import _first_parted
from titan_ckpt.debug.diagnosis.mismatches.splits import _listed
from titan_ckpt.debug.diagnosis.rank_death import is_absent
from titan_ckpt.debug.diagnosis.rank_frozen import _last_call_site, _was_alive_later
from titan_ckpt.debug.diagnosis.standstill import is_beginning
from titan_ckpt.debug.diagnosis.stragglers import _chance
from titan_ckpt.debug.diagnosis.transport import _came_too_late
from titan_ckpt.debug.diagnosis.waiting.awaited_rank import _without_stack
from titan_ckpt.debug.diagnosis.waiting.told_waits import _distances, _inferred
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import DumpKind, EventKind, FlagKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import (
    Dump,
    Exit,
    Flag,
    Frame,
    Heartbeat,
    LogEvent,
    RankLog,
    RankRecord,
    Run,
    Situation,
    Verdict,
)

EARLIER = Flag(flag=FlagKind.EARLIER_ATTEMPT, text="")
RANKS = "0 1 2: all_reduce@1 broadcast@2?"


def ended(rank: int, code: int, time_s: float | None = None, *, is_first: bool = False) -> RankRecord:
    return RankRecord(rank=rank, exit=Exit(rank=rank, code=code, source="e", time_s=time_s, is_first=is_first))


def run_of(*records: RankRecord, job_log: RankLog | None = None) -> Run:
    ranks = {record.rank: record for record in records}
    return replace(job(RANKS), ranks=ranks, world_size=len(ranks), job_log=job_log)


@pytest.mark.parametrize(
    ("records", "is_first"),
    [
        ((ended(0, 1, 5.0), ended(1, 1, 6.0), RankRecord(rank=2)), True),
        ((ended(0, 1, 6.0), ended(1, 1, 5.0), RankRecord(rank=2)), False),
        ((ended(0, 1, 5.0), ended(1, 1), RankRecord(rank=2)), True),
        ((ended(0, 1), ended(1, 1, 5.0)), False),
        ((ended(0, 1, is_first=True), ended(1, 1, 5.0)), True),
        ((ended(0, 0, 5.0), ended(1, 1, 6.0)), False),
        ((ended(0, -9, 5.0), ended(1, 1, 6.0)), False),
        ((RankRecord(rank=0), ended(1, 1, 6.0)), False),
    ],
)
def test_the_first_to_end_has_a_code_and_the_earliest_time(records: tuple[RankRecord, ...], is_first: bool) -> None:
    assert ended_first(run_of(*records), records[0]) == is_first


def interrupt(time_s: float) -> LogEvent:
    return LogEvent(
        kind=EventKind.EXCEPTION, rank=0, text="KeyboardInterrupt", source="l", line=1, time_s=time_s,
        values={"type": "KeyboardInterrupt"},
    )  # fmt: skip


STEPS: Mapping[int, float] = {1: 100.0, 2: 110.0, 3: 120.0}


@pytest.mark.parametrize(
    ("own_steps", "job_steps", "told_s", "at_work"),
    [
        (STEPS, {}, 125.0, True),
        (STEPS, {}, 5000.0, False),
        ({}, STEPS, 125.0, True),
        ({}, STEPS, 5000.0, False),
        (STEPS, {1: 4990.0, 2: 4999.0}, 5000.0, False),
        ({}, {}, 125.0, False),
        ({1: 100.0}, {}, 125.0, False),
        ({1: 100.0, 2: 101.0, 3: 121.0}, {}, 145.0, True),
    ],
)
def test_a_job_that_stood_still_was_not_ended_at_work(
    own_steps: Mapping[int, float], job_steps: Mapping[int, float], told_s: float, at_work: bool
) -> None:
    record = RankRecord(rank=0, log=RankLog(source="l", events=(interrupt(told_s),), step_times=own_steps))
    console = RankLog(source="c", events=(interrupt(told_s),), step_times=job_steps)
    assert _was_ended_at_work(run_of(record, job_log=console), record) == at_work


def test_where_a_rank_was_last_is_its_newest_call() -> None:
    run = job(RANKS)
    found = _last_call_site(run, run.ranks[1])
    assert found is not None
    assert found.line == 2
    assert _last_call_site(run, RankRecord(rank=1)) is None


def test_the_code_of_the_rank_listed_first_names_its_ranks() -> None:
    [verdict] = by_exit_codes(run_of(ended(0, 3), ended(1, 7, is_first=True), ended(2, 7)))
    assert verdict.culprits == (1, 2)


def test_without_a_first_all_that_ended_with_the_code_are_named() -> None:
    [verdict] = by_exit_codes(run_of(ended(0, 3), ended(1, 3), ended(2, 0)))
    assert verdict.culprits == (0, 1)


@pytest.mark.parametrize(
    ("state", "is_gone"), [("", True), ("S (sleeping)", True), ("gone", False), ("T (stopped)", False)]
)
def test_a_process_known_to_have_stopped_is_not_absent(state: str, is_gone: bool) -> None:
    assert is_absent(RankRecord(rank=0, process_state=state)) == is_gone


def test_calls_of_two_operations_are_compared_by_these_alone() -> None:
    calls = {0: "ALLREDUCE|[10]|Float", 1: "ALLREDUCE|[20]|Float", 2: "BROADCAST|[10]|Float"}
    assert _comparable(calls) == {0: "ALLREDUCE", 1: "ALLREDUCE", 2: "BROADCAST"}
    assert _comparable({0: calls[0], 1: calls[1]}) == {0: calls[0], 1: calls[1]}


def test_both_sides_of_a_mismatch_say_whether_theirs_returned() -> None:
    top = diagnose(job("0 1: all_reduce@1 all_reduce@2?\n2: all_reduce@1 broadcast@3 all_reduce@2?"))[0]
    assert [item.text for item in top.evidence[:2]] == [
        "issued broadcast(4, Float) as #2, returned, in step",
        "issued all_reduce(4, Float) as #2 (and 1 more rank), not completed, in step",
    ]


def test_splits_are_told_in_full() -> None:
    text = "0 1 2: all_to_all@5?\nsplits 0: world#1 4,4,4 4,4,4\nsplits 1: world#1 4,4,9 4,4,4\nsplits 2: world#1 4,4,4 4,4,4"
    told = diagnose(job(text))[0].evidence[0].text
    assert told == "sends [4, 4, 9], expects [4, 4, 4] (elements to and from ranks 0, 1, 2)"


def ticked(rank: int, alive_s: float) -> RankRecord:
    return RankRecord(
        rank=rank, heartbeat=Heartbeat(source="b", alive_ns=int(alive_s * 1e9), phase_ns=0, phase="", step=-1)
    )


@pytest.mark.parametrize(("alive_s", "is_alive"), [(100.0, True), (99.5, True), (90.0, False)])
def test_who_ticked_to_about_the_end_was_alive(alive_s: float, is_alive: bool) -> None:
    run = run_of(ticked(0, alive_s), ticked(1, 100.0))
    assert bool(_was_alive_later(run, run.ranks[0])) == is_alive
    assert not _was_alive_later(run_of(ticked(0, 100.0)), ticked(0, 100.0))


def test_an_inferred_wait_is_in_the_pending_collective() -> None:
    run = job("0: all_reduce@1 send>1@2? all_reduce@3?\n1: all_reduce@1 recv<0@2?")
    edge = _inferred(run, 0, 1, replace(diagnose(run)[0], group=str(run.groups[0])))
    assert (edge.group, edge.seq, edge.is_inferred) == (0, 2, True)


@pytest.mark.parametrize(("op", "is_new"), [("all_reduce", False), ("broadcast", True)])
def test_without_lines_an_operation_is_new_by_its_kind(op: str, is_new: bool) -> None:
    run = job(f"0: all_reduce {op}?\n1: all_reduce all_gather?")
    [lane] = lanes(run)
    side = next(side for side in sides_at(run, lane, 2) if 0 in side.ranks)
    assert _is_new(Meeting(run=run, lane=lane, seq=2), side) == is_new


@pytest.mark.parametrize(
    ("flags", "seconds", "is_new"),
    [((), 20.0, True), ((), 45.0, False), ((EARLIER,), 45.0, True), ((EARLIER,), 70.0, False)],
)
def test_a_job_has_longer_to_begin_after_an_earlier_attempt(
    flags: tuple[Flag, ...], seconds: float, is_new: bool
) -> None:
    beat = Heartbeat(source="b", alive_ns=int(seconds * 1e9), phase_ns=0, phase="", step=-1)
    run = replace(run_of(RankRecord(rank=0, heartbeat=beat)), flags=flags)
    assert is_beginning(run) == is_new


def test_without_logs_and_codes_nothing_has_ended() -> None:
    assert not _has_ended(run_of(RankRecord(rank=0)))
    assert _has_ended(run_of(RankRecord(rank=0), ended(1, 2)))


@pytest.mark.parametrize(("code", "is_gone"), [(1, True), (-6, False), (134, False)])
def test_a_rank_whose_peers_closed_is_gone_unless_aborted(code: int, is_gone: bool) -> None:
    closed = LogEvent(kind=EventKind.COMM_CLOSED, rank=0, text="Connection closed by peer", source="l", line=1)
    record = RankRecord(rank=0, log=RankLog(source="l", events=(closed,)))
    assert _is_known_gone(run_of(record, ended(1, code)), (1,)) == is_gone


def test_waits_are_counted_to_the_end_of_the_chain() -> None:
    edges = [
        Edge(waiter=waiter, awaited=awaited, group=0, seq=1) for waiter, awaited in ((3, 2), (2, 1), (1, 0), (5, 4))
    ]
    assert _distances(edges, {0}) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_lists_of_elements_are_cut_after_sixteen() -> None:
    assert _listed(range(16)) == str(list(range(16)))


def doubted(**values: Any) -> Verdict:
    return Verdict(verdict=VerdictKind.STUCK_ON_CPU, headline="", culprits=(1,), confidence=0.5, **values)


def test_a_stale_dump_contradicts_a_rank_that_did_not_come() -> None:
    run = run_of(RankRecord(rank=0), RankRecord(rank=1))
    skewed = replace(run, flags=(Flag(flag=FlagKind.DUMP_SKEW, text="", ranks=(1,)),))
    assert not is_contradicted(run, doubted())
    assert is_contradicted(skewed, doubted())
    assert not is_contradicted(skewed, replace(doubted(), culprits=()))
    assert not is_contradicted(skewed, replace(doubted(), confidence=0.95))


def came_at(*moments_s: float) -> Run:
    """Ranks that issued the same operation at these moments, the first two of which gave it up after 60 s."""
    run = job("0 1 2: all_reduce@1?")
    given_up = LogEvent(kind=EventKind.COMM_TIMEOUT, rank=0, text="timed out after 60000 ms", source="l", line=1)
    for rank, moment_s in enumerate(moments_s):
        run.ranks[rank].operations["created_ns"] = int(moment_s * 1e9)
    return replace(
        run,
        ranks={
            rank: replace(record, log=RankLog(source="l", events=(replace(given_up, rank=rank),)))
            if rank < 2
            else record
            for rank, record in run.ranks.items()
        },
    )


@pytest.mark.parametrize(
    ("moments_s", "late"),
    [((100, 101, 171), (2,)), ((100, 101, 150), ()), ((0, 101, 171), ()), ((0, 0, 171), ()), ((100, 171, 172), ())],
)
def test_the_one_that_came_after_the_timeout_is_named(moments_s: tuple[float, ...], late: tuple[int, ...]) -> None:
    run = came_at(*moments_s)
    found = _came_too_late(run, lanes(run)[0], 1)
    assert (() if found is None else found.culprits) == late


def beat(alive_s: float, *, is_stopped: bool, status: int | None = None) -> Heartbeat:
    alive_ns = int(alive_s * 1e9)
    return Heartbeat(step=1, phase="", phase_ns=0, alive_ns=alive_ns, source="b", is_stopped=is_stopped, status=status)


STOPPED, WAITS = beat(100.0, is_stopped=True), beat(100.5, is_stopped=False)
QUIET = RankLog(source="l")
RAISED = RankLog(source="l", events=(replace(interrupt(99.0), values={"type": "ValueError"}),))
DUMPED = Dump(source="d", kind=DumpKind.FLIGHT_RECORDER, reason="exception", version="", num_operations=1)
EARLY_ENDS: Mapping[str, tuple[Heartbeat, RankLog | None, Heartbeat, tuple[Dump, ...], bool]] = {
    "an older recorder alone": (STOPPED, None, WAITS, (), True),
    "long before the others": (STOPPED, None, beat(102.0, is_stopped=False), (), False),
    "its recorder says how": (replace(STOPPED, status=0), None, WAITS, (), False),
    "its recorder says that it failed": (replace(STOPPED, status=1), None, WAITS, (), True),
    "its log holds no exception": (STOPPED, QUIET, WAITS, (), False),
    "its log holds one": (STOPPED, RAISED, WAITS, (), True),
    "recorders that tell exceptions": (STOPPED, None, WAITS, (DUMPED,), False),
    "recorders that took one for an end": (STOPPED, None, replace(WAITS, is_stopped=True), (DUMPED,), True),
    "dumps for another reason": (STOPPED, None, WAITS, (replace(DUMPED, reason="stall"),), True),
}


@pytest.mark.parametrize("case", EARLY_ENDS)
def test_an_early_end_of_which_nothing_says_how_is_doubted(case: str) -> None:
    own, log, others, dumps, is_doubted = EARLY_ENDS[case]
    run = run_of(
        RankRecord(rank=0, heartbeat=others, dumps=dumps),
        RankRecord(rank=1, heartbeat=own, log=log),
    )
    early = replace(doubted(subtype=Subtype.FINISHED_EARLY), confidence=0.85, victims=(0,))
    assert is_contradicted(run, early) == is_doubted


@pytest.mark.parametrize(
    ("steps", "ended_s", "is_for_a_hang"),
    [
        ({1: 100.0, 2: 110.0}, 5000.0, True),
        ({1: 100.0, 2: 110.0}, 125.0, False),
        ({1: 100.0, 2: 4000.0}, 5000.0, False),
        ({1: 100.0}, 5000.0, False),
        ({}, 5000.0, False),
    ],
)
def test_a_rank_that_ended_after_a_standstill_may_have_waited(
    steps: dict[int, float], ended_s: float, *, is_for_a_hang: bool
) -> None:
    log = RankLog(source="l", step_times=steps)
    assert _ended_for_a_hang(replace(ended(0, 1, ended_s), log=log)) == is_for_a_hang


@pytest.mark.parametrize(
    ("done_line", "newest_s", "is_history"), [(0, 110.0, False), (0, 110.1, True), (2, 100.0, True), (1, 100.0, False)]
)
def test_a_text_is_history_where_the_job_outlived_it(done_line: int, newest_s: float, *, is_history: bool) -> None:
    log = RankLog(source="l", done_line=done_line, step_times={7: newest_s})
    assert _is_history(log, interrupt(100.0)) == is_history


def test_ranks_without_an_end_are_told_apart_from_unseen_ones() -> None:
    told = {
        rank: Verdict(
            verdict=VerdictKind.RANK_DIED, headline=f"{rank}", culprits=(rank,), victims=(0, 4, 5, 6), confidence=0.6
        )
        for rank in (1, 2, 3)
    }
    ends = {rank: RankRecord(rank=rank, heartbeat=beat(100.0, is_stopped=True)) for rank in (0, 4, 5, 6)}
    gone = {rank: RankRecord(rank=rank, heartbeat=beat(50.0, is_stopped=False)) for rank in (1, 2)}
    run = run_of(*ends.values(), *gone.values(), RankRecord(rank=3))
    states = {rank: Situation(rank=rank, kind=RankState.SILENT) for rank in run.ranks}
    assert [verdict.culprits for verdict in _without_reason(run, [*told.values()], states)] == [(1, 2), (3,)]


def test_lines_part_where_both_ranks_recorded_the_operation() -> None:
    run = job("0 1: all_reduce@1 all_reduce@1 all_reduce@1\n2: all_reduce@4 all_reduce@1 all_reduce@4")
    lane = lanes(run)[0]
    lane.row[2, 0] = -1  # its buffer holds no more of it
    parted = _first_parted(run, lane, 2, 0, 3)
    assert parted is not None
    assert [operation.seq for operation in parted] == [3, 3]
    assert _first_parted(run, lane, 0, 1, 3) is None


@pytest.mark.parametrize(
    ("own", "others", "is_frozen"),
    [(None, None, True), (None, 100.0, True), (100.0, None, True), (100.0, 100.0, False)],
)
def test_a_rank_that_left_nothing_and_did_not_tick_on_is_frozen(
    own: float | None, others: float | None, *, is_frozen: bool
) -> None:
    timeout = LogEvent(kind=EventKind.COMM_TIMEOUT, rank=0, text="timed out", source="l", line=1)
    waits = RankRecord(rank=0, log=RankLog(source="l", events=(timeout,)))
    peer = waits if others is None else replace(waits, heartbeat=beat(others, is_stopped=False))
    silent = RankRecord(rank=1) if own is None else ticked(1, own)
    reason = _without_stack(run_of(peer, silent), Situation(rank=1, kind=RankState.SILENT))
    assert (reason.verdict == VerdictKind.RANK_FROZEN) == is_frozen


@pytest.mark.parametrize(("line", "seconds"), [("23:59:30 step 3", 60.0), ("00:00:10 step 3", 20.0), ("step 3", 0.0)])
def test_lines_without_a_date_are_of_the_day_before_the_end(line: str, seconds: float) -> None:
    assert _by_the_clock((line,), 20_000 * 86_400.0 + 30.0) == seconds


@pytest.mark.parametrize(("before", "score"), [("", 0), ("all_reduce", 0), ("broadcast", 3)])
def test_an_operation_is_strange_by_what_its_rank_issued_before(before: str, score: int) -> None:
    run = job(f"0: {before} all_reduce?\n1: {before} all_gather?")
    [lane] = lanes(run)
    seq = 2 if before else 1
    side = next(side for side in sides_at(run, lane, seq) if 0 in side.ranks)
    assert _strangeness(Meeting(run=run, lane=lane, seq=seq), side) == score


@pytest.mark.parametrize("culprits", [(0,), (0, 1)])
def test_an_exception_before_doubts_a_verdict_on_one_rank(culprits: tuple[int, ...]) -> None:
    failed = LogEvent(
        kind=EventKind.EXCEPTION, rank=0, text="ValueError", source="l", line=1, values={"type": "ValueError"}
    )
    run = run_of(RankRecord(rank=0, log=RankLog(source="l", events=(failed,))), RankRecord(rank=1))
    verdict = replace(doubted(), culprits=culprits)
    assert (_unless_died_before(run, verdict).confidence < verdict.confidence) == (len(culprits) == 1)


def failed_at(rank: int, line: int) -> LogEvent:
    frame = Frame(file="train.py", line=line, function="step")
    return LogEvent(kind=EventKind.COMM_CLOSED, rank=rank, text="closed", source="l", line=1, frame=frame)


@pytest.mark.parametrize(("lines", "is_alone"), [((1,), False), ((1, 2), True), ((1, 1), False), ((1, 2, 1), False)])
def test_a_rank_is_alone_where_others_were_seen_elsewhere(lines: tuple[int, ...], *, is_alone: bool) -> None:
    assert _is_alone({rank: failed_at(rank, line) for rank, line in enumerate(lines)}, 0) == is_alone


@pytest.mark.parametrize(("rank", "names_all"), [(-1, True), (0, False)])
def test_errors_of_no_known_rank_are_of_as_many(rank: int, *, names_all: bool) -> None:
    error = LogEvent(kind=EventKind.EXCEPTION, rank=rank, text="E", source="l", line=1, values={"type": "ValueError"})
    console = RankLog(source="l", events=(error, replace(error, line=2)))
    run = run_of(ended(0, 1), ended(1, 1), job_log=console)
    assert [verdict.culprits for verdict in at_the_start(run)] == ([(0, 1)] if names_all else [])


def test_the_chance_to_be_the_last_is_the_binomial_tail() -> None:
    assert [_chance(2, 2, 3), _chance(1, 2, 3), _chance(0, 5, 4)] == pytest.approx([1 / 9, 5 / 9, 1.0])
