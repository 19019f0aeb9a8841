"""A rank whose peers lost their connections to it, by its exit."""

from __future__ import annotations

import pytest

from titan_ckpt.debug.diagnosis.from_logs.lost_rank import loss_of
from titan_ckpt.debug.incident.records import Exit, Names, RankRecord, Run


def ended(rank: int, code: int, *, was_told: bool = False, is_first: bool = False) -> Exit:
    return Exit(rank=rank, code=code, source="console.log", was_told=was_told, is_first=is_first)


OTHER = ended(0, 1)


@pytest.mark.parametrize(
    ("lost", "verdict", "subtype"),
    [
        (ended(1, 7, is_first=True), "RANK_DIED", "exit_code"),
        (ended(1, 7), "RANK_DIED", ""),
        (ended(1, -15, was_told=True), "SKIPPED_COLLECTIVE", "finished_early"),
        (None, "SKIPPED_COLLECTIVE", "finished_early"),
    ],
)
def test_exit_says_how_a_rank_was_lost(lost: Exit | None, verdict: str, subtype: str) -> None:
    assert loss(lost) == (verdict, subtype)


def test_without_any_exit_a_lost_rank_died() -> None:
    assert loss(None, other=None)[0] == "RANK_DIED"


def loss(lost: Exit | None, other: Exit | None = OTHER) -> tuple[str, str]:
    ranks = {0: RankRecord(rank=0, exit=other), 1: RankRecord(rank=1, exit=lost)}
    found = loss_of(Run(url="", incident="", world_size=2, ranks=ranks, groups=(), names=Names()), ranks[1])
    return found.verdict, found.subtype
