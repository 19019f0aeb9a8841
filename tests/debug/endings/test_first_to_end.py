"""The rank that a launcher says to have ended first: it died, where nothing shows that it was a victim."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.records import Verdict

STEPS = "".join(f"2026-09-14 03:00:{step:02d},123 INFO step {step} loss 2.5\n" for step in range(40))
AGENT = "W0914 03:00:41.1 4700 site-packages/torch/distributed/elastic/multiprocessing/api.py:908] "
TOLD = "".join(f"{AGENT}Sending process {4710 + rank} closing signal SIGTERM\n" for rank in (0, 1, 3))
ROW = """[{place}]:
  time      : 2026-09-14_03:{minute}:41
  host      : h
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : {said}
"""
RULER = "-" * 60 + "\n"


def row(
    rank: int, *, minute: str = "00", place: int = 0, code: int = 1, said: str = "To enable traceback see: elastic"
) -> str:
    return ROW.format(rank=rank, minute=minute, place=place, code=code, pid=4710 + rank, said=said)


def table(first: str, others: str = "  <NO_OTHER_FAILURES>\n") -> str:
    return (
        f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\n{RULER}Failures:\n"
        f"{others}{RULER}Root Cause (first observed failure):\n{first}{'=' * 60}\n"
    )


def top(folder: Path, text: str) -> Verdict:
    (folder / "console.log").write_text(text)
    return first_verdict(folder)


def test_rank_that_left_alone_without_a_word_died(tmp_path: Path) -> None:
    found = top(tmp_path, STEPS + TOLD + table(row(2)))
    assert (found.verdict, found.subtype, found.culprits) == ("RANK_DIED", "exit_code", (2,))
    assert found.confidence < 0.6


PEERS = "RuntimeError: [pair.cc:547] Connection closed by peer [10.1.2.3]:40012\n"
VICTIMS = {
    "after a standstill": STEPS + TOLD + table(row(2, minute="12")),
    "where steps have no time": "".join(f"step {step} loss 2.5\n" for step in range(40)) + TOLD + table(row(2)),
    "where what ranks write goes elsewhere": TOLD + table(row(2)),
    "where each line has a label": "".join(f"[default0]:{line}\n" for line in STEPS.splitlines()) + table(row(2)),
    "with another": STEPS + TOLD.replace("4711", "4713") + table(row(2), row(1, place=1)),
    "while the others had ended": STEPS + table(row(2)),
    "whose peers were lost": STEPS + PEERS + TOLD + table(row(2)),
    "that speaks of a hang": STEPS + "no progress, leaving\n" + TOLD + table(row(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", VICTIMS)
def test_exit_code_1_accuses_nobody(tmp_path: Path, name: str) -> None:
    assert top(tmp_path, VICTIMS[name]).culprits == ()


RAISED = """Traceback (most recent call last):
    File "/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 357, in wrapper
      return f(*args, **kwargs)
    File "/w/train.py", line 66, in main
      step()
  {}
  """


def test_traceback_in_a_row_is_of_its_rank(tmp_path: Path) -> None:
    victim = row(0, said=RAISED.format("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."))
    found = top(tmp_path, table(victim, row(3, place=1, said=RAISED.format("ValueError: unknown label 'cat'"))))
    assert found.culprits == (3,)
    assert (found.evidence[0].file, found.evidence[0].line) == ("/w/train.py", 66)


def test_rows_of_victims_alone_accuse_nobody(tmp_path: Path) -> None:
    said = RAISED.format("torch.distributed.DistBackendError: NCCL communicator was aborted on rank {}.")
    rows = [row(rank, place=rank, said=said.format(rank)) for rank in (0, 3)]
    assert top(tmp_path, table(*rows)).culprits == ()


TAGGED = "".join(f"[1,{rank}]<stdout>: step {step} loss 2.5\n" for step in range(3) for rank in range(4))
OPEN_MPI = (
    "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    "the job to be terminated. The first process to do so was:\n\n  Process name: [[41241,1],3]\n  Exit code:    1\n"
)
HOROVOD = (
    "Process 3 exit with status code {0}.\n"
    + "".join(f"Process {rank} exit with status code 143.\n" for rank in range(3))
    + (
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:\nProcess name: 3\nExit code: {0}\n"
    )
)
JSRUN = "ERROR:  One or more process (first noticed rank 3) terminated with signal {} (core dumped)\n"
FIRST = {
    "Open MPI": TAGGED + OPEN_MPI, "Horovod": TAGGED + HOROVOD.format(137), "Horovod, a code": TAGGED + HOROVOD.format(3),
    "jsrun": STEPS + JSRUN.format(9),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_process_that_ended_first_died(tmp_path: Path, name: str) -> None:
    found = top(tmp_path, FIRST[name])
    assert (found.verdict, found.culprits) == ("RANK_DIED", (3,))


@pytest.mark.parametrize(
    "text",
    [
        OPEN_MPI,
        TAGGED + f"[1,3]<stderr>: {PEERS}" + OPEN_MPI,
        TAGGED + f"[1,3]<stderr>: {PEERS}" + HOROVOD.format(1),
        TAGGED + HOROVOD.format(143),
        STEPS + JSRUN.format(15),
        "python -m torch.distributed.run --nproc_per_node 4 train.py\n" + STEPS + JSRUN.format(9),
    ],
)
def test_first_that_may_be_a_victim_or_a_launcher_is_not_accused(tmp_path: Path, text: str) -> None:
    assert top(tmp_path, text).culprits == ()
