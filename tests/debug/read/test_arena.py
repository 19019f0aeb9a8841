"""The arena's scorer, and how it understands other tools."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.diagnosis.arena import Answer, outcome, understand_torchfrtrace

DIED = {"culprits": [1], "verdicts": ["RANK_DIED"], "innocent": [0]}


@pytest.mark.parametrize(
    ("verdict", "culprits", "truth", "expected"),
    [
        ("RANK_DIED", {1}, DIED, "right"),
        ("STUCK_ON_CPU", {1}, DIED, "rank only"),
        ("RANK_DIED", {0}, DIED, "accused"),
        ("RANK_DIED", {1, 2}, DIED, "accused"),
        ("HEALTHY", set(), DIED, "healthy"),
        ("INSUFFICIENT_DATA", set(), DIED, "undecided"),
        ("INSUFFICIENT_DATA", set(), {**DIED, "undecided": True}, "right"),
        ("RANK_DIED", {1}, {"culprits": [1, 2], "verdicts": []}, "part"),
        ("HEALTHY", set(), {"healthy": True}, "right"),
        ("RANK_DIED", {0}, {"healthy": True}, "accused"),
        ("", set(), DIED, "refused"),
    ],
)
def test_outcome(verdict: str, culprits: set[int], truth: dict[str, Any], expected: str) -> None:
    assert outcome(Answer(verdict=verdict, culprits=frozenset(culprits)), truth) == expected


def test_missing_ranks_of_torchfrtrace_are_its_culprits() -> None:
    assert understand_torchfrtrace("missing ranks: {5, 7}\n") == ("ANY", frozenset({5, 7}))
    assert understand_torchfrtrace("nothing to say") == ("UNDECIDED", frozenset())
