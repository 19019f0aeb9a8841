"""Which choices of a router the campaign takes for near ties."""

from __future__ import annotations

import math

import pytest
import torch

from titan_ckpt.trainer.model.experts import ExpertsConfig, Router
from tools.training.curves import Curve
from tools.training.near_ties import OtherChoice, first_other_choice, smallest_gaps


def router(groups: int = 1) -> Router:
    """Four experts, of which a token uses two, of one group."""
    return Router(ExpertsConfig(number=4, per_token=2, ffn_dim=4, groups=groups), dim=8)


def curve(loads: list[int]) -> Curve:
    """Two steps of a router `r`."""
    return Curve(losses=[1.0, 1.0, 1.0], norms=[1.0, 1.0], loads={"r": loads})


def test_gaps_are_relative_and_ascending() -> None:
    scores = torch.tensor([[0.4, 0.2, 0.1, 0.0], [0.5, 0.4, 0.3, 0.0]])
    assert smallest_gaps(router(), scores) == pytest.approx([0.25, 0.5])


def test_gaps_between_groups_count() -> None:
    assert smallest_gaps(router(groups=2), torch.tensor([[0.4, 0.1, 0.3, 0.19]])) == pytest.approx([0.02], rel=1e-5)


def test_equal_loads_are_no_other_choice() -> None:
    assert first_other_choice(curve([1, 1] * 2), curve([1, 1] * 2), [[0.1]] * 2) is None


def test_as_many_near_ties_as_moved_tokens_are_needed() -> None:
    expected, gaps = curve([4, 4, 4, 4]), [[0.1, 0.2], [0.001, 0.3]]
    one = OtherChoice(step=1, router="r", tokens=1, gap=0.001)
    assert first_other_choice(curve([4, 4, 3, 5]), expected, gaps) == one
    two = OtherChoice(step=1, router="r", tokens=2, gap=0.3)
    assert first_other_choice(curve([4, 4, 2, 6]), expected, gaps) == two
    three = first_other_choice(curve([4, 4, 1, 7]), expected, gaps)
    assert three is not None
    assert three.gap == math.inf
