"""Prefixes that programs choose for their ranks, which count where most lines have them and they run side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict

PREFIXES: dict[str, Callable[[int], str]] = {
    "parenthesis": "({}) ".format,
    "angle": "<rank={}> ".format,
    "letter": "r{}> ".format,
    "letter and zeros": "r{:02d} ".format,
    "host and letter": lambda rank: f"[n{rank // 2}:r{rank:02d}] ",
    "gpu": "[gpu{}] ".format,
    "index": "2026-08-16 00:24:00,339 - serve - INFO - agent.py:400 - Rank[{}] ".format,
    "fields": "2026-08-16 00:24:00,339 - __main__ - INFO - [rank {}] ".format,
    "logfmt": "ts=2026-08-16T00:24:00.339Z level=info rank={} msg=".format,
    "node, local rank and rank": lambda rank: f"[node{rank // 2}][local {rank % 2}][rank {rank}] ",
    "Determined": "<info>    [2026-03-03T16:00:00.112Z] 8de2ca80 [rank={}] || INFO: [890] root: ".format,
}


def job(prefix: Callable[[int], str], guilty: int) -> str:
    lines = [f"{prefix(rank)}step {step}" for step in range(4) for rank in range(4)]
    for rank in (guilty, *(rank for rank in range(4) if rank != guilty)):
        lines += [prefix(rank) + line for line in (OWN if rank == guilty else PEER).splitlines()]
    return "\n".join(lines) + "\n"


def culprits(folder: Path, text: str) -> tuple[int, ...]:
    (folder / "all.log").write_text(text)
    return first_verdict(folder).culprits


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_prefix_names_the_rank(tmp_path: Path, prefix: Callable[[int], str]) -> None:
    assert culprits(tmp_path, job(prefix, 2)) == (2,)


@pytest.mark.parametrize("prefix", ["({}) ", "r{}> ", "r{:02d} "])
@pytest.mark.parametrize(
    "numbers",
    [
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],  # epochs
        [*range(12)],  # lines
        [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3],  # not from 0
        [0, 2, 3, 0, 2, 3, 0, 2, 3, 0, 2, 3],  # not all
        [0] * 12,
    ],
)
def test_number_of_something_else_is_no_rank(tmp_path: Path, prefix: str, numbers: list[int]) -> None:
    steps = "".join(f"{prefix.format(number)}item {place}\n" for place, number in enumerate(numbers))
    last = prefix.format(numbers[-1])
    assert culprits(tmp_path, steps + "".join(f"{last}{line}\n" for line in OWN.splitlines())) == ()


def test_number_that_few_lines_have_is_no_rank(tmp_path: Path) -> None:
    notes = "".join(f"({number}) see the manual\n" for number in (0, 1, 2, 0, 1, 2))
    steps = "".join(f"step {step} loss 2.5\n" for step in range(20))
    assert culprits(tmp_path, notes + steps + "".join(f"(1) {line}\n" for line in OWN.splitlines())) == ()
