"""A tensor's cut as a small grid of coloured cells in the terminal. No torch, no I/O.

A cell is a spot of the tensor: dimension 0 downwards, dimension 1 to the right (further dimensions are looked at in their
middle, a vector is one row). Colour is the source piece that holds the spot, text is who holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

MAX_ROWS, MAX_COLUMNS = 16, 16
# Background colours of the 256-colour table that black text can be read on.
_COLOURS = (153, 217, 157, 223, 183, 159, 210, 192, 189, 216, 121, 229, 147, 224, 115, 195)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBoxes:
    """Boxes `[n, ndim]` and the name of the holder of each."""

    offsets: Int64s
    sizes: Int64s
    holders: Sequence[str]


def draw_cut(
    global_shape: tuple[int, ...], pieces: CutBoxes, *, source: CutBoxes | None = None, is_coloured: bool = True
) -> str:
    """The grid of `pieces`; coloured by `source`'s pieces where those are given, which shows what each is made of.

    Without colour a letter stands for the source piece: `a0` is what rank 0 gets from the first source piece.
    """
    if 0 in global_shape:
        return "(no elements)"
    spots = _spots(global_shape, [piece for piece in (pieces, source) if piece is not None])
    holders = _find(pieces, spots)
    colours = _find(source or pieces, spots)
    names = [
        [_name(pieces, h, c, source, is_coloured) for h, c in zip(*row, strict=True)] for row in _rows(holders, colours)
    ]
    width = max(len(name) for row in names for name in row) + 1
    lines = []
    for row, colour_row in zip(names, colours.tolist(), strict=True):
        cells = [_cell(name.center(width), colour, is_coloured) for name, colour in zip(row, colour_row, strict=True)]
        lines.append("".join(cells))
    return "\n".join(lines)


def _rows(holders: Int64s, colours: Int64s) -> list[tuple[list[int], list[int]]]:
    return list(zip(holders.tolist(), colours.tolist(), strict=True))


def _name(pieces: CutBoxes, holder: int, colour: int, source: CutBoxes | None, is_coloured: bool) -> str:
    text = "?" if holder < 0 else pieces.holders[holder]
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


def _spots(global_shape: tuple[int, ...], cuts: list[CutBoxes]) -> Int64s:
    """Elements to look at, `[rows, columns, ndim]`: one in each interval between borders while there are few, else evenly."""
    ndim = len(global_shape)
    middle = np.array([size // 2 for size in global_shape], dtype=np.int64)
    along = [np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)]
    dims = [0, 1] if ndim > 1 else [1, 0]
    for axis, (dim, most) in enumerate(zip(dims, (MAX_ROWS, MAX_COLUMNS), strict=True)):
        if dim < ndim:
            along[axis] = _places(global_shape[dim], [(c.offsets[:, dim], c.sizes[:, dim]) for c in cuts], most)
    spots = np.broadcast_to(middle, (len(along[0]), len(along[1]), ndim)).copy()
    for axis, dim in enumerate(dims):
        if dim < ndim:
            spots[:, :, dim] = along[axis][:, None] if axis == 0 else along[axis][None, :]
    return spots


def _places(size: int, cuts: list[tuple[Int64s, Int64s]], most: int) -> Int64s:
    ends = [np.array([0, size], dtype=np.int64), *(np.concatenate([o, o + s]) for o, s in cuts)]
    borders: Int64s = np.unique(np.concatenate(ends))
    least = min(size, 4)
    if least <= len(borders) - 1 <= most:
        return (borders[:-1] + borders[1:]) // 2
    count = min(size, most if len(borders) - 1 > most else least * max(1, len(borders) - 1))
    return (np.arange(count, dtype=np.int64) * 2 + 1) * size // (2 * count)


def _find(pieces: CutBoxes, spots: Int64s) -> Int64s:
    """Index of the piece that holds each spot, -1 where none does."""
    found = np.full(spots.shape[:2], -1, dtype=np.int64)
    for index, (offset, size) in enumerate(zip(pieces.offsets, pieces.sizes, strict=True)):
        found[((spots >= offset) & (spots < offset + size)).all(axis=2)] = index
    return found
