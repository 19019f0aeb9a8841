"""The kubelet's log folders, where a container's log is named after the number of its restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.records import Verdict

OWN = "Traceback (most recent call last):\n  File \"/srv/app/fit.py\", line 31, in <module>\n    run()\nKeyError: 'labels'\n"
PEER = (
    'Traceback (most recent call last):\n  File "/srv/app/fit.py", line 33, in <module>\n    dist.all_reduce(x)\n'
    '  File "/usr/lib/python3/torch/distributed/distributed_c10d.py", line 3000, in all_reduce\n    work.wait()\n'
    "RuntimeError: [pair.cc:547] Connection closed by peer [10.1.2.3]:40012\n"
)
STEPS = "".join(f"step {step} loss 2.5\n" for step in range(4))


def container_log(text: str, hour: int) -> str:
    lines = text.splitlines()
    return "".join(f"2026-11-25T0{hour}:20:{n:02d}.100000000Z stderr F {line}\n" for n, line in enumerate(lines))


def write(folder: Path, worker: int, restarts: int, text: str, uid: int = 1) -> None:
    pod = folder / f"ml_fit-worker-{worker}_0b2d7f1e-1111-4a5b-8c3d-{uid:012d}" / "pytorch"
    pod.mkdir(parents=True, exist_ok=True)
    (pod / f"{restarts}.log").write_text(container_log(text, 1 + restarts))


def first_verdict(folder: Path) -> Verdict:
    return diagnose(open_run(folder))[0]


def test_pods_of_one_job_are_one_incident(tmp_path: Path) -> None:
    for worker in range(4):
        write(tmp_path, worker, 0, OWN if worker == 2 else PEER)
    assert open_run(tmp_path).incidents == ()
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_log_before_a_restart_is_history(tmp_path: Path) -> None:
    for worker in range(4):
        write(tmp_path, worker, 0, OWN if worker == 1 else PEER)
        write(tmp_path, worker, 1, OWN if worker == 3 else PEER)
    assert first_verdict(tmp_path).culprits == (3,)


def test_job_that_trains_after_a_restart_runs(tmp_path: Path) -> None:
    for worker in range(3):
        write(tmp_path, worker, 0, OWN if worker == 1 else PEER)
        write(tmp_path, worker, 1, STEPS)
    assert first_verdict(tmp_path).verdict == "RUNNING"


def test_pod_that_was_made_anew_counts_once(tmp_path: Path) -> None:
    for worker in range(3):
        write(tmp_path, worker, 0, OWN if worker == 1 else PEER, uid=1)
    for worker in range(3):
        write(tmp_path, worker, 0, OWN if worker == 2 else PEER, uid=2)
    assert first_verdict(tmp_path).culprits == (2,)


def test_links_to_containers_name_their_pods(tmp_path: Path) -> None:
    for worker in range(3):
        name = f"fit-worker-{worker}_ml_pytorch-{worker:064x}.log"
        (tmp_path / name).write_text(container_log(OWN if worker == 1 else PEER, 1))
    assert first_verdict(tmp_path).culprits == (1,)


@pytest.mark.parametrize(
    "place", ["rank_{}/stderr.log", "rank{}/out.log", "logs/rank-{}/train.log", "global_rank_{}/a.txt"]
)
def test_folders_of_ranks_are_one_incident(tmp_path: Path, place: str) -> None:
    for rank in range(4):
        path = tmp_path / place.format(rank)
        path.parent.mkdir(parents=True)
        path.write_text(STEPS + (OWN if rank == 2 else PEER))
    assert open_run(tmp_path).incidents == ()
    assert first_verdict(tmp_path).culprits == (2,)


def of_pods(folder: Path, ranks: dict[int, int], silent: int) -> Verdict:
    """Lines of pods whose ranks are told, and the death of a pod whose rank is not."""
    lines = [
        f"[pod/fit-worker-{pod}/torch] [rank{rank}]: step {step}" for step in range(3) for pod, rank in ranks.items()
    ]
    died = ("Traceback (most recent call last):", '  File "/job/a.py", line 3, in f', "KeyError: 1")
    lines += [f"[pod/fit-worker-{silent}/torch] {line}" for line in died]
    (folder / "pods.log").write_text("\n".join(lines) + "\n")
    return first_verdict(folder)


@pytest.mark.parametrize("gap", [0, 1])
def test_a_pod_goes_on_with_the_numbers_of_the_others(tmp_path: Path, gap: int) -> None:
    told = {rank + gap: rank for rank in (0, 1, 2)}
    assert of_pods(tmp_path, told, 3 + gap).culprits == (3,)
    assert of_pods(tmp_path, {pod: rank for pod, rank in told.items() if rank != 1}, 1 + gap).culprits == (1,)


@pytest.mark.parametrize("told", [{0: 1, 1: 0}, {0: 0, 1: 8}, {0: 0}, {1: 0, 2: 1}])
def test_pods_out_of_step_give_no_ranks(tmp_path: Path, told: dict[int, int]) -> None:
    silent = 0 if 0 not in told else 3
    assert of_pods(tmp_path, told, silent).culprits == ()
