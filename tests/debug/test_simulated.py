"""The analyzer on simulated jobs with NCCL's semantics: random meshes, random programs, one random fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.simulated_jobs import FAULTS, random_scenario, simulate, write
from titan_ckpt.debug import diagnose, open_run

NUM_PROGRAMS = 240


def is_right(seed: int, folder: Path, sizes: tuple[int, ...] = (2, 4, 8, 16)) -> tuple[str, bool]:
    scenario = random_scenario(seed, sizes)
    folder.mkdir()
    write(scenario, folder)
    top = diagnose(open_run(str(folder)))[0]
    verdicts, culprits = scenario.truth
    return scenario.fault, top.verdict in verdicts and top.culprits == culprits


def test_random_programs_with_one_fault_name_the_culprit(tmp_path: Path) -> None:
    results = [is_right(seed, tmp_path / str(seed)) for seed in range(NUM_PROGRAMS)]
    wrong = Counter(fault for fault, right in results if not right)
    assert sum(wrong.values()) <= 0.01 * NUM_PROGRAMS, wrong
    assert {fault for fault, _ in results} == set(FAULTS)


@pytest.mark.parametrize("seed", range(5))
def test_sixty_four_ranks_name_the_culprit(seed: int, tmp_path: Path) -> None:
    fault, right = is_right(1000 + seed, tmp_path / "job", sizes=(64,))
    assert right, fault


def test_simulated_healthy_job_completes_everything() -> None:
    scenario = next(s for seed in range(100) if (s := random_scenario(seed)).fault == "none")
    assert all(op.completed_ns for issued in simulate(scenario).values() for op in issued)


def test_diagnosis_is_the_same_twice(tmp_path: Path) -> None:
    write(random_scenario(3), tmp_path)
    run = open_run(str(tmp_path))
    assert diagnose(run) == diagnose(open_run(str(tmp_path)))
