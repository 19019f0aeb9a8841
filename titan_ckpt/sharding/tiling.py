"""Prove that boxes tile tensors: every element in exactly one box, nothing outside, whatever the cut.

Count the boxes that hold each element. This count is 1 everywhere exactly if its mixed difference equals that of the whole
tensor's box, and the mixed difference of a box is one signed point for each of its corners. So the signed corners of all boxes,
less those of the whole, must cancel. They are summed one dimension at a time, which cancels the faces that neighbours share: a
regular cut costs a few sorts, and the worst one 2^d corners a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.sharding.placement import Shape
from titan_ckpt.sharding.repeating_columns import Int64s

MAX_CORNERS, CORNERS_PER_BOX = 1 << 22, 8
_LARGEST_KEY = 1 << 62


@dataclass(frozen=True, slots=True)
class Flaw:
    """An element of a tensor that is in `count` boxes instead of one; `count` is -1 if a box lies outside the tensor."""

    element: Shape
    count: int

    def __str__(self) -> str:
        if self.count < 0:
            return f"a chunk at {list(self.element)} lies outside the tensor"
        return f"element {list(self.element)} is in {f'{self.count} chunks' if self.count else 'no chunk'}"


class TooIrregularError(ValueError):
    """Too many corners remain: no real cut has so many, and the proof would take too long."""


def find_flaws(shapes: Sequence[Shape], owner: Int64s, offsets: Int64s, sizes: Int64s) -> dict[int, Flaw]:
    """The tensors that their boxes do not tile, by index into `shapes`, each with the first element in row-major order.

    All `shapes` have the same length `d`. `owner[n]` is the tensor of each box `offsets[n, d]`, `sizes[n, d]`; empty boxes must
    lie inside too, and hold nothing. TooIrregularError for boxes that no regular or nested cut makes.

    >>> find_flaws([(4,), (3,)], np.array([0, 0, 1]), np.array([[0], [3], [0]]), np.array([[2], [1], [3]]))
    {0: Flaw(element=(2,), count=0)}
    """
    extent = np.array(shapes, dtype=np.int64).reshape(len(shapes), offsets.shape[1])
    outside = ((offsets < 0) | (sizes < 0) | (sizes > extent[owner] - offsets)).any(axis=1)
    flaws = {int(owner[row]): Flaw(tuple(offsets[row].tolist()), -1) for row in np.flatnonzero(outside)[::-1].tolist()}
    is_judged = np.ones(len(shapes), dtype=bool)
    is_judged[list(flaws)] = False
    counted = is_judged[owner] & (sizes > 0).all(axis=1)
    whole = np.flatnonzero(is_judged & (extent > 0).all(axis=1))
    corners = _Corners(
        owner=np.concatenate([owner[counted], whole]),
        starts=np.concatenate([offsets[counted], np.zeros_like(extent[whole])]),
        ends=np.concatenate([offsets[counted] + sizes[counted], extent[whole]]),
        weight=np.concatenate([np.ones(int(counted.sum()), dtype=np.int64), -np.ones(len(whole), dtype=np.int64)]),
        extent=extent,
    )
    for tensor, element, weight in corners.remaining():
        flaws.setdefault(tensor, Flaw(element, weight + 1))
    return flaws


class _Corners:
    """Signed corners in the dimensions summed so far; boxes in the others. One row each, `group` numbers equal corners."""

    def __init__(self, *, owner: Int64s, starts: Int64s, ends: Int64s, weight: Int64s, extent: Int64s) -> None:
        self._extent, self._weight = extent, weight
        self._group, self._starts, self._ends = owner, starts, ends
        self._most = max(MAX_CORNERS, CORNERS_PER_BOX * len(owner))
        self._owner_of = np.arange(len(extent), dtype=np.int64)
        self._place_of = np.zeros((len(extent), 0), dtype=np.int64)
        self._add_equal()

    def remaining(self) -> list[tuple[int, Shape, int]]:
        """(tensor, corner, sum of its signs) of the corners that do not cancel, in row-major order within a tensor."""
        for dim in range(self._extent.shape[1]):
            self._split(dim)
        order = np.argsort(self._group, kind="stable")
        groups = self._group[order]
        places = map(tuple, self._place_of[groups].tolist())
        return list(zip(self._owner_of[groups].tolist(), places, self._weight[order].tolist(), strict=True))

    def _split(self, dim: int) -> None:
        """Replace each box by its two faces across `dim`, the first of those left.

        Faces at the far end of the tensor are left out: they are minus the sum of all others, so they cancel if those do.
        """
        inner = np.flatnonzero(self._ends[:, 0] < self._extent[self._owner_of[self._group], dim])
        if len(self._weight) + len(inner) > self._most:
            raise TooIrregularError(f"the boxes have more than {self._most} corners that do not meet")
        place = np.concatenate([self._starts[:, 0], self._ends[inner, 0]])
        group = np.concatenate([self._group, self._group[inner]])
        self._weight = np.concatenate([self._weight, -self._weight[inner]])
        self._starts = np.concatenate([self._starts[:, 1:], self._starts[inner, 1:]])
        self._ends = np.concatenate([self._ends[:, 1:], self._ends[inner, 1:]])
        _, first, self._group = np.unique(_keys([group, place]), return_index=True, return_inverse=True)
        self._owner_of = self._owner_of[group[first]]
        self._place_of = np.concatenate([self._place_of[group[first]], place[first, np.newaxis]], axis=1)
        self._add_equal()

    def _add_equal(self) -> None:
        """Sum the signs of equal rows and drop those that cancel."""
        _, first, inverse = np.unique(
            _keys([self._group, *self._starts.T, *self._ends.T]), return_index=True, return_inverse=True
        )
        weight = np.bincount(inverse, self._weight, minlength=len(first)).astype(np.int64)
        kept = first[weight != 0]
        self._weight = weight[weight != 0]
        self._group, self._starts, self._ends = self._group[kept], self._starts[kept], self._ends[kept]


def _keys(columns: Sequence[Int64s]) -> Int64s:
    """One number a row, equal for equal rows, in the order of the rows; the columns are not negative."""
    key, largest = columns[0], int(columns[0].max(initial=0)) + 1
    for column in columns[1:]:
        values = int(column.max(initial=0)) + 1
        if largest * values >= _LARGEST_KEY:
            key, largest = _ranked(key)
        if largest * values >= _LARGEST_KEY:
            column, values = _ranked(column)
        key, largest = key * values + column, largest * values
    return key


def _ranked(column: Int64s) -> tuple[Int64s, int]:
    distinct, rank = np.unique(column, return_inverse=True)
    return rank.astype(np.int64), len(distinct)
