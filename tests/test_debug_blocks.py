"""Operations of many ranks in blocks: what is aligned does not depend on where a block ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titan_ckpt.debug import blocks, open_run
from titan_ckpt.debug.align import Lane, lanes
from titan_ckpt.debug.blocks import Distinct
from titan_ckpt.debug.records import Array
from titan_ckpt.debug.simulate import random_scenario, write


def _cells(found: list[Lane]) -> list[tuple[Array, ...]]:
    return [(lane.row, lane.signature, lane.last, lane.done) for lane in found]


@pytest.mark.parametrize("seed", range(6))
def test_lanes_are_the_same_in_blocks_of_any_size(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(random_scenario(seed, (16,)), tmp_path)
    run = open_run(str(tmp_path))
    whole = _cells(lanes(run))
    monkeypatch.setattr(blocks, "MOST_OPERATIONS", 50)
    for one, other in zip(whole, _cells(lanes(run)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_three_keys_give_the_order_of_the_one_that_does_not_fit() -> None:
    random = np.random.default_rng(0)
    group, owner, seq = random.integers(0, 9, 500), np.sort(random.integers(0, 9, 500)), random.integers(0, 99, 500)
    few = blocks._order(group, owner, seq)
    many = blocks._order(group + (1 << 40), owner, seq)
    assert np.array_equal(few, many)


def test_values_are_numbered_in_the_order_of_their_first_appearance() -> None:
    known = Distinct()
    known.add(np.array([7, 3, 7, 5]))
    known.add(np.array([1, 5]))
    assert known.numbers(np.array([7, 3, 5, 1])).tolist() == [0, 1, 2, 3]
