"""Texts in the forms in which people keep and paste them: other encodings, margins, broken lines, pages with logs inside."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.errors import NotFoundError

WATCHDOG = (
    "[rank{rank}]:[E1218 20:27:10.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600060 milliseconds before timing "
    "out.\n"
)
ERROR = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    f(x)\nTypeError: bad operand\n'


def judged(folder: Path, files: dict[str, str | bytes]) -> Verdict:
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return diagnose(open_run(str(folder)))[0]


def with_waiting(odd: str | bytes, rank: int = 1, size: int = 3) -> dict[str, str | bytes]:
    """Logs of ranks whose watchdogs give up, but for one."""
    return {f"rank_{one}.log": odd if one == rank else WATCHDOG.format(rank=one) for one in range(size)}


@pytest.mark.parametrize(("mark", "name"), [(codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")])
def test_logs_in_utf_16_are_read(mark: bytes, name: str, tmp_path: Path) -> None:
    top = judged(tmp_path, with_waiting(mark + ERROR.encode(name)))
    assert (top.verdict, top.culprits, top.file, top.line) == ("RANK_DIED", (1,), "/job/train.py", 9)


def test_a_long_log_in_utf_16_is_read_to_its_end(tmp_path: Path) -> None:
    lines = "".join(f"step {step} of a long run, loss 2.1\r\n" for step in range(80_000))
    top = judged(tmp_path, with_waiting(codecs.BOM_UTF16_LE + (lines + ERROR).encode("utf-16-le")))
    assert (top.verdict, top.culprits, top.line) == ("RANK_DIED", (1,), 9)


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 60, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/job/fetch.py", line 17, in fetch
    |     raise ValueError('corrupt shard')
    | ValueError: corrupt shard
    +------------------------------------
"""


def test_an_exception_group_is_the_end_of_its_rank(tmp_path: Path) -> None:
    top = judged(tmp_path, with_waiting(GROUP))
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "python_exception", (1,))
    assert (top.file, top.line) in {("/job/train.py", 60), ("/job/fetch.py", 17)}


@pytest.mark.parametrize(
    "text",
    ["*** stack smashing detected ***: terminated", "double free or corruption (!prev)", "free(): invalid pointer",
     "malloc(): corrupted top size", "corrupted size vs. prev_size",
     "python: /build/indexed.cc:312: void Reader::seek(size_t): Assertion `offset < size_' failed."],
)  # fmt: skip
def test_glibc_says_why_a_rank_aborted(text: str, tmp_path: Path) -> None:
    top = judged(tmp_path, with_waiting(f"step 3\n{text}\n"))
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "signal", (1,))


@pytest.mark.parametrize(
    "text", ["training with malloc(): tuned", "see: double free or corruption", "Assertion `x` failed."]
)
def test_talk_of_aborts_is_no_abort(text: str, tmp_path: Path) -> None:
    top = judged(tmp_path, {"rank_0.log": f"step 1\n{text}\nstep 2\n", "rank_1.log": "step 1\nstep 2\n"})
    assert (top.verdict, top.culprits) == ("RUNNING", ())


def test_ranks_that_never_joined_are_named(tmp_path: Path) -> None:
    report = "[rank{rank}]:[E1218 20:27:10.2 ProcessGroupNCCL.cpp:1937] \n\t - [{rank}] Timeout at collective: ALLREDUCE, #1\n"
    report += "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. "
    report += "They never joined any collectives\n"
    top = judged(tmp_path, {"job.log": "".join((WATCHDOG + report).format(rank=rank) for rank in range(3))})
    assert top.culprits == (3,)
    assert "collective #1" in top.headline


def test_prterun_breaks_its_line_before_the_signal(tmp_path: Path) -> None:
    text = "step 3\nprterun noticed that process rank 2 with PID 1234 on node n2 exited on\nsignal 9 (Killed).\n"
    top = judged(tmp_path, {"job.log": text})
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_an_error_of_oneccl_is_a_symptom_of_a_peer_s(tmp_path: Path) -> None:
    lost = ERROR.replace(
        "TypeError: bad operand", "RuntimeError: oneCCL: ccl_request.cpp:12 wait: EXCEPTION: remote closed"
    )
    top = judged(tmp_path, {"rank_0.log": lost, "rank_1.log": ERROR, "rank_2.log": lost})
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))


def test_a_page_with_a_pasted_log_is_read_if_all_there_is(tmp_path: Path) -> None:
    page = "### It hangs\n```\n" + "".join(WATCHDOG.format(rank=rank) for rank in (0, 1, 3)) + "[rank2]: "
    top = judged(tmp_path, {"issue.md": page + "\n[rank2]: ".join(ERROR.splitlines()) + "\n```\n"})
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_pages_beside_logs_and_pages_without_any_are_left_out(tmp_path: Path) -> None:
    page = "about\n```\n" + ERROR + "```\n"
    assert judged(tmp_path, {"about.md": page, "rank_0.log": "step 1\nstep 2\n"}).verdict == "RUNNING"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "about.md").write_text("how the run was set up\n")
    with pytest.raises(NotFoundError):
        open_run(str(alone))


def test_the_exception_of_a_lost_thread_is_told_of_a_stuck_rank(tmp_path: Path) -> None:
    thread = "Exception in thread Thread-3 (prefetch):\n" + ERROR + "step 4\n"
    for rank, text in ((0, WATCHDOG.format(rank=0)), (1, "step 3\n" + thread), (2, WATCHDOG.format(rank=2))):
        (tmp_path / f"rank_{rank}.log").write_text(text)
    run = open_run(str(tmp_path))
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (1,))
    assert any("TypeError" in item.text and item.rank == 1 for item in top.evidence)
    assert any(event.kind == EventKind.EXCEPTION for event in run.ranks[1].events)
