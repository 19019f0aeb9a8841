"""Programs that say who they are in their logs: `rank 3/8 pid 4711`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict

FORMS = ("INFO rank {r}/3 pid 41{r}1", "| distributed init (rank {r}): env://", "pid 41{r}1 rank={r} world_size=3")


@pytest.mark.parametrize("form", FORMS)
def test_a_log_belongs_to_the_rank_that_names_itself(tmp_path: Path, form: str) -> None:
    for rank, name in enumerate(("gpu-c", "gpu-a", "gpu-b")):
        (tmp_path / f"{name}.log").write_text(f"{form.format(r=rank)}\n{OWN if rank == 1 else PEER}")
    assert first_verdict(tmp_path).culprits == (1,)


def test_a_log_that_names_another_rank_is_not_given_to_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"gpu-{name}.log").write_text(f"waiting for rank 1 of 3\n{OWN if name == 'c' else PEER}")
    assert not first_verdict(tmp_path).culprits


def test_who_a_log_names_first_is_its_rank(tmp_path: Path) -> None:
    for rank, name in enumerate(("gpu-c", "gpu-a", "gpu-b")):
        text = f"rank {rank}/3 pid 41{rank}1\nwaiting for rank 0 of 3\n{OWN if rank == 1 else PEER}"
        (tmp_path / f"{name}.log").write_text(text)
    assert first_verdict(tmp_path).culprits == (1,)


def test_a_crash_of_a_process_is_that_of_its_rank(tmp_path: Path) -> None:
    ranks = "".join(f"rank {rank} pid {4120 + rank} started\n" for rank in range(4))
    (tmp_path / "slurm-5.out").write_text(
        f"{ranks}bash: line 1:  4122 Segmentation fault      (core dumped) python train.py\n"
    )
    top = first_verdict(tmp_path)
    assert (top.culprits, top.signal) == ((2,), "SIGSEGV")


def test_a_core_dump_is_that_of_its_rank(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.log").write_text(f"rank {rank} pid {4120 + rank}\n{'' if rank == 1 else PEER}")
    (tmp_path / "journal.txt").write_text(
        "Nov 25 10:05:00 n1 systemd-coredump[9]: Process 4121 (python) of user 1000 dumped core.\n"
    )
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))


def test_services_of_compose_are_ranks(tmp_path: Path) -> None:
    lines = [(rank, line) for rank in (1, 0, 2) for line in (OWN if rank == 1 else PEER).splitlines()]
    (tmp_path / "compose.log").write_text("".join(f"job-worker-{rank}-1  | {line}\n" for rank, line in lines))
    assert first_verdict(tmp_path).culprits == (1,)


def test_replicas_of_a_compose_service_count_from_one(tmp_path: Path) -> None:
    lines = [(rank, line) for rank in (1, 0, 2) for line in (OWN if rank == 1 else PEER).splitlines()]
    (tmp_path / "compose.log").write_text("".join(f"job-trainer-{rank + 1}  | {line}\n" for rank, line in lines))
    assert first_verdict(tmp_path).culprits == (1,)


def test_pods_that_count_from_one_are_not_renumbered(tmp_path: Path) -> None:
    lines = [(rank, line) for rank in (1, 2) for line in (OWN if rank == 2 else PEER).splitlines()]
    (tmp_path / "pods.log").write_text("".join(f"[pod/job-worker-{rank}/pytorch] {line}\n" for rank, line in lines))
    assert first_verdict(tmp_path).culprits == (2,)


def test_logs_of_azure_are_the_processes_they_name(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"std_log_process_{rank}.txt").write_text(OWN if rank == 1 else PEER)
    assert first_verdict(tmp_path).culprits == (1,)
