"""Hosts that Open MPI and Slurm say to be lost, where lines of the ranks say which they are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.records import Verdict


def top(folder: Path, text: str) -> Verdict:
    (folder / "job.log").write_text(text)
    return first_verdict(folder)


LABELS = {"srun": "{rank}: ", "Open MPI": "[1,{rank}]<stdout>: "}
HOSTS = ("rank={rank} world=6 host=c{host}", "rank {rank} on c{host}", "rank {rank}/6 pid 1{rank} host c{host}")
LOST = {
    "srun": "srun: error: Node failure on {}\n",
    "Open MPI": "ORTE has lost communication with a remote daemon.\n\n  Remote daemon: [[41241,0],2] on node {}\n",
}


def on_hosts(launcher: str, form: str) -> str:
    lines = (LABELS[launcher] + form for _ in range(2))
    return "".join(line.format(rank=rank, host=rank // 2) + "\n" for line in lines for rank in range(6))


@pytest.mark.parametrize("launcher", LABELS)
@pytest.mark.parametrize("form", HOSTS)
def test_ranks_of_a_lost_host_are_those_that_named_it(tmp_path: Path, launcher: str, form: str) -> None:
    found = top(tmp_path, on_hosts(launcher, form) + LOST[launcher].format("c2"))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (4, 5))


def test_host_that_a_rank_speaks_of_is_not_its_own(tmp_path: Path) -> None:
    lines = [f"{rank}: rank {rank} connects to the master, host=c9" for rank in range(4)]
    assert top(tmp_path, "\n".join([*lines, *lines, LOST["srun"].format("c9")])).culprits == ()


@pytest.mark.parametrize("launcher", LABELS)
def test_lost_host_that_no_rank_named_accuses_nobody(tmp_path: Path, launcher: str) -> None:
    assert top(tmp_path, on_hosts(launcher, HOSTS[0]) + LOST[launcher].format("c7")).culprits == ()


SRUN_ENDS = (
    "srun: error: c1: tasks 0-2: Killed\n",
    "srun: error: c1: task 0: Exited with exit code 137\nsrun: error: c1: tasks 1-2: Exited with exit code 143\n",
)


@pytest.mark.parametrize("ends", SRUN_ENDS)
@pytest.mark.parametrize("lost", [LOST["srun"], "slurmctld: error: Nodes {} not responding, setting DOWN\n"])
@pytest.mark.parametrize("is_before", [True, False])
def test_tasks_that_ended_for_a_lost_host_are_not_accused(
    tmp_path: Path, ends: str, lost: str, is_before: bool
) -> None:
    steps = "".join(f"{rank}: step {step} loss 2.0\n" for step in range(3) for rank in range(6))
    told = lost.format("c2")
    found = top(tmp_path, steps + (told + ends if is_before else ends + told))
    assert (found.verdict, found.culprits) == ("INSUFFICIENT_DATA", ())
    assert "c2" in found.headline
    (tmp_path / "controller.log").write_text(told)
    assert top(tmp_path, steps + ends).culprits == ()


@pytest.mark.parametrize("hosts", ["c1", "c[1-3]"])
def test_tasks_of_the_lost_host_died_with_it(tmp_path: Path, hosts: str) -> None:
    steps = "".join(f"{rank}: step {step} loss 2.0\n" for step in range(3) for rank in range(6))
    assert top(tmp_path, steps + LOST["srun"].format(hosts) + SRUN_ENDS[0]).culprits == (0, 1, 2)


def test_tasks_killed_on_the_only_host_are_the_dead(tmp_path: Path) -> None:
    steps = "".join(f"{rank}: step {step} loss 2.0\n" for step in range(3) for rank in range(6))
    assert top(tmp_path, steps + SRUN_ENDS[0]).culprits == (0, 1, 2)


TIMED_OUT = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "/job/train.py", line 61, in sync\n'
    "[rank{0}]:     dist.all_reduce(grad)\n"
    "[rank{0}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for "
    "recv operation to complete\n"
)
STEPS = "2026-11-22 01:00:00 INFO step 3\n"


def silent(folder: Path, *ranks: int, size: int = 4) -> None:
    """Logs in which these ranks say nothing when the others time out."""
    for rank in range(size):
        (folder / f"rank_{rank}.log").write_text(STEPS + ("" if rank in ranks else TIMED_OUT.format(rank)))


def test_one_silent_rank_is_at_fault_and_of_two_either_may_be(tmp_path: Path) -> None:
    silent(tmp_path, 2)
    assert first_verdict(tmp_path).culprits == (2,)
    silent(tmp_path, 1, 2)
    found = first_verdict(tmp_path)
    assert (found.verdict, found.culprits, found.suspects) == ("STUCK_ON_CPU", (), (1, 2))


@pytest.mark.parametrize(
    ("report", "ranks", "subtype"),
    [
        ("srun: error: Node failure on c3\n", (1, 2), "host"),
        ("[12.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n", (2,), "device"),
    ],
)
def test_the_silent_died_of_what_is_reported(tmp_path: Path, report: str, ranks: tuple[int, ...], subtype: str) -> None:
    silent(tmp_path, *ranks)
    (tmp_path / "system.log").write_text(report)
    found = first_verdict(tmp_path)
    assert (found.verdict, found.subtype, found.culprits) == ("RANK_DIED", subtype, ranks)
    assert found.evidence[0].text in report
    assert found.evidence[0].rank is None


@pytest.mark.parametrize(
    "report",
    [
        "slurmctld: error: Nodes c99 not responding, setting DOWN\n",  # of any job
        "[12.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, MMU Fault\n",  # a program's own access
    ],
)
def test_other_reports_tell_nothing_of_the_silent(tmp_path: Path, report: str) -> None:
    silent(tmp_path, 1, 2)
    (tmp_path / "system.log").write_text(report)
    assert first_verdict(tmp_path).culprits == ()
    silent(tmp_path, 2)
    assert first_verdict(tmp_path).verdict == "STUCK_ON_CPU"


def test_a_failed_gpu_is_not_that_of_one_of_two(tmp_path: Path) -> None:
    silent(tmp_path, 1, 2)
    (tmp_path / "dmesg.txt").write_text(
        "[12.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n"
    )
    assert first_verdict(tmp_path).culprits == ()
