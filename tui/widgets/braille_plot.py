"""A line plot in braille dots, with a labelled scale. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

# Bits of the dots of a braille cell, [row][column].
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], np.int64)
GUTTER = 10


def plot(steps: _Floats, values: _Floats, width: int, height: int) -> list[str]:
    """`height` lines of `width` cells: scale on the left, dots on the right, axis on the last line."""
    known = np.isfinite(values)
    rows, columns = max(height - 1, 1), max(width - GUTTER - 1, 4)
    if not known.any():
        return ["no values".rjust(GUTTER), *[""] * (height - 1)]
    x, y = steps[known], values[known]
    low, high = float(y.min()), float(y.max())
    lines = _dots(x, y, rows, columns)
    labels = [""] * rows
    labels[0], labels[-1] = number(high), number(low) if rows > 1 else number(high)
    axis = f"{number(float(x[0]))}{' ' * columns}"[: columns - len(number(float(x[-1])))] + number(float(x[-1]))
    return [
        *(f"{label:>{GUTTER - 1}} {line}" for label, line in zip(labels, lines, strict=True)),
        " " * GUTTER + axis,
    ]


def _dots(x: _Floats, y: _Floats, rows: int, columns: int) -> list[str]:
    across, down = columns * 2, rows * 4
    column = _scaled(x, across)
    if len(x) < across:  # interpolate between points
        every = np.arange(column[0], column[-1] + 1)
        column, y = every, np.interp(every, column, y)
    line = down - 1 - _scaled(y, down)
    cells = np.zeros((rows, columns), np.int64)
    previous = None
    for i, j in zip(column.tolist(), line.tolist(), strict=True):
        low, high = (j, j) if previous is None else (min(previous, j), max(previous, j))
        for k in range(low, high + 1):
            cells[k // 4, i // 2] |= int(_BITS[k % 4, i % 2])
        previous = j
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row).rstrip() for row in cells.tolist()]


def _scaled(values: _Floats, size: int) -> _Ints:
    low, high = float(values.min()), float(values.max())
    if high == low:
        return np.full(len(values), (size - 1) // 2, np.int64)
    return ((values - low) / (high - low) * (size - 1)).round().astype(np.int64)


def number(value: float) -> str:
    """Format a number in at most eight characters.

    >>> number(0.00012), number(4.0), number(123456789.0)
    ('1.2e-04', '4', '1.23e+08')
    """
    if value == 0 or (abs(value) < 1e6 and value == int(value)):
        return str(int(value))
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}" if abs(value) >= 1e5 else f"{value:.1e}"
