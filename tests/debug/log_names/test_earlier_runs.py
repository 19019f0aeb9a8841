"""What is of another run or program than the one that is judged: old logs in the folder, programs that the job started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_no_ranks import console
from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug import open_run

ENDS = {"rank1": OWN, "rank0": PEER}


def run_of(minute: int, steps: range, ends: dict[str, str]) -> str:
    """A console in which rank 0 alone logs steps."""
    lines = [f"[rank0]: 2026-11-27 10:{minute:02}:{step:02},000 step {step} loss 2.0" for step in steps]
    lines += [f"[{rank}]: {line}" for rank, text in ends.items() for line in text.splitlines()]
    return "\n".join(lines) + "\n"


NAMES = [
    ("slurm-771.out", "slurm-772.out"), ("train.log.1", "train.log"), ("run_1/out.log", "run_2/out.log"),
    ("console.1.log", "console.2.log"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), NAMES)
@pytest.mark.parametrize("first", [0, 3])
def test_a_run_that_counts_again_makes_older_logs_history(old: str, new: str, first: int, tmp_path: Path) -> None:
    texts = {old: run_of(5, range(6), ENDS), new: run_of(30, range(first, 12), {"rank0": "Training completed."})}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not first_verdict(tmp_path).culprits
    if "/" not in old:
        assert [flag.source for flag in open_run(str(tmp_path)).flags if flag.flag == "EARLIER_ATTEMPT"] == [old]


def test_the_error_log_of_an_older_run_goes_with_it(tmp_path: Path) -> None:
    for job, minute, steps in ((771, 5, range(6)), (772, 30, range(12))):
        (tmp_path / f"slurm-{job}.out").write_text(run_of(minute, steps, {}))
        (tmp_path / f"slurm-{job}.err").write_text(run_of(minute, range(0), ENDS) if job == 771 else "")
    assert not first_verdict(tmp_path).culprits


def test_the_death_of_the_newer_run_is_that_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "slurm-771.out").write_text(run_of(5, range(6), ENDS))
    (tmp_path / "slurm-772.out").write_text(run_of(30, range(12), {"rank2": OWN, "rank0": PEER}))
    assert first_verdict(tmp_path).culprits == (2,)


def test_a_log_that_was_rotated_is_of_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "train.log.1").write_text(run_of(5, range(6), {"rank1": OWN}))
    (tmp_path / "train.log").write_text(run_of(6, range(6, 8), {"rank0": PEER}))
    assert first_verdict(tmp_path).culprits == (1,)


INNER = [
    "srun: error: gpu-01: task 1: Exited with exit code 2",
    "eval> E1127 10:00:03.113000 410 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1 "
    "(pid: 414) of binary: /usr/bin/python3",
    "srun: error: gpu-01: task 1: Out Of Memory",
]


@pytest.mark.parametrize("line", INNER)
def test_the_end_of_a_program_that_the_job_outlived_is_no_ranks(line: str, tmp_path: Path) -> None:
    later = console({"[rank0]: ": "", "[rank1]: ": "", "[rank2]: ": OWN}).replace("10:00:0", "10:01:0")
    before = console({"[rank0]: ": "", "[rank1]: ": "", "[rank2]: ": ""})
    (tmp_path / "train.log").write_text(f"{before}{line}\n{later}")
    assert first_verdict(tmp_path).culprits == (2,)


@pytest.mark.parametrize("line", INNER[::2])
def test_what_a_rank_wrote_late_outlives_nothing(line: str, tmp_path: Path) -> None:
    """Its standard output was held back: the times are of before."""
    lines = console({"[rank0]: ": "", "[rank2]: ": ""}) + f"{line}\n"
    (tmp_path / "train.log").write_text(lines + console({"[rank1]: ": ""}))
    assert first_verdict(tmp_path).culprits == (1,)


SAYS = [
    'declare -x RANK="{}"',
    "RANK={}",
    "Process index: {}",
    "Discovered MPI settings of world_rank={}, local_rank=0",
]


@pytest.mark.parametrize("says", SAYS)
def test_what_a_log_says_of_itself_beats_the_number_in_its_name(says: str, tmp_path: Path) -> None:
    for number, rank in ((0, 1), (1, 0)):
        (tmp_path / f"worker_{number}.log").write_text(
            f"{says.format(rank)}\n{console({'': OWN if rank == 0 else PEER})}"
        )
    assert first_verdict(tmp_path).culprits == (0,)


def test_what_pods_say_of_their_rank_beats_their_numbers(tmp_path: Path) -> None:
    first = "".join(f"[pod/w-{number}/pytorch] RANK={1 - number}\n" for number in (0, 1))
    text = console({"[pod/w-0/pytorch] ": PEER, "[pod/w-1/pytorch] ": OWN})
    (tmp_path / "pods.log").write_text(first + text)
    assert first_verdict(tmp_path).culprits == (0,)
