"""Jobs that a signal from outside ended while they went on, by recorders and by logs; stragglers seen at one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.diagnosis.ends import told_to_end
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Dump, Heartbeat, LogEvent, RankLog, RankRecord, Run

SECOND = 10**9
CLOSED, INTERRUPT = "Connection closed by peer", "KeyboardInterrupt"


def ended(run: Run, ends: Mapping[int, str], waited_s: float, *, caught: bool = False) -> Run:
    """The ranks of a job, each ended by "sigterm", "ctrl-c", "closed" (what it waited for) or "" (not at all), `waited_s` after
    the last operation; `caught`: rank 0 had dumped an exception long before."""
    issued_ns = max(int(record.operations["created_ns"].max()) for record in run.ranks.values())
    end_ns = issued_ns + int(waited_s * SECOND)

    def one(rank: int, record: RankRecord) -> RankRecord:
        beat = Heartbeat(
            step=1, phase="", phase_ns=issued_ns, alive_ns=end_ns, moved_ns=issued_ns, source=f"rank_{rank:05d}.box"
        )
        dump = record.dumps[0]
        later = {"sigterm": "sigterm", "closed": "exception"}.get(ends[rank])
        dumps: list[Dump] = [*record.dumps, *([replace(dump, reason=later, time_s=end_ns / SECOND)] if later else [])]
        if caught and rank == 0:
            dumps.append(replace(dump, reason="exception", time_s=issued_ns / SECOND - 30))
        kinds = {"closed": (EventKind.COMM_CLOSED, CLOSED), "ctrl-c": (EventKind.EXCEPTION, INTERRUPT)}
        said: tuple[LogEvent, ...] = ()
        if ends[rank] in kinds:
            kind, text = kinds[ends[rank]]
            said = (LogEvent(kind=kind, rank=rank, text=text, source="r.log", line=9, values={"type": text}),)
        log = RankLog(source="r.log", events=said) if said else None
        stacks = tuple(replace(stack, reason=later or "demand") for stack in record.stacks)
        return replace(record, heartbeat=beat, dumps=tuple(dumps), stacks=stacks, log=log, is_gone=True)

    return replace(run, ranks={rank: one(rank, record) for rank, record in run.ranks.items()})


def late(*, ends: Mapping[int, str], waited_s: float = 0.4, caught: bool = False) -> Verdict:
    """Rank 0 has yet to issue what ranks 1 and 2 wait in; then all processes end, and are gone when they are looked at."""
    run = job("0: all_reduce@1 all_reduce@2\n1 2: all_reduce@1 all_reduce@2 all_reduce@3?")
    return diagnose(ended(run, ends, waited_s, caught=caught))[0]


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({0: "sigterm", 1: "sigterm", 2: "sigterm"}, "all ranks were told to end (SIGTERM)"),
        ({0: "ctrl-c", 1: "ctrl-c", 2: "ctrl-c"}, "all ranks were interrupted (ctrl-c)"),
    ],
)
def test_ended_from_outside_while_it_went_on(ends: dict[int, str], words: str, caught: bool) -> None:
    top = late(ends=ends, caught=caught)
    assert (top.verdict, top.culprits) == ("RUNNING", ())
    assert top.headline == f"{words}; until then the job went on"


@pytest.mark.parametrize("waited_s", [0.4, 40.0])
def test_some_ended_from_outside(waited_s: float) -> None:
    """They may have been the cause."""
    run = job("0: all_reduce@1 all_reduce@2\n1 2: all_reduce@1 all_reduce@2 all_reduce@3?\nat 0: /job/data.py 7 load")
    top = diagnose(ended(run, {0: "sigterm", 1: "closed", 2: "closed"}, waited_s))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (0,))
    assert top.headline.startswith("rank 0 was told to end (SIGTERM)")


def test_ended_from_outside_in_a_long_wait() -> None:
    top = late(ends=dict.fromkeys(range(3), "sigterm"), waited_s=40)
    assert (top.verdict, top.suspects) == ("INSUFFICIENT_DATA", (0,))
    assert late(ends=dict.fromkeys(range(3), "sigterm"), waited_s=900).culprits == (0,)


@pytest.mark.parametrize("end", ["", "ctrl-c"])
def test_who_does_not_hear_a_signal_hangs(end: str) -> None:
    """A rank that neither ended nor lost a connection is no proof that the others' end was the first."""
    ranks = {0: end, 1: "sigterm", 2: "sigterm"}
    run = ended(job("0: all_reduce@1\n1 2: all_reduce@1 all_reduce@2?"), ranks, 0.4)
    assert (told_to_end(run) is None) is (end == "")


LINE = "[default{0}]:2026-11-28 17:18:{1:02d},250 INFO [rank {0}] train: step {2}\n"
TOLD = (
    "W1128 17:18:{:02d}.563000 4100 torch/distributed/elastic/agent/server/api.py:753] "
    "Received 15 death signal, shutting down workers\n"
)


@pytest.mark.parametrize(("told_s", "verdict"), [(11, "RUNNING"), (40, "INSUFFICIENT_DATA")])
def test_launcher_told_to_end_by_its_log(told_s: int, verdict: str, tmp_path: Path) -> None:
    """A step is logged every 3 s, the last one at 9 s."""
    steps = [LINE.format(rank, 3 * step, step) for step in range(4) for rank in range(2)]
    (tmp_path / "console.log").write_text("".join([*steps, TOLD.format(told_s)]))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (verdict, ())
    assert "told to end" in top.headline


@pytest.mark.parametrize("waits", [False, True])
def test_straggler_of_a_live_job_is_one_while_it_is_awaited(waits: bool) -> None:
    """Looks at a job that goes on differ in whether the slow rank has just come."""
    usual = " ".join(["all_reduce@1"] * 12)
    run = job(f"0: {usual}\n1 2: {usual}{' all_reduce@1?' if waits else ''}")
    run.ranks[0].operations["created_ns"] += SECOND * 6 // 10
    live = ended(run, dict.fromkeys(range(3), ""), 0.3)
    top = diagnose(replace(live, ranks={rank: replace(one, is_gone=False) for rank, one in live.ranks.items()}))[0]
    assert (top.verdict, top.culprits) == ("STRAGGLER", (0,))
