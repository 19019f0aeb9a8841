"""Numbers that programs write behind the labels of their launchers, and logs that are numbered as others of their ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.read.text.writers.usual_prefixes import usual_prefixes

INNER = ("[{n}] ", "{n}: ", "{n} | ", "{n} - ")
OWN = """\
Traceback (most recent call last):
  File "/job/train.py", line 30, in main
    y = table[key]
KeyError: 'lr'
"""
LAST = OWN.splitlines()[-1]
WATCHDOG = (
    "[rank{r}]:[E1120 03:25:01.203 ProcessGroupNCCL.cpp:633] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=51, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600028 milliseconds.\n"
)
LOGURU = """\
2026-03-14 03:12:01.118 | INFO     | __main__:main:20 - rank 0: step 4
2026-03-14 03:12:05.118 | ERROR    | __main__:<module>:90 - rank 2: An error has been caught in function '<module>':
Traceback (most recent call last):

> File "/job/train.py", line 90, in <module>
    main(cfg)
    │    └ {'lr': 0.1}

  File "/job/train.py", line 44, in main
    raise ValueError('negative length')

ValueError: negative length
"""
ENDS = """\
W0314 03:12:07.000000 4090 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4100 closing signal SIGTERM
W0314 03:12:07.000000 4090 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4101 closing signal SIGTERM
E0314 03:12:07.000000 4090 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 2 (pid: 4102) \
of binary: /opt/venv/bin/python
"""


def console(labels: list[str], inner: str, *, behind: str = "") -> str:
    """Six steps of processes with these labels, in turns, and what follows them."""
    lines = [f"{label}{inner.format(n=n)}step {step}\n" for step in range(6) for n, label in enumerate(labels)]
    return "".join(lines) + behind


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("label", ["[default{n}]:", "[trainer{n}]:", "trainer-{n}  | "])
def test_a_number_behind_a_launchers_label_is_the_rank(tmp_path: Path, label: str, inner: str) -> None:
    labels = [label.format(n=n) for n in range(4)]
    for number, form in ((1, labels[1]), (3, f"{labels[3]}{inner.format(n=3)}")):
        behind = "".join(f"{form}{line}\n" for line in OWN.splitlines())
        (tmp_path / "console.txt").write_text(console(labels, inner, behind=behind))
        assert first_verdict(tmp_path).culprits == (number,)
    (tmp_path / "console.txt").write_text(console(labels, inner))
    assert first_verdict(tmp_path).verdict == VerdictKind.RUNNING


def test_places_of_two_hosts_are_told_apart_by_the_rank(tmp_path: Path) -> None:
    labels = [f"[default{n % 2}]:" for n in range(4)]
    behind = "".join(f"[default1]:[3] {line}\n" for line in OWN.splitlines())
    (tmp_path / "console.txt").write_text(console(labels, INNER[0], behind=behind))
    assert first_verdict(tmp_path).culprits == (3,)


def test_what_counts_epochs_or_starts_processes_is_no_rank() -> None:
    epochs = [f"[default{rank}]:[{epoch}] loss 1.0" for epoch in range(6) for rank in range(4)]
    assert usual_prefixes(epochs)[0] == ()
    of_one = [f"[default0]:[{epoch}] loss 1.0" for epoch in range(6)]
    assert usual_prefixes(of_one)[0] == ()
    of_srun = [f"{task}: [default{rank}]:step 1" for _ in range(3) for task in range(2) for rank in range(2)]
    assert usual_prefixes(of_srun)[0] == ("srun",)
    of_a_node = [f"[default{rank - 8}]:[{rank}] step 1" for _ in range(3) for rank in range(8, 12)]
    assert usual_prefixes(of_a_node)[0] == ("inner",)
    beside = [f"[default{rank - 9}]:[{rank}] step 1" for _ in range(3) for rank in range(9, 13)]
    assert usual_prefixes(beside)[0] == (), "a node's ranks begin at a multiple of their number"


@pytest.mark.parametrize("other", [2, 0])
def test_a_log_is_numbered_as_the_others_are(tmp_path: Path, other: int) -> None:
    for rank in (0, 2):
        (tmp_path / f"worker-{rank}.log").write_text(f"step 1\n{WATCHDOG.format(r=rank if other else 2 - rank)}")
    (tmp_path / "worker-1.log").write_text(f"step 1\n{OWN}")
    assert first_verdict(tmp_path).culprits == ((1,) if other else ())


@pytest.mark.parametrize("error", ["TimeoutError: timed out", "asyncio.exceptions.TimeoutError", "_queue.Empty"])
def test_a_wait_is_not_given_up_for_ranks_that_wait_themselves(tmp_path: Path, error: str) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(f"step 1\n{WATCHDOG.format(r=rank)}")
    (tmp_path / "rank_1.log").write_text(f"step 1\n{OWN.replace(LAST, error)}")
    assert first_verdict(tmp_path).culprits == (1,)
    (tmp_path / "rank_2.log").write_text("step 1\n")
    top = first_verdict(tmp_path)
    assert (top.culprits, top.suspects) == ((), (1, 2))


def test_an_announced_error_is_that_of_who_ended_by_it(tmp_path: Path) -> None:
    """Unless steps follow: then somebody logged it and went on."""
    (tmp_path / "console.log").write_text(LOGURU + ENDS)
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits, top.file, top.line) == (VerdictKind.RANK_DIED, (2,), "/job/train.py", 44)
    (tmp_path / "console.log").write_text(f"{LOGURU}2026-03-14 03:12:06.118 | INFO | __main__:main:20 - step 5\n{ENDS}")
    assert first_verdict(tmp_path).culprits == ()
