"""Attempts in one console of torchrun, which tells at WARNING only that a worker failed: what an earlier one left is history."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

AGENT = "1128 17:07:0{}.155000 15973 torch/distributed/elastic/"
FAILED = (
    "E"
    + AGENT
    + "multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: {} (pid: {}) of binary: /opt/venv/bin/python\n"
)
CLOSING = "W" + AGENT + "multiprocessing/api.py:1028] Sending process {} closing signal SIGTERM\n"
RENDEZVOUS = (
    "I" + AGENT + "agent/server/api.py:525] [default] Rendezvous complete for workers. Result:\n  restart_count={}\n"
)
STEPS = "".join(f"[default{rank}]:step {step}\n" for step in range(3) for rank in range(3))
RAISED = (
    '[default1]:Traceback (most recent call last):\n[default1]:  File "/job/train.py", line 6, in <module>\n'
    '[default1]:    raise ValueError("no such file")\n[default1]:ValueError: no such file\n'
)
REFUSED = "[default{}]:RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused\n"
FIRST = STEPS + RAISED + CLOSING.format(1, 41) + CLOSING.format(1, 43) + FAILED.format(2, 1, 42)


def told(text: str, folder: Path) -> Verdict:
    (folder / "console.log").write_text(text)
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize("begin", ["", RENDEZVOUS.format(3, 1)])
@pytest.mark.parametrize("closing", ["", CLOSING.format(4, 53)])
def test_error_of_an_attempt_that_was_restarted_is_history(begin: str, closing: str, tmp_path: Path) -> None:
    second = begin + REFUSED.format(0) + REFUSED.format(2) + closing + FAILED.format(5, 0, 51)
    assert told(FIRST + second, tmp_path).culprits == ()


@pytest.mark.parametrize("later", ["", RENDEZVOUS.format(3, 0), CLOSING.format(3, 43)])
def test_error_of_the_only_attempt_is_its_rank_s(later: str, tmp_path: Path) -> None:
    top = told(FIRST + later, tmp_path)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))


def test_processes_ended_after_a_failure_are_of_its_attempt(tmp_path: Path) -> None:
    text = STEPS + RAISED + FAILED.format(1, 1, 42) + CLOSING.format(2, 41) + CLOSING.format(2, 43)
    assert told(text, tmp_path).culprits == (1,)
