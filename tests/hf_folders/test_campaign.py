"""A seeded sample of the campaign with hostile and odd model folders (`python -m scripts.hostile models`)."""

from __future__ import annotations

from pathlib import Path

from tools.hostile.model_folders import CHANGES, make_case, run_case
from tools.hostile.outcome import Outcome


def test_a_sample_of_hostile_folders_does_no_harm() -> None:
    outcome = Outcome(part="models")
    for seed in range(40):
        run_case(seed, outcome)
    assert outcome.failures == []
    assert outcome.cases == 40
    assert min(outcome.counts["converted"], outcome.counts["refused"], outcome.counts["flips"]) >= 5


def test_every_change_is_in_the_sample(tmp_path: Path) -> None:
    made = {change for seed in range(40) for change in make_case(seed, tmp_path / "in").changes}
    assert made == {change.__name__.removeprefix("_") for change in CHANGES}
