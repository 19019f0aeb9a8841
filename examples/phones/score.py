"""How well clusters agree with the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def adjusted_rand_index(truth: Sequence[int], found: Sequence[int]) -> float:
    """1 for equal partitions, about 0 for a random one, whatever the names of the clusters (Hubert and Arabie 1985).

    >>> adjusted_rand_index([0, 0, 1, 1], [5, 5, 2, 2])
    1.0
    """
    table = np.zeros((max(truth) + 1, max(found) + 1))
    np.add.at(table, (np.asarray(truth), np.asarray(found)), 1)
    both, rows, columns = (_pairs(each) for each in (table, table.sum(1), table.sum(0)))
    by_chance = rows * columns / _pairs(np.array([len(truth)]))
    most = (rows + columns) / 2
    return 1.0 if most == by_chance else float((both - by_chance) / (most - by_chance))


def _pairs(counts: NDArray[np.float64] | NDArray[np.int64]) -> float:
    """Number of pairs within the groups of these sizes."""
    return float((counts * (counts - 1) / 2).sum())
