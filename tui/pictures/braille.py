"""Curves in braille dots: two dots across and four down to a character. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
Range = tuple[float, float]

# Bits of the dots of a braille cell, [row][column].
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], np.int64)
BRAILLE = 0x2800
DOWN = 4  # dots of a cell, one above the other


def dots(x: _Floats, y: _Floats, *, rows: int, columns: int, x_range: Range, y_range: Range) -> _Ints:
    """Cells [rows, columns] of a curve through known points; a cell's character is BRAILLE plus its value, 0 is empty."""
    across, down = columns * 2, rows * DOWN
    cells = np.zeros((rows, columns), np.int64)
    if not len(x):
        return cells
    column = _scaled(x, across, x_range)
    if len(x) < across:  # interpolate between points
        every = np.arange(column[0], column[-1] + 1)
        column, y = every, np.interp(every, column, y)
    line = down - 1 - _scaled(y, down, y_range)
    previous = None
    for i, j in zip(column.tolist(), line.tolist(), strict=True):
        low, high = (j, j) if previous is None else (min(previous, j), max(previous, j))
        for k in range(low, high + 1):
            cells[k // 4, i // 2] |= int(_BITS[k % 4, i % 2])
        previous = j
    return cells


def column_of(x: float, columns: int, x_range: Range) -> int:
    """The cell that `x` falls into."""
    return int(_scaled(np.array([x]), columns * 2, x_range)[0]) // 2


def _scaled(values: _Floats, size: int, over: Range) -> _Ints:
    low, high = over
    if high == low:
        return np.full(len(values), (size - 1) // 2, np.int64)
    return ((values - low) / (high - low) * (size - 1)).round().clip(0, size - 1).astype(np.int64)


def number(value: float) -> str:
    """Format a number in at most eight characters.

    >>> number(0.00012), number(4.0), number(123456789.0)
    ('1.2e-04', '4', '1.23e+08')
    """
    if value == 0 or (abs(value) < 1e6 and value == int(value)):
        return str(int(value))
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}" if abs(value) >= 1e5 else f"{value:.1e}"
