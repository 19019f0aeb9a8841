"""Names with several numbers, of which one counts the ranks; and logs whose lines all have the label of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.debug.log_names.test_numbers import steps
from tests.debug.log_names.test_pods import OWN, PEER, first_verdict

GUILTY = 2


def culprits(folder: Path, names: Sequence[str], minutes: Sequence[int] = (10, 10, 10, 10)) -> tuple[int, ...]:
    for number, (name, minute) in enumerate(zip(names, minutes, strict=True)):
        (folder / name).write_text(steps(minute) + (OWN if number == GUILTY else PEER))
    return first_verdict(folder).culprits


FORMS = {
    "of all": "task_{rank}_of_4.log",
    "node and task": "train-4411-n{node}-t{rank}.log",
    "attempt behind": "trainer_{rank}_attempt_0_stderr.log",
    "local and global": "local_rank_{local}_global_rank_{rank}.log",
    "world rank": "rank_{local}.world_rank_{rank}.log",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_number_that_counts_all_logs_is_the_rank(tmp_path: Path, form: str) -> None:
    names = [form.format(rank=rank, node=rank // 2, local=rank % 2) for rank in range(4)]
    assert culprits(tmp_path, names) == (GUILTY,)


@pytest.mark.parametrize(
    ("form", "minutes"),
    [
        ("node{rank}_of_4.log", (10, 10, 10, 10)),
        ("train_{rank}_attempt_{rank}.log", (10, 11, 12, 13)),
        ("part_{rank}_of_4.log", (10, 10, 10, 10)),
        ("a{rank}_b{turned}.log", (10, 10, 10, 10)),  # which of the two counts?
    ],
)
def test_numbers_of_something_else_are_no_ranks(tmp_path: Path, form: str, minutes: Sequence[int]) -> None:
    names = [form.format(rank=rank, turned=3 - rank) for rank in range(4)]
    assert culprits(tmp_path, names, minutes) == ()


def labelled(rank: int) -> str:
    return "".join(f"rank {rank}: step {step}\n" for step in range(5))


def test_log_with_the_label_of_one_rank_is_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"trainer-{'abc'[rank]}.log").write_text(labelled(rank) + (OWN if rank == GUILTY else PEER))
    assert first_verdict(tmp_path).culprits == (GUILTY,)


@pytest.mark.parametrize("of_first", [labelled(0) + labelled(1), labelled(2)], ids=["two in one", "one in two"])
def test_log_that_may_hold_others_is_nobodys(tmp_path: Path, of_first: str) -> None:
    (tmp_path / "a.log").write_text(of_first + PEER)
    (tmp_path / "b.log").write_text(labelled(2) + OWN)
    assert first_verdict(tmp_path).culprits == ()
