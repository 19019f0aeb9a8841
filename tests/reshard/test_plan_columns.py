"""Columns that store repeated blocks once read like the full array."""

from __future__ import annotations

import numpy as np
import pytest

from titan_ckpt.sharding.repeating_columns import SharedColumn, shared_column

BLOCKS = [[3, 1], [], [3, 1], [7], []]
VALUES = np.array([3, 1, 3, 1, 7], dtype=np.int64)


@pytest.fixture
def column() -> SharedColumn:
    return shared_column(VALUES, [len(block) for block in BLOCKS])


def test_a_column_reads_as_the_array_it_stands_for(column: SharedColumn) -> None:
    assert len(column) == 5
    assert np.asarray(column).tolist() == VALUES.tolist()
    assert [int(column[i]) for i in range(-5, 5)] == [*VALUES, *VALUES]
    for start in range(6):
        for stop in range(6):
            assert column[start:stop].tolist() == VALUES[start:stop].tolist()
    assert (column.min(), column.max()) == (1, 7)
    with pytest.raises(IndexError, match="5 of 5"):
        column[5]


def test_equal_blocks_are_held_once(column: SharedColumn) -> None:
    assert np.shares_memory(column[0:2], column[2:4])
    assert not np.shares_memory(column[0:2], column[4:5])


def test_an_empty_column_has_no_extremes_of_its_own() -> None:
    empty = SharedColumn([])
    assert (len(empty), np.asarray(empty).tolist(), empty[0:3].tolist()) == (0, [], [])
    assert (empty.min(initial=4), empty.max(initial=4)) == (4, 4)
