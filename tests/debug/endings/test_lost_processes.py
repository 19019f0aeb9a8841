"""Processes and hosts that Ray, Open MPI and Slurm say to be lost, where lines of the ranks say which they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.records import Verdict

PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [10.1.2.3]:40012\n"


def top(folder: Path, text: str) -> Verdict:
    (folder / "job.log").write_text(text)
    return first_verdict(folder)


ACTORS = "".join(f"(WorkerDict pid=90944{rank}) [Rank {rank}] init\n" for rank in range(4))
RAYLET = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. RayTask ID: ff Worker ID: 0f "
    "Node ID: 4f Worker IP address: 10.0.0.1 Worker port: 46209 Worker PID: {} Worker exit type: SYSTEM_ERROR\n"
)
DRIVER = (
    "(TaskRunner pid=892962) ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "(TaskRunner pid=892962) \tclass_name: WorkerDict\n(TaskRunner pid=892962) \tpid: {}\n"
)


@pytest.mark.parametrize("said", [RAYLET, DRIVER])
def test_actor_that_died_is_its_rank(tmp_path: Path, said: str) -> None:
    found = top(tmp_path, ACTORS + said.format(909441))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (1,))
    assert found.confidence < 0.6


VICTIMS = {
    "an actor that was started anew": ACTORS + RAYLET.format(909441) + "(TaskRunner pid=892962) step 9 loss 2.5\n",
    "two actors": ACTORS + RAYLET.format(909441) + RAYLET.format(909442),
    "an actor that nobody knows": ACTORS + RAYLET.format(909449),
    "an actor whose peer was lost": ACTORS + f"(WorkerDict pid=909441) {PEER}" + RAYLET.format(909441),
    "an actor of a job with trouble": ACTORS + f"(WorkerDict pid=909442) {PEER}" + DRIVER.format(909441),
}


@pytest.mark.parametrize("name", VICTIMS)
def test_actor_that_may_be_a_victim_is_not_accused(tmp_path: Path, name: str) -> None:
    assert 1 not in top(tmp_path, VICTIMS[name]).culprits


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
