"""Cut boxes into row-major strips; intersect lists of boxes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from titan_ckpt.errors import PlanError
from titan_ckpt.sharding.box_columns import overlaps
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.repeating_columns import Int64s


def cut_strips(box: Box, max_elements: int, row_multiple: int) -> Iterator[Box]:
    """Cut `box` into row-major strips of at most `max_elements`, at multiples of `row_multiple` rows of dimension 0.

    >>> [strip.sizes for strip in cut_strips(Box((0, 0), (5, 4)), 8, 1)]
    [(2, 4), (2, 4), (1, 4)]
    """
    if not box.sizes or box.num_elements <= max_elements:
        yield box
        return
    rows, width = box.sizes[0], prod(box.sizes[1:])
    step = max_elements // width // row_multiple * row_multiple
    if step == 0:
        if row_multiple > 1:
            raise PlanError(
                f"{row_multiple} rows of {width} elements, which a transform needs at once, exceed the memory budget"
            )
        for row in range(rows):
            for inner in cut_strips(Box(box.offsets[1:], box.sizes[1:]), max_elements, 1):
                yield Box((box.offsets[0] + row, *inner.offsets), (1, *inner.sizes))
        return
    for row in range(0, rows, step):
        yield Box((box.offsets[0] + row, *box.offsets[1:]), (min(step, rows - row), *box.sizes[1:]))


def merged_rows(boxes: list[Box], multiple: int = 1) -> list[tuple[int, int]]:
    """The ranges of dimension 0 that the boxes cover, merged if they touch, grown to multiples of `multiple`.

    >>> merged_rows([Box((5,), (2,)), Box((0,), (3,)), Box((3,), (1,))]), merged_rows([Box((5,), (2,))], 4)
    ([(0, 4), (5, 7)], [(4, 8)])
    """
    if not boxes[0].offsets:
        return [(0, 1)]
    merged: list[tuple[int, int]] = []
    for start, end in sorted(_rows(box, multiple) for box in boxes):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _rows(box: Box, multiple: int) -> tuple[int, int]:
    start, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    return start // multiple * multiple, -(-end // multiple) * multiple


def with_rows(box: Box, start: int, end: int) -> Box:
    """`box` with rows `[start, end)` of dimension 0; a scalar's box is unchanged."""
    return Box((start, *box.offsets[1:]), (end - start, *box.sizes[1:])) if box.sizes else box


def hull(boxes: list[Box]) -> Box:
    """The smallest box that contains all boxes."""
    starts = [min(values) for values in zip(*(box.offsets for box in boxes), strict=True)]
    ends = [
        max(o + s for o, s in pairs)
        for pairs in zip(*(zip(b.offsets, b.sizes, strict=True) for b in boxes), strict=True)
    ]
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def columns(boxes: list[Box], ndim: int) -> tuple[Int64s, Int64s]:
    """Offsets and sizes of the boxes, each `[n, ndim]`."""
    offsets = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return offsets, np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)


def pairs(a: list[Box], b: list[Box], ndim: int) -> dict[int, list[int]]:
    """For each index in `a`, the indices of the boxes of `b` that overlap it."""
    met: dict[int, list[int]] = {}
    for j, i in zip(*(column.tolist() for column in overlaps(*columns(b, ndim), *columns(a, ndim))), strict=True):
        met.setdefault(i, []).append(j)
    return met
