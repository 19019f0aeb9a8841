"""Draw how a tensor is cut, as a small grid of coloured cells in the terminal. No torch, no I/O.

A cell is a sample point of the tensor: dimension 0 runs down, dimension 1 to the right (further dimensions are sampled in their
middle, a vector is one row). The colour is the source box that contains the point, the text is the holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

MAX_ROWS, MAX_COLUMNS = 16, 16
# Backgrounds of the 256-colour table on which black text is readable.
_COLOURS = (153, 217, 157, 223, 183, 159, 210, 192, 189, 216, 121, 229, 147, 224, 115, 195)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBoxes:
    """Boxes as columns `[n, ndim]`, and the name of each box's holder."""

    offsets: Int64s
    sizes: Int64s
    holders: Sequence[str]


def draw_cut(
    global_shape: tuple[int, ...], boxes: CutBoxes, *, source: CutBoxes | None = None, is_coloured: bool = True
) -> str:
    """Draw `boxes`, coloured by the box of `source` that each cell comes from (default: by its own).

    Without colour a letter stands for the source box: `a0` is what rank 0 gets from the first source box.
    """
    if 0 in global_shape:
        return "(no elements)"
    points = _points(global_shape, [cut for cut in (boxes, source) if cut is not None])
    holders = _find(boxes, points)
    colours = _find(source or boxes, points)
    names = [
        [_name(boxes, h, c, source, is_coloured) for h, c in zip(*row, strict=True)] for row in _rows(holders, colours)
    ]
    width = max(len(name) for row in names for name in row) + 1
    lines = []
    for row, colour_row in zip(names, colours.tolist(), strict=True):
        cells = [_cell(name.center(width), colour, is_coloured) for name, colour in zip(row, colour_row, strict=True)]
        lines.append("".join(cells))
    return "\n".join(lines)


def _rows(holders: Int64s, colours: Int64s) -> list[tuple[list[int], list[int]]]:
    return list(zip(holders.tolist(), colours.tolist(), strict=True))


def _name(boxes: CutBoxes, holder: int, colour: int, source: CutBoxes | None, is_coloured: bool) -> str:
    text = "?" if holder < 0 else boxes.holders[holder]
    if is_coloured or source is None:
        return text
    return ("?" if colour < 0 else _letter(colour)) + text


def _letter(number: int) -> str:
    """a ... z, aa, ab, ..."""
    head, last = divmod(number, len(_LETTERS))
    return (_letter(head - 1) if head else "") + _LETTERS[last]


def _cell(text: str, colour: int, is_coloured: bool) -> str:
    if not is_coloured or colour < 0:
        return text
    return f"\x1b[30;48;5;{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m"


def _points(global_shape: tuple[int, ...], cuts: list[CutBoxes]) -> Int64s:
    """Sample points `[rows, columns, ndim]`: one between each two borders while these are few, else evenly spaced."""
    ndim = len(global_shape)
    middle = np.array([size // 2 for size in global_shape], dtype=np.int64)
    along = [np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)]
    dims = [0, 1] if ndim > 1 else [1, 0]
    for axis, (dim, most) in enumerate(zip(dims, (MAX_ROWS, MAX_COLUMNS), strict=True)):
        if dim < ndim:
            along[axis] = _places(global_shape[dim], [(c.offsets[:, dim], c.sizes[:, dim]) for c in cuts], most)
    points = np.broadcast_to(middle, (len(along[0]), len(along[1]), ndim)).copy()
    for axis, dim in enumerate(dims):
        if dim < ndim:
            points[:, :, dim] = along[axis][:, None] if axis == 0 else along[axis][None, :]
    return points


def _places(size: int, cuts: list[tuple[Int64s, Int64s]], most: int) -> Int64s:
    ends = [np.array([0, size], dtype=np.int64), *(np.concatenate([o, o + s]) for o, s in cuts)]
    borders: Int64s = np.unique(np.concatenate(ends))
    least = min(size, 4)
    if least <= len(borders) - 1 <= most:
        return (borders[:-1] + borders[1:]) // 2
    count = min(size, most if len(borders) - 1 > most else least * max(1, len(borders) - 1))
    return (np.arange(count, dtype=np.int64) * 2 + 1) * size // (2 * count)


def _find(boxes: CutBoxes, points: Int64s) -> Int64s:
    """Index of the box that contains each sample point, -1 if none does."""
    found = np.full(points.shape[:2], -1, dtype=np.int64)
    for index, (offset, size) in enumerate(zip(boxes.offsets, boxes.sizes, strict=True)):
        found[((points >= offset) & (points < offset + size)).all(axis=2)] = index
    return found
