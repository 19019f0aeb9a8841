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
