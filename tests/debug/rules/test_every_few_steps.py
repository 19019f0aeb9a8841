"""Two ranks part where an operation of every few steps may be due: the one that kept the longer rhythm is not accused."""

from __future__ import annotations

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose

STEP, LOGGED = "all_reduce@1 broadcast@2", "all_reduce@1 all_gather@3 broadcast@2"


@pytest.mark.parametrize(
    ("before", "accused"),
    [
        ([STEP, STEP, LOGGED] * 2 + [STEP, STEP], (1,)),  # each third step had it: rank 1 left it out
        ([STEP] * 4 + [LOGGED] + [STEP] * 4, ()),  # it was there once: it may be due, or come too early
        ([STEP] * 6, (0,)),  # it was never there
    ],
)
def test_an_operation_of_every_few_steps(before: list[str], accused: tuple[int, ...]) -> None:
    text = " ".join(before)
    top = diagnose(job(f"0: {text} all_reduce@1 all_gather@3?\n1: {text} all_reduce@1 broadcast@2?"))[0]
    assert top.culprits == accused
    assert accused or set(top.suspects) == {0, 1}
