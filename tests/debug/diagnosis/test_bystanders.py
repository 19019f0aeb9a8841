"""Ranks that look as if they had not come, and are not at fault: slow ones, interrupted ones, those that came and failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.diagnosis.rank_frozen import frozen
from titan_ckpt.debug.incident.frames import hang_stack
from titan_ckpt.debug.incident.kinds import DumpKind, EventKind
from titan_ckpt.debug.incident.records import OPERATION, Dump, Exit, Frame, Heartbeat, LogEvent, RankLog, Run, Verdict
from titan_ckpt.debug.read.assemble import RankEvidence, _went_on
from titan_ckpt.debug.read.stacks import parse_stacks

SITE = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
IMPORTING = """\
Thread 0x01 [MainThread] (most recent call first):
  File "/lib/python3.11/{}
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/job/train.py", line 3 in <module>
"""


def judged(folder: Path, **texts: str) -> Verdict:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return diagnose(open_run(str(folder)))[0]


def raised(error: str, line: int, below: str = "") -> str:
    inside = f'  File "{SITE}", line 99, in {below}\n    work.wait()\n' if below else ""
    return (
        f'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in <module>\n    step()\n{inside}'
        f"RuntimeError: [gloo/transport/tcp/pair.cc:553] {error}\n"
    )


TIMED_OUT = "Timed out waiting 45000ms for recv operation to complete"


@pytest.mark.parametrize("later", ['dataclasses.py", line 580 in _init_fn', None])
def test_a_slow_import_holds_no_gil(later: str | None) -> None:
    """The C timer fired since the machine is crowded: Python ran on in between, or nothing shows that it did not."""
    run = job("0 1: all_reduce@1")
    texts = {"gil": IMPORTING.format('dataclasses.py", line 433 in _create_fn')}
    if later is not None:
        texts["stall"] = IMPORTING.format(later)
    stacks = tuple(parse_stacks(text, reason, reason) for reason, text in texts.items())
    record = replace(run.ranks[0], stacks=stacks, process_state="R (running)")
    assert frozen(run, record, False) is None


def test_a_call_that_stays_the_innermost_holds_it() -> None:
    run = job("0 1: all_reduce@1")
    text = IMPORTING.format('ctypes/__init__.py", line 20 in call')
    stacks = tuple(parse_stacks(text, reason, reason) for reason in ("gil", "stall"))
    assert frozen(run, replace(run.ranks[0], stacks=stacks, process_state="R (running)"), False) is not None


def with_event(run: Run, rank: int, event: LogEvent, code: int = 1) -> Run:
    ended = Exit(rank=rank, code=code, source="e", is_first=True)
    log = RankLog(source="l", events=(event,))
    return replace(run, ranks={**run.ranks, rank: replace(run.ranks[rank], log=log, exit=ended)})


def test_the_one_that_was_interrupted_died_of_it() -> None:
    run = job("0 2: all_reduce@1 all_reduce@1?\n1: all_reduce@1")
    frame = Frame(file="/job/train.py", line=9, function="fetch")
    values = {"type": "KeyboardInterrupt"}
    event = LogEvent(
        kind=EventKind.EXCEPTION, rank=1, text="KeyboardInterrupt", source="l", line=1, frame=frame, values=values
    )
    top = diagnose(with_event(run, 1, event))[0]
    assert (top.verdict, top.subtype, top.culprits, top.line) == ("RANK_DIED", "signal", (1,), 9)


def test_abort_in_its_own_code_is_a_death() -> None:
    run = job("0 2: all_reduce@1 all_reduce@1?\n1: all_reduce@1\nat 1: /job/native.py 7 run")
    stacks = tuple(replace(stack, reason="fatal abort") for stack in run.ranks[1].stacks)
    top = diagnose(replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], stacks=stacks)}))[0]
    assert (top.verdict, top.culprits, top.signal) == ("RANK_DIED", (1,), "SIGABRT")


@pytest.mark.parametrize("call", ["init_process_group", "barrier"])
def test_who_failed_in_init_or_passed_it_had_come(call: str) -> None:
    """After a restart gloo finds addresses of the attempt before: one rank fails or goes on, the others wait in there."""
    waits = "".join(f"at {rank}: {SITE} 1700 init_process_group\n" for rank in (0, 1))
    run = job(f"0 1:\n2:{'' if call == 'init_process_group' else ' barrier@5?'}\n{waits}")
    refused = LogEvent(
        kind=EventKind.COMM_CLOSED, rank=2, text="connectFullMesh failed: Connection refused", source="l", line=1,
        values={"type": "RuntimeError", "call": call},
    )  # fmt: skip
    top = diagnose(with_event(run, 2, refused))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("PG_INIT_HANG", (), ())


def test_at_the_same_line_nobody_differs(tmp_path: Path) -> None:
    """A traceback that ends in the program's line does not name the call that another rank's names."""
    told = {f"rank_{rank}": raised(TIMED_OUT, 20, "all_to_all_single" if rank == 2 else "") for rank in range(3)}
    assert judged(tmp_path, **told).culprits == ()


@pytest.mark.parametrize("odd", [{0}, {0, 1}])
def test_who_got_its_part_of_an_exchange_goes_on(odd: set[int], tmp_path: Path) -> None:
    told = {
        f"rank_{rank}": raised(TIMED_OUT, 20, "all_to_all_single")
        if rank in odd
        else raised(TIMED_OUT, 30, "all_reduce")
        for rank in range(3)
    }
    assert judged(tmp_path, **told).culprits == ()


def test_interrupt_of_a_job_that_its_user_ended(tmp_path: Path) -> None:
    agent = "W1122 18:34:44 7 torch/distributed/elastic/agent/server/api.py:753] Received 2 death signal, shutting down workers\n"
    busy = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in fetch\n    time.sleep(9)\nKeyboardInterrupt\n'
    closed = raised("Connection closed by peer [127.0.0.1]:1", 20, "all_reduce")
    top = judged(tmp_path, rank_0=closed, rank_1=busy, rank_2=closed, console=agent)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())


def test_a_rank_in_backward_when_it_was_interrupted_may_wait(tmp_path: Path) -> None:
    busy = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 9, in fetch\n    loss.backward()\n'
        '  File "/lib/python3.11/site-packages/torch/_tensor.py", line 9, in backward\n    run()\nKeyboardInterrupt\n'
    )
    closed = raised(TIMED_OUT, 20, "all_reduce")
    assert judged(tmp_path, rank_0=closed, rank_1=busy, rank_2=closed).culprits == ()


@pytest.mark.parametrize(("newest", "is_stale"), [(5, False), (6, True)])
def test_stacks_of_a_rank_that_went_on_are_old(newest: int, is_stale: bool) -> None:
    dump = Dump(source="d", kind=DumpKind.FLIGHT_RECORDER, reason="demand", version="2.10", num_operations=1)
    seen, box = np.zeros(1, OPERATION), np.zeros(2, OPERATION)
    seen["created_ns"], box["created_ns"] = 5, [5, newest]
    assert _went_on(RankEvidence(dumps=[(dump, seen)]), box, "demand") == is_stale


CAUGHT = 'Traceback (most recent call last):\n  File "/job/t.py", line {}, in post\nOSError: refused\n'


@pytest.mark.parametrize(
    ("lines", "record", "after", "culprits"),
    [
        ((5, 5, 5), "", "INFO next epoch\n", ()),
        ((5, 5, 5), "12:00:0{} ERROR tracker: try later\n", "", ()),
        ((5, 6, 7), "12:00:0{} ERROR tracker: try later\n", "", (1,)),
    ],
)
def test_an_error_logged_again_and_again_is_caught(
    lines: tuple[int, ...], record: str, after: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """Unless the last one is the last that the rank wrote, and no record announced it as those before."""
    told = "".join(record.format(number) + CAUGHT.format(line) for number, line in enumerate(lines)) + after
    assert judged(tmp_path, rank_0="started\n", rank_1=told, rank_2="started\n").culprits == culprits


@pytest.mark.parametrize("after", ["", "[W1122 12:00:00.1 WorkerServer.cpp:144] [c10d] Server shutting down\n"])
@pytest.mark.parametrize("times", [2, 3])
def test_an_error_that_came_before_may_be_caught_again(times: int, after: str, tmp_path: Path) -> None:
    """Or it is the last try that ends the rank: its peers' errors, or a launcher, would show that."""
    logs = {"rank_0": "started\n", "rank_1": CAUGHT.format(5) * times + after, "rank_2": "started\n"}
    top = judged(tmp_path, **logs)
    assert (top.culprits, top.suspects) == ((), (1,))
    (tmp_path / "rank_2.log").write_text(
        raised("RuntimeError: Connection closed by peer [10.1.2.3]:40012", 20, "all_reduce")
    )
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (1,)


def test_an_error_that_was_tried_again_may_end_the_rank(tmp_path: Path) -> None:
    """Three tries, each announced; the fourth traceback is that of the interpreter."""
    told = (
        ("12:00:01 ERROR tracker: try later\n" + CAUGHT.format(5)) * 3 + "12:00:09 ERROR giving up\n" + CAUGHT.format(5)
    )
    assert judged(tmp_path, rank_0="started\n", rank_1=told, rank_2="started\n").suspects == (1,)


@pytest.mark.parametrize(("status", "verdict"), [(0, "HEALTHY"), (1, "RANK_DIED")])
def test_a_process_that_gave_zero_had_caught_its_errors(status: int, verdict: str) -> None:
    run = job("0 1 2: all_reduce@1 all_reduce@1")
    frame = Frame(file="/job/t.py", line=5, function="post")
    event = LogEvent(
        kind=EventKind.EXCEPTION, rank=1, text="OSError", source="l", line=1, frame=frame, values={"type": "OSError"}
    )
    ranks = {
        rank: replace(
            record, heartbeat=Heartbeat(step=1, phase="", phase_ns=0, alive_ns=1, source="b", is_stopped=True, status=0)
        )
        for rank, record in run.ranks.items()
    }
    beat = replace(ranks[1].heartbeat, status=status) if ranks[1].heartbeat else None
    ranks[1] = replace(ranks[1], log=RankLog(source="l", events=(event,)), heartbeat=beat)
    assert diagnose(replace(run, ranks=ranks))[0].verdict == verdict


@pytest.mark.parametrize(
    ("late_s", "verdict", "culprits"), [(60, "STUCK_ON_CPU", (2,)), (20, "STARTED_NOT_COMPLETED", ())]
)
def test_who_came_when_the_others_had_given_up(late_s: int, verdict: str, culprits: tuple[int, ...]) -> None:
    run = job("0 1 2: all_reduce@1 all_reduce@1?")
    table = run.ranks[2].operations.copy()
    table["created_ns"][-1] += late_s * 10**9
    gave_up = LogEvent(
        kind=EventKind.COMM_TIMEOUT, rank=0, text=TIMED_OUT, source="l", line=1, values={"type": "RuntimeError"}
    )
    ranks = {
        rank: replace(record, log=RankLog(source="l", events=(gave_up,)))
        for rank, record in run.ranks.items()
        if rank < 2
    }
    top = diagnose(replace(run, ranks={**ranks, 2: replace(run.ranks[2], operations=table)}))[0]
    assert (top.verdict, top.culprits) == (verdict, culprits)


def test_a_connection_that_a_rank_lost_and_did_without(tmp_path: Path) -> None:
    """The Hub's, a tracker's, a store's: it trained on, so that no peer is missed for it."""
    steps = "".join(f"step {step} loss 2.0\n" for step in range(9))
    lost = raised("Connection reset by peer", 7).replace("RuntimeError", "requests.exceptions.ConnectionError")
    top = judged(tmp_path, rank_0=lost + steps, rank_1=steps)
    assert (top.verdict, top.culprits) == ("RUNNING", ())


@pytest.mark.parametrize(("status", "is_well"), [(0, True), (1, False)])
def test_what_a_daemon_thread_waited_for_at_the_end(status: int, is_well: bool) -> None:
    """All processes gave 0 to exit(3); a thread of two of them was in a barrier that the third one's did not come to."""
    run = job("0: all_reduce@1\n1 2: all_reduce@1 x:barrier@9?\ngroup x: 0 1 2")
    beat = Heartbeat(step=1, phase="", phase_ns=0, alive_ns=1, source="b", is_stopped=True, status=0)
    beats = {0: beat, 1: beat, 2: replace(beat, status=status)}
    ranks = {rank: replace(record, heartbeat=beats[rank]) for rank, record in run.ranks.items()}
    assert (diagnose(replace(run, ranks=ranks))[0].verdict == "HEALTHY") == is_well


WRITING = """\
Thread 0x01 [MainThread] (most recent call first):
  File "/lib/python3.11/random.py", line 812 in randbytes
  File "/lib/python3.11/secrets.py", line 46 in token_bytes
  File "/lib/python3.11/secrets.py", line 59 in token_hex
  File "/pkg/titan_ckpt/private_files.py", line 92 in _create
  File "/pkg/titan_ckpt/debug/record/recorder.py", line 202 in _at_exit
"""


def test_a_rank_that_writes_its_dump_hangs_nowhere() -> None:
    """SIGTERM came while the recorder wrote of the error that ended the rank: this is not where it was."""
    assert (
        hang_stack(replace(job("0 1: all_reduce@1").ranks[0], stacks=(parse_stacks(WRITING, "s", "sigterm"),))) is None
    )


REFUSED = "[pair.cc:152] timed out connecting: SO_ERROR: Connection refused"
CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:34486"
SOURCE = "    backend_class = ProcessGroupGloo(\n                    ^^^^^^^^^^^^^^^^^\n"


@pytest.mark.parametrize(("error", "culprits"), [(REFUSED, ()), (CLOSED, (1,))])
def test_who_gave_up_connecting_explains_the_closed_connections(
    error: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    first, last = (raised(f"Gloo connectFullMesh failed with {text}", 9) for text in (CLOSED, error))
    for rank, text in enumerate((first, "", last)):
        log = tmp_path / "none_x" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    top = diagnose(open_run(tmp_path))[0]
    assert (top.culprits, top.is_undecided) == (culprits, not culprits)


def test_a_source_line_with_an_open_parenthesis_is_not_wrapped(tmp_path: Path) -> None:
    text = raised("Gloo connectFullMesh failed", 9).replace("    step()\n", SOURCE)
    (tmp_path / "rank_0.log").write_text(text)
    log = open_run(tmp_path).ranks[0].log
    assert log is not None
    assert log.events[-1].text.startswith("RuntimeError: [gloo")


SAMPLE = (
    "[rank1] Traceback (most recent call last):\n"
    '[rank1]   File "{}", line 3, in <module>\n'
    "[rank1] NameError: name 'f' is not defined\n"
)


@pytest.mark.parametrize(
    ("file", "after", "is_fault"),
    [
        ("<string>", "[rank1] reward: mean 0.41\n", False),
        ("<string>", "", True),
        ("<string>", "[rank1] [W1127 10:00:00.1 ProcessGroup.cpp:12] destroyed\n", True),
        ("/job/train.py", "[rank1] reward: mean 0.41\n", True),
    ],
)
def test_a_sample_of_code_that_failed_ended_nobody(file: str, after: str, *, is_fault: bool, tmp_path: Path) -> None:
    text = f"[rank1] reward: sample 17 failed with:\n{SAMPLE.format(file)}{after}[rank0] iter 8 kl 0.01\n"
    assert (judged(tmp_path, job=text).culprits == (1,)) == is_fault
