"""A rank whose log just ends while the others' recorders still said something: does it run or not?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import START_NS, job
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import DumpKind, EventKind
from titan_ckpt.debug.incident.records import Heartbeat, LogEvent, RankLog, Run

WAITED = """\
2026-11-22 12:09:00,345 INFO train: step 2
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 50, in <module>
[rank{rank}]:     loss.backward()
[rank{rank}]: RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 45000ms for recv operation to complete
[rank{rank}]:[W1122 12:09:45.337107211 WorkerServer.cpp:144] [c10d] Server shutting down
"""
SILENT = "2026-11-22 12:09:00,369 INFO train: step 2\n"
CONSOLE = """\
W1122 12:09:53.389000 9 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 102 closing signal SIGTERM
{kill}E1122 12:09:53.801000 9 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 101) of binary: p
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_12:09:53
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 102)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_12:09:53
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 101)
============================================================
"""


@pytest.mark.parametrize(("code", "verdict"), [(143, "STUCK_ON_CPU"), (-15, "STUCK_ON_CPU"), (-9, "RANK_FROZEN")])
def test_a_process_that_heard_sigterm_ran(code: int, verdict: str, tmp_path: Path) -> None:
    for rank in range(3):
        log = tmp_path / "tr" / "none_x" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(SILENT if rank == 2 else WAITED.format(rank=rank))
    kill = "W1122 12:09:54.389000 9 api.py:1047] Unable to shutdown process 102 via SIGTERM, forcefully exiting via SIGKILL\n"
    (tmp_path / "console.log").write_text(CONSOLE.format(code=code, kill=kill if code == -9 else ""))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (verdict, (2,))


@pytest.mark.parametrize("kind", [EventKind.OOM, EventKind.EXCEPTION, EventKind.COMM_CLOSED])
def test_an_error_that_a_rank_logged_and_got_over_is_no_end(kind: EventKind) -> None:
    """One look at a live job: rank 1 caught an error a moment ago and works on, the others wait for it."""
    run = job("1: all_reduce@1\n0 2: all_reduce@1 all_reduce@1?")
    beat = Heartbeat(step=1, phase="", phase_ns=0, alive_ns=START_NS + 2 * 10**9, source="b")
    ranks = {rank: replace(record, heartbeat=beat) for rank, record in run.ranks.items()}
    event = LogEvent(kind=kind, rank=1, text="cache miss", source="l", line=7)
    ranks[1] = replace(ranks[1], log=RankLog(source="l", events=(event,), last_step_line=8))
    assert diagnose(replace(run, ranks=ranks))[0].verdict == "RUNNING"


@pytest.mark.parametrize(("late_s", "verdict"), [(0, "STUCK_ON_CPU"), (3, "STUCK_ON_CPU"), (30, "RANK_FROZEN")])
def test_a_late_tick_is_no_frozen_rank(late_s: int, verdict: str) -> None:
    run = job("0: all_reduce@1\n1 2: all_reduce@1 all_reduce@1?")
    ranks = {}
    for rank, record in run.ranks.items():
        alive_ns = START_NS + (600 - late_s * (rank == 0)) * 10**9
        beat = Heartbeat(step=1, phase="", phase_ns=0, alive_ns=alive_ns, source="b")
        dumps = tuple(replace(dump, kind=DumpKind.BLACK_BOX) for dump in record.dumps)
        ranks[rank] = replace(record, heartbeat=beat, dumps=dumps)
    top = diagnose(replace(run, ranks=ranks))[0]
    assert (top.verdict, top.culprits) == (verdict, (0,))


def _with_ends(text: str, ends: dict[int, Heartbeat], raised: int) -> Run:
    """A small job with black boxes: the ends of its ranks, and one that dumped for an exception as its connection closed."""
    run = job(text)
    ranks = {}
    for rank, record in run.ranks.items():
        dumps = tuple(replace(dump, kind=DumpKind.BLACK_BOX) for dump in record.dumps)
        ranks[rank] = replace(record, dumps=dumps, heartbeat=ends[rank])
    event = LogEvent(kind=EventKind.COMM_CLOSED, rank=raised, text="Connection closed by peer", source="e", line=0)
    dumped = (*ranks[raised].dumps, replace(ranks[raised].dumps[0], reason="exception"))
    ranks[raised] = replace(ranks[raised], dumps=dumped, log=RankLog(source="e", events=(event,)))
    return replace(run, ranks=ranks)


def _beat(after_ms: int, *, status: int | None = None) -> Heartbeat:
    alive_ns = START_NS + 3 * 10**9 + after_ms * 10**6
    return Heartbeat(
        step=1, phase="", phase_ns=0, alive_ns=alive_ns, source="b", is_stopped=status is not None, status=status
    )


def test_two_of_three_that_left_no_end_died() -> None:
    ends = {0: _beat(200), 1: _beat(0), 2: _beat(-100)}
    top = diagnose(_with_ends("0: all_reduce@1 all_reduce@1?\n1 2: all_reduce@1", ends, 0))[0]
    assert (top.verdict, top.culprits, top.victims) == ("RANK_DIED", (1, 2), (0,))


@pytest.mark.parametrize(
    ("status", "verdict", "culprits"),
    [(0, "SKIPPED_COLLECTIVE", (1,)), (3, "RANK_DIED", (1,)), (None, "RANK_DIED", (1,))],
)
def test_a_rank_that_ended_while_others_waited(status: int | None, verdict: str, culprits: tuple[int, ...]) -> None:
    ends = {0: _beat(200), 1: _beat(0, status=status), 2: _beat(150)}
    top = diagnose(_with_ends("1: all_reduce@1\n0 2: all_reduce@1 all_reduce@1?", ends, 0))[0]
    assert (top.verdict, top.culprits) == (verdict, culprits)
    assert top.confidence >= 0.6


@pytest.mark.parametrize(("line", "culprits"), [(4, (1, 3)), (5, (1,))])
def test_ranks_stuck_at_one_line_are_one_verdict(line: int, culprits: tuple[int, ...]) -> None:
    run = job(
        "1 3: all_reduce@1\n0 2: all_reduce@1 all_reduce@1?\nat 1: /job/data.py 4 load\n"
        + f"at 3: /job/data.py {line} load"
    )
    assert diagnose(run)[0].culprits == culprits
