"""torchrun's log folder and console, as jobs without our recorder leave them: what an empty log means, and an absent row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import VerdictKind

CLOSED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 30, in <module>
[rank{rank}]:     loss.backward()
[rank{rank}]:   File "/x/torch/_tensor.py", line 623, in backward
[rank{rank}]:     torch.autograd.backward(
[rank{rank}]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3994.
"""
UNSET = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 12, in <module>
[rank{rank}]:     store.get("data/7")
[rank{rank}]: torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//data/{key}
"""
TIMED_OUT = CLOSED.replace(
    "pair.cc:553] Connection closed by peer [127.0.0.1]:3994.", "x.cc:1] Timed out waiting 12000ms for recv"
)
ROW = """\
[{number}]:
  time      : 2026-11-23_05:03:35
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
"""
AGENT = "1123 05:03:35.144000 13459 torch/distributed/elastic/multiprocessing/api.py:1028] "
CONSOLE = """\
{told}\
E1123 05:03:35.433000 13459 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 100)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
{others}------------------------------------------------------------
Root Cause (first observed failure):
{first}============================================================
"""


def folder(path: Path, errors: Mapping[int, str], codes: Mapping[int, int]) -> str:
    """A log folder of one host; `codes`: of the ranks that torchrun's table lists, the first to fail first. It stopped those with
    -15, and those without a code but the last."""
    for rank, text in errors.items():
        of_rank = path / "tr" / "none_x1y2" / "attempt_0" / str(rank)
        of_rank.mkdir(parents=True)
        (of_rank / "stderr.log").write_text(text.replace("{rank}", str(rank)))
        (of_rank / "stdout.log").write_text("")
    rows = [ROW.format(number=n, rank=rank, code=code, pid=100 + rank) for n, (rank, code) in enumerate(codes.items())]
    stopped = [rank for rank in sorted(errors)[:-1] if codes.get(rank, -15) == -15] + [
        rank for rank in sorted(errors)[-1:] if codes.get(rank) == -15
    ]
    told = "".join(f"W{AGENT}Sending process {100 + rank} closing signal SIGTERM\n" for rank in stopped)
    (path / "console.log").write_text(CONSOLE.format(told=told, first=rows[0], others="".join(rows[1:])))
    return str(path)


def test_the_last_rank_without_a_row_had_ended_well(tmp_path: Path) -> None:
    run = open_run(folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: ""}, {0: 1, 1: -15}))
    ended = run.ranks[2].exit
    assert ended is not None
    assert ended.code == 0
    top = diagnose(run)[0]
    assert (top.verdict, top.subtype, top.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, "finished_early", (2,))


def test_a_rank_that_torchrun_stopped_has_not_ended_well(tmp_path: Path) -> None:
    run = open_run(folder(tmp_path, {0: CLOSED, 1: "", 2: ""}, {0: 1}))
    assert [rank for rank, record in run.ranks.items() if record.exit and record.exit.code == 0] == []


def test_rows_without_times_do_not_list_all_that_failed(tmp_path: Path) -> None:
    folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: ""}, {0: 1, 1: -15})
    console = tmp_path / "console.log"
    console.write_text(console.read_text().replace("  time      : 2026-11-23_05:03:35\n", ""))
    assert open_run(str(tmp_path)).ranks[2].exit is None


def test_logs_of_two_hosts_leave_open_how_others_ended(tmp_path: Path) -> None:
    folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: ""}, {0: 1, 1: -15})
    other = tmp_path / "tr" / "none_z3" / "attempt_0" / "0"
    other.mkdir(parents=True)
    (other / "stderr.log").write_text("")
    assert all(record.exit is None or record.exit.code != 0 for record in open_run(str(tmp_path)).ranks.values())


def test_an_empty_error_log_is_a_rank_that_wrote_no_error(tmp_path: Path) -> None:
    run = open_run(folder(tmp_path, {0: TIMED_OUT, 1: "", 2: TIMED_OUT}, {0: 1, 1: -15, 2: 1}))
    assert run.ranks[1].log is not None
    assert run.ranks[1].events == ()
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits) == (VerdictKind.STUCK_ON_CPU, (1,))


def test_an_error_that_was_logged_before_a_good_end_is_named(tmp_path: Path) -> None:
    logged = "2026-11-23 05:03:30,1 ERROR train: training failed\nTraceback (most recent call last):\n"
    logged += '  File "/job/train.py", line 77, in main\n    batch["ids"]\nKeyError: \'ids\'\n'
    top = diagnose(open_run(folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: logged}, {0: 1, 1: -15})))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, (2,))
    assert "after it logged KeyError at /job/train.py:77" in top.headline


def test_a_rank_that_was_stopped_may_have_waited_too(tmp_path: Path) -> None:
    top = diagnose(
        open_run(folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: "", 3: "", 4: ""}, {0: 1, 1: 1, 2: -15, 3: -15}))
    )[0]
    assert (top.subtype, top.culprits) == ("finished_early", (4,))


def test_of_several_stopped_ranks_none_is_accused(tmp_path: Path) -> None:
    top = diagnose(
        open_run(folder(tmp_path, {0: TIMED_OUT, 1: TIMED_OUT, 2: "", 3: ""}, {0: 1, 1: 1, 2: -15, 3: -15}))
    )[0]
    assert (top.culprits, top.suspects) == ((), (2, 3))


def test_a_rank_that_closed_its_connections_and_lived_left_early(tmp_path: Path) -> None:
    top = diagnose(open_run(folder(tmp_path, {0: CLOSED, 1: CLOSED, 2: ""}, {0: 1, 1: 1, 2: -15})))[0]
    assert (top.verdict, top.subtype, top.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, "finished_early", (2,))


def test_a_key_of_the_programs_own_names_no_rank(tmp_path: Path) -> None:
    unset = UNSET.replace("{key}", "7").replace("data/7", "data/0")
    top = diagnose(open_run(folder(tmp_path, {0: TIMED_OUT, 1: unset}, {0: 1, 1: 1})))[0]
    assert top.verdict != VerdictKind.PG_INIT_HANG
    assert 0 not in top.culprits


EXITED = {"outer": "the validation set is empty\n", "empty": ""}


@pytest.mark.parametrize("name", EXITED)
def test_rank_that_left_by_sys_exit_is_named(tmp_path: Path, name: str) -> None:
    top = diagnose(open_run(folder(tmp_path, {0: "", 1: EXITED[name], 2: "", 3: ""}, {1: 1, 3: -15})))[0]
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "exit_code", (1,))
    assert any(EXITED[name].strip() in item.text for item in top.evidence)


def test_exit_without_its_standard_error_is_nobodys(tmp_path: Path) -> None:
    path = Path(folder(tmp_path, {0: "", 1: "", 2: "", 3: ""}, {1: 1, 3: -15}))
    for log in path.rglob("stderr.log"):
        log.unlink()
    assert diagnose(open_run(path))[0].culprits == ()


def test_exit_that_peers_felt_has_its_code(tmp_path: Path) -> None:
    top = diagnose(open_run(folder(tmp_path, {0: CLOSED, 1: "no tokenizer\n", 2: CLOSED}, {1: 1, 0: 1, 2: 1})))[0]
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "exit_code", (1,))


HANGS = ("watchdog: no progress for 600 s, leaving", "step timed out", "leaving, for other ranks have failed")


@pytest.mark.parametrize("text", HANGS)
def test_rank_that_leaves_a_hang_is_not_accused(tmp_path: Path, text: str) -> None:
    top = diagnose(open_run(folder(tmp_path, {0: "", 1: f"{text}\n", 2: "", 3: ""}, {1: 1, 3: -15})))[0]
    assert top.culprits == ()


def test_silent_exit_after_a_standstill_is_not_accused(tmp_path: Path) -> None:
    path = Path(folder(tmp_path, {0: "", 1: "", 2: "", 3: ""}, {1: 1, 3: -15}))
    steps = "".join(f"2026-11-23 04:50:{step:02d} step {step}\n" for step in range(9))
    for log in path.rglob("stdout.log"):
        log.write_text(steps)
    assert diagnose(open_run(path))[0].culprits == ()


def test_error_without_words_has_those_of_its_cause(tmp_path: Path) -> None:
    chained = CLOSED.splitlines()[0] + (
        '\n[rank{rank}]:   File "/job/train.py", line 30, in <module>\n[rank{rank}]: ValueError: bad shard\n\n'
        "[rank{rank}]: The above exception was the direct cause of the following exception:\n\n"
        '[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "/job/train.py", line 32, in <module>\n'
        "[rank{rank}]: RuntimeError: \n[rank{rank}]:         Failed to run a stage\n"
    )
    top = diagnose(open_run(folder(tmp_path, {0: chained, 1: CLOSED}, {0: 1, 1: 1})))[0]
    assert top.culprits == (0,)
    assert "ValueError: bad shard" in top.evidence[0].text
