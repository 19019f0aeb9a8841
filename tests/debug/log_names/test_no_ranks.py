"""Numbers in labels and names of logs that are no ranks: pids, tasks of an array, machines, places on unnamed hosts, attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug import open_run


def console(labels: dict[str, str]) -> str:
    """A log in which each label has steps, then its text."""
    steps = [f"{label}2026-11-27 10:00:0{step},000 step {step} loss 2.0" for step in range(4) for label in labels]
    return (
        "\n".join((*steps, *(f"{label}{line}" for label, text in labels.items() for line in text.splitlines()))) + "\n"
    )


@pytest.mark.parametrize("pids", [(17, 18, 19, 20), (4100, 4101, 4102, 4103), (7110, 7113, 7116, 7119)])
def test_pids_in_brackets_are_no_ranks(tmp_path: Path, pids: tuple[int, ...]) -> None:
    (tmp_path / "train.log").write_text(console({f"[{pid}] ": OWN if pid == pids[1] else PEER for pid in pids}))
    assert not first_verdict(tmp_path).culprits
    assert open_run(str(tmp_path)).world_size < 100


@pytest.mark.parametrize("first", [0, 8])
def test_the_ranks_of_a_node_in_brackets_are_ranks(tmp_path: Path, first: int) -> None:
    ranks = range(first, first + 4)
    (tmp_path / "train.log").write_text(console({f"[{rank}] ": OWN if rank == first + 1 else PEER for rank in ranks}))
    assert first_verdict(tmp_path).culprits == (first + 1,)


@pytest.mark.parametrize(
    "says", ["SLURM_ARRAY_TASK_ID={n}", "world_size=1 rank=0", "SLURM_JOB_ID=50{n} SLURM_NTASKS=1"]
)
@pytest.mark.parametrize("name", ["slurm-4411_{n}.out", "out_{n}.txt"])
def test_tasks_of_an_array_are_jobs_of_their_own(tmp_path: Path, says: str, name: str) -> None:
    for n in range(3):
        text = console({"": OWN if n == 2 else "finished\n"})
        (tmp_path / name.format(n=n)).write_text(f"{says.format(n=n)}\n{text}")
    assert not first_verdict(tmp_path).culprits


def test_a_job_that_is_one_task_of_an_array_has_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        text = console({"": OWN if rank == 2 else PEER})
        (tmp_path / f"out_{rank}.txt").write_text(f"SLURM_ARRAY_TASK_ID=7\n{text}")
    assert first_verdict(tmp_path).culprits == (2,)


def test_numbers_of_machines_that_begin_elsewhere_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(console({"gpu-07: ": PEER, "gpu-08: ": OWN}))
    assert not first_verdict(tmp_path).culprits


def test_gpus_of_hosts_in_no_known_order_are_no_ranks(tmp_path: Path) -> None:
    for host in "AB":
        labels = {"[gpu0] ": PEER, "[gpu1] ": OWN if host == "B" else PEER}
        (tmp_path / f"host{host}.log").write_text(console(labels))
    assert not first_verdict(tmp_path).culprits


@pytest.mark.parametrize("name", ["attempt-{n}.log", "train.attempt_{n}.out", "node0/restart{n}.stdout.txt"])
def test_an_earlier_attempt_by_name_is_history(tmp_path: Path, name: str) -> None:
    for n in range(3):
        path = tmp_path / name.format(n=n)
        path.parent.mkdir(exist_ok=True)
        path.write_text(console({"[rank0] ": "", "[rank1] ": OWN if n < 2 else "Training completed."}))
    assert not first_verdict(tmp_path).culprits
