"""Ranks whose processes the kernel no longer has, or has stopped: who is named, and when nobody is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.diagnosis.rank_state import situations
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Exit, Heartbeat, Run
from titan_ckpt.debug.report.seen_situations import seen_situations

WAITED_FOR = "0 1 3: all_reduce@1 all_reduce@2?\n2: all_reduce@1"
NOW_NS = 1_800_000_000_000_000_000


def looked_at(gone: dict[int, float], *, is_collected: bool = False, operations: str = WAITED_FOR) -> Run:
    """A look at a job of four ranks: those of `gone` have no process any more, and ticked that many seconds before the others."""
    run = job(operations)
    ranks = {}
    for rank, record in run.ranks.items():
        alive_ns = NOW_NS - int(gone.get(rank, 0.0) * 1e9)
        beat = Heartbeat(step=3, phase="", phase_ns=NOW_NS - 10**11, alive_ns=alive_ns, source=f"rank_{rank}.box")
        state = "gone" if is_collected and rank in gone else ""
        ranks[rank] = replace(record, heartbeat=beat, is_gone=rank in gone and not is_collected, process_state=state)
    return replace(run, ranks=ranks, read_ns=NOW_NS)


@pytest.mark.parametrize("is_collected", [False, True])
def test_where_all_are_gone_nobody_is_named(is_collected: bool) -> None:
    top = diagnose(looked_at(dict.fromkeys(range(4), 0.0), is_collected=is_collected))[0]
    assert (top.verdict, top.culprits, top.suspects) == (VerdictKind.INSUFFICIENT_DATA, (), ())
    assert top.headline == "all processes are gone (4 ranks), and none left an end of its own"
    assert any("dmesg" in step for step in top.next_steps)


def test_a_job_that_is_gone_between_operations_is_not_running() -> None:
    done = "0 1 2 3: all_reduce@1 all_reduce@2"
    assert diagnose(looked_at({}, operations=done))[0].verdict == VerdictKind.RUNNING
    top = diagnose(looked_at(dict.fromkeys(range(4), 0.0), operations=done))[0]
    assert top.verdict == VerdictKind.INSUFFICIENT_DATA
    assert top.headline.startswith("all processes are gone (4 ranks)")


@pytest.mark.parametrize(("stood_s", "culprits"), [(70.0, (2,)), (6.0, ())])
def test_a_hang_that_was_seen_before_all_were_gone_stays(stood_s: float, culprits: tuple[int, ...]) -> None:
    run = looked_at(dict.fromkeys(range(4), 0.0), operations=WAITED_FOR + "\nat 2: /job/data.py 7 load")
    ranks = {}
    for rank, record in run.ranks.items():
        assert record.heartbeat is not None
        beat = replace(record.heartbeat, moves=7, moved_ns=NOW_NS - int(stood_s * 1e9))
        stacks = tuple(replace(stack, reason="stall") for stack in record.stacks)
        ranks[rank] = replace(record, heartbeat=beat, stacks=stacks)
    assert diagnose(replace(run, ranks=ranks))[0].culprits == culprits


def test_a_rank_that_the_others_outlived_died() -> None:
    top = diagnose(looked_at({2: 5.0}))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.RANK_DIED, (2,))
    assert diagnose(looked_at({2: 0.5}))[0].verdict != VerdictKind.RANK_DIED


def test_an_end_that_is_known_is_not_called_unknown() -> None:
    run = looked_at(dict.fromkeys(range(4), 0.0))
    ended = replace(run.ranks[2], exit=Exit(rank=2, code=-9, source="launcher.txt"))
    top = diagnose(replace(run, ranks={**run.ranks, 2: ended}))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.RANK_DIED, (2,))


def test_all_ranks_that_the_kernel_calls_stopped_are_named() -> None:
    run = looked_at({})
    held = {rank: replace(run.ranks[rank], process_state="T (stopped)") for rank in (1, 2)}
    verdicts = diagnose(replace(run, ranks={**run.ranks, **held}))
    assert (verdicts[0].verdict, verdicts[0].culprits) == (VerdictKind.RANK_FROZEN, (1, 2))
    assert VerdictKind.RANK_FROZEN not in {other.verdict for other in verdicts[1:]}


def test_ranks_are_shown_as_the_verdict_calls_them() -> None:
    """Also where a stack, of before their end, shows that they waited."""
    run = looked_at({2: 5.0})
    top = diagnose(run)[0]

    states = {rank: replace(state, kind=RankState.IN_COLLECTIVE) for rank, state in situations(run).items()}
    seen = seen_situations(run, states, top, ())
    assert {rank: state.kind for rank, state in seen.items() if state.kind != RankState.IN_COLLECTIVE} == {
        2: RankState.DEAD
    }
