"""Logs whose names differ in a number alone: ranks where they were written side by side, and nobody where they were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug.read.log_names.numbers import name_recorded
from titan_ckpt.debug.read.text.job_text import NOBODY, JobText, read_text


def steps(minute: int) -> str:
    return "".join(f"2026-11-25 01:{minute:02d}:{step:02d},123 INFO step {step}\n" for step in range(10))


@pytest.mark.parametrize("name", ["{}.log", "slurm-812.{}.out", "std_log_process_{:02d}.txt", "fit_812_{}.out"])
def test_number_of_a_log_is_its_rank(tmp_path: Path, name: str) -> None:
    for number in range(4):
        (tmp_path / name.format(number)).write_text(steps(10) + (OWN if number == 2 else PEER))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


@pytest.mark.parametrize("name", ["worker_{}/log.txt", "{}/stdout", "proc_{}/console.txt", "out/worker-{}/train.log"])
@pytest.mark.parametrize("others", [PEER, ""], ids=["lost", "quiet"])
def test_number_of_a_folder_is_its_rank(tmp_path: Path, name: str, others: str) -> None:
    for number in range(4):
        path = tmp_path / name.format(number)
        path.parent.mkdir(parents=True)
        path.write_text(steps(10) + (OWN if number == 2 else others))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))


def test_number_of_a_log_of_paddle_is_its_rank(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"workerlog.{number}").write_text("loading\n" + (OWN if number == 1 else PEER))
    assert first_verdict(tmp_path).culprits == (1,)


@pytest.mark.parametrize(("shift", "culprits"), [(0, (1,)), (1, ())])
def test_number_that_the_ranks_confirm_counts_under_any_name(
    tmp_path: Path, shift: int, culprits: tuple[int, ...]
) -> None:
    for number in range(3):
        (tmp_path / f"job.{number}.out").write_text(f"rank {(number + shift) % 3}/3 pid 88{number}\n{steps(10)}")
        (tmp_path / f"job.{number}.err").write_text(OWN if number == 1 else "")
    assert first_verdict(tmp_path).culprits == culprits


FOLDERS = {
    "in turn": ("worker_{}/log.txt", (0, 1, 2), [10, 11, 12], ""),
    "of trials": ("trial_{}/log.txt", (0, 1, 2), [10, 10, 10], ""),
    "of nodes": ("node{}/log.txt", (0, 1, 2), [10, 10, 10], ""),
    "from 1": ("worker_{}/log.txt", (1, 2, 3), [10, 10, 10], ""),
    "with a gap": ("worker_{}/log.txt", (0, 2, 3), [10, 10, 10], ""),
    "of several ranks": ("worker_{}/log.txt", (0, 1, 2), [10, 10, 10], "rank {}/12 starts\n"),
    "of rotated logs": ("console.{}", (0, 1, 2), [10, 10, 10], ""),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_something_else_are_no_ranks(tmp_path: Path, name: str) -> None:
    form, numbers, minutes, said = FOLDERS[name]
    for place, (number, minute) in enumerate(zip(numbers, minutes, strict=True)):
        path = tmp_path / form.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said.format(4 * place) + steps(minute) + (OWN if place == 1 else PEER))
    assert first_verdict(tmp_path).culprits == ()


def test_output_and_errors_are_of_one_rank(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.out").write_text(steps(10))
        (tmp_path / f"{number}.err").write_text(OWN if number == 1 else PEER)
    assert first_verdict(tmp_path).culprits == (1,)


def test_logs_that_follow_each_other_are_no_ranks(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(steps(10 + number) + (OWN if number == 2 else PEER))
    assert first_verdict(tmp_path).culprits == ()


@pytest.mark.parametrize("name", ["attempt_{}.log", "node{}.log", "{}.log"])
def test_numbers_of_something_else_are_no_ranks(tmp_path: Path, name: str) -> None:
    first = 1 if name == "{}.log" else 0
    for number in range(first, first + 3):
        (tmp_path / name.format(number)).write_text(steps(10) + (OWN if number == 2 else PEER))
    assert first_verdict(tmp_path).culprits == ()


def listens(rank: int) -> str:
    return f"[W1122 01:49:08.1 WorkerServer.cpp:113] [c10d] Server listening to UNIX /rec/rank_{rank:05d}.sock\n"


TORCHRUN = (
    "W1122 01:49:09.1 41 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 42 closing signal\n"
)
LISTENING = {
    "of one rank": (listens(2) + OWN, 3, 2),
    "of a console": (listens(0) + listens(2) + OWN, 3, None),
    "of the only recorded rank": (listens(2) + OWN, 1, None),
    "of a launcher": (listens(2) + TORCHRUN, 3, None),
}


@pytest.mark.parametrize("case", LISTENING)
def test_log_in_which_one_recorder_speaks_is_its_ranks(case: str) -> None:
    said, num_ranks, owner = LISTENING[case]
    text = read_text(JobText(source="stderr.log", scope=""), [(said.encode(), False)])
    name_recorded([text], num_ranks)
    assert {writer[2] for writer in text.writers if writer != NOBODY} == ({owner} - {None})
