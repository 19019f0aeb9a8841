"""Curves over training steps: one or two runs, a scale, marks below the axis, and the step under the cursor. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.tui.data.arrays import Floats
from titan_ckpt.tui.data.metrics import Goodput, Metrics
from titan_ckpt.tui.pictures.braille import BRAILLE, DOWN, Range, column_of, dots, number
from titan_ckpt.tui.pictures.ticks import even_scale, round_ticks
from titan_ckpt.tui.rows import Role, Row, TextSpan, fitted, row, truncate_start

GUTTER = 10
ODD = "n"  # the mark of a value that is NaN or infinite
SMOOTHINGS = (0.0, 0.6, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values over steps (NaN where there is none), and the role of their colour.

    `odd`: what was recorded as NaN or infinite, by step; the curve is broken there."""

    steps: Floats
    values: Floats
    role: Role
    is_smoothed: bool = False
    odd: Mapping[float, float] = field(default_factory=dict)

    def pieces(self) -> Iterator[tuple[Floats, Floats]]:
        """The known points, in pieces between those that are odd."""
        known = np.isfinite(self.values) & ~np.isin(self.steps, list(self.odd))
        steps, values = self.steps[known], self.values[known]
        cuts = np.searchsorted(steps, sorted(self.odd))
        return zip(np.split(steps, cuts), np.split(values, cuts), strict=True)


def smoothed(values: Floats, weight: float) -> Floats:
    """The exponential moving average, free of the bias of its start (as Adam's); NaNs are passed over.

    >>> smoothed(np.array([1.0, 3.0]), 0.5).round(3).tolist()
    [1.0, 2.333]
    """
    if not weight:
        return values
    average, total, found = 0.0, 0.0, np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if np.isfinite(value):
            average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
            found[i] = average / total
    return found


def plot_columns(width: int) -> int:
    """Cells of a plot in a line of `width` characters, behind the GUTTER."""
    return max(width - GUTTER - 1, 4)


def panel_rows(
    title: str,
    curves: Sequence[Curve],
    marks: Mapping[str, Sequence[float]],
    spot: float | None,
    width: int,
    height: int,
) -> Iterator[Row]:
    """A heading, `height` - 1 lines of dots with a scale, and the axis with its marks. The first curve is drawn on top."""
    known = [list(curve.pieces()) for curve in curves]
    y = np.concatenate([values for pieces in known for _, values in pieces])
    odd = curves[0].odd
    yield row((title, Role.HEAD), _shown_value(curves[0], spot), (_odd_text(odd), Role.BAD))
    if not len(y):
        yield row(("no values".rjust(GUTTER), Role.DIM))
        return
    columns, rows = plot_columns(width), max(height - 1, 1)
    every = np.concatenate([curve.steps for curve in curves])
    x_range, y_range = (float(every.min()), float(every.max())), (float(y.min()), float(y.max()))
    y_range, ticks = _scale(rows, y_range)
    cells = [
        np.bitwise_or.reduce(
            [dots(*each, rows=rows, columns=columns, x_range=x_range, y_range=y_range) for each in pieces]
        )
        for pieces in known
    ]
    at = column_of(spot, columns, x_range) if spot is not None and x_range[0] <= spot <= x_range[1] else -1
    for line in range(rows):
        spans = _spans([of_curve[line].tolist() for of_curve in cells], [curve.role for curve in curves], at)
        yield row((f"{ticks.get(line, ''):>{GUTTER - 1}} ", Role.DIM), *spans)
    yield row((" " * GUTTER + _axis(columns, x_range), Role.DIM))
    if marked := _marks({**marks, ODD: tuple(odd)}, columns, x_range):
        yield row(" " * GUTTER, *marked)


def _odd_text(odd: Mapping[float, float]) -> str:
    """How many values are no numbers, and the first of them."""
    if not odd:
        return ""
    step, value = min(odd.items())
    return f"   {value:g} at step {number(step)}" + (f" (and {len(odd) - 1} more)" if len(odd) > 1 else "")


def _shown_value(curve: Curve, spot: float | None) -> str:
    known, how = np.isfinite(curve.values), ", smoothed" if curve.is_smoothed else ""
    if spot is not None:
        place = int(np.abs(curve.steps - spot).argmin())
        step = float(curve.steps[place])
        if step in curve.odd:
            return f"   step {number(step)}: {curve.odd[step]:g}"
        return f"   step {number(step)}: {number(float(curve.values[place])) if known[place] else '-'}{how}"
    return f"   newest {number(float(curve.values[known][-1]))}{how}" if known.any() else ""


def _scale(rows: int, over: Range) -> tuple[Range, dict[int, str]]:
    """The range to draw, and round numbers by line, equally far apart: each at the lowest dot of its line."""
    if over[0] == over[1] or rows < 2:
        return over, {rows // 2: number(over[0])}
    whole, values = even_scale(*over, rows, dots=DOWN)
    return whole, {rows - 1 - line: number(value) for line, value in values.items()}


def _spans(lines: Sequence[Sequence[int]], roles: Sequence[Role], spot: int) -> Iterator[TextSpan]:
    """One line of dots: a cell has the colour of the first curve that passes through it."""
    cells = []
    for column, values in enumerate(zip(*lines, strict=True)):
        bits = int(np.bitwise_or.reduce(values))
        role = next((role for role, value in zip(roles, values, strict=True) if value), Role.PLAIN)
        char = chr(BRAILLE + bits) if bits else "│" if column == spot else " "
        cells.append((Role.DIM if column == spot and not bits else role, char))
    for role, same in itertools.groupby(cells, key=lambda cell: cell[0]):
        yield "".join(char for _, char in same), role


def _axis(columns: int, over: Range) -> str:
    """Round steps, the first digit of each in its step's column; that of one at the right edge is left of it."""
    text = ""
    for step in round_ticks(*over, max(columns // 8, 1), 1.0):
        name = number(step)
        start = min(column_of(step, columns, over), columns - len(name))
        if not text or start > len(text) + 1:
            text = f"{text:<{start}}{name}"
    return text


def _marks(marks: Mapping[str, Sequence[float]], columns: int, over: Range) -> list[TextSpan]:
    """A letter for each mark below its step; "" where nothing is marked."""
    line = [" "] * columns
    for letter, steps in marks.items():
        for step in steps:
            if over[0] <= step <= over[1]:
                line[column_of(step, columns, over)] = letter
    text = "".join(line).rstrip()
    return [(text, Role.NOTE)] if text else []


_VALUE = 11  # columns of a value and the space before it


def value_rows(metrics: Metrics, spot: float | None, width: int, other: Metrics | None = None) -> Iterator[Row]:
    """Every value at a step, the newest if none is chosen; beside it that of another run at the same step."""
    if not len(metrics.steps):
        return
    place = int(np.abs(metrics.steps - spot).argmin()) if spot is not None else len(metrics.steps) - 1
    yield row(("step ", Role.DIM), (number(float(metrics.steps[place])), Role.BOLD))
    longest = min(
        max((len(title) for title, _ in metrics.panels()), default=0), max(width - (22 if other is not None else 11), 8)
    )
    others = _values_at(other, float(metrics.steps[place])) if other is not None else {}
    if other is not None:
        names = f"{'':<{longest}}  {'this run':>9}  {truncate_start(other.source, max(width - longest - 13, 8))}"
        yield row((names, Role.DIM))
    for title, text in _values_at(metrics, float(metrics.steps[place])).items():
        beside = f"  {others[title]}" if title in others else ""
        yield row((fitted(title, longest), Role.DIM), f"  {text:>9}", (beside, Role.NOTE))


def _values_at(metrics: Metrics, step: float) -> dict[str, str]:
    """The values of a step as one reads them; {} if the run did not log it."""
    place, odd = int(np.searchsorted(metrics.steps, step)), metrics.odd_values()
    is_there = place < len(metrics.steps) and metrics.steps[place] == step
    return {
        title: f"{odd[title][step]:g}" if step in odd.get(title, {}) else with_unit(title, float(values[place]))
        for title, values in (metrics.panels() if is_there else ())
    }


def with_unit(title: str, value: float) -> str:
    """A value as one reads it: durations and sizes with their unit, which their name tells.

    >>> with_unit("data wait, s", 0.012), with_unit("memory, bytes", 3.79e8), with_unit("loss", 2.5)
    ('12 ms', '379 MB', '2.5')
    """
    if not np.isfinite(value):
        return "-"
    name = title.partition(" (")[0]
    if name.endswith(("bytes_per_s", "bytes/s")):
        return f"{format_size(value)}/s"
    if name.endswith("bytes"):
        return format_size(value)
    if name.endswith((", s", "_s")) and not name.endswith("_per_s"):
        return f"{value * 1000:.2g} ms" if 0 < abs(value) < 0.01 else format_duration(value)
    return number(value)


# The characters differ where a terminal has no colours, too.
_SHARES = (("steps", "━", Role.GOOD), ("data", "╍", Role.NOTE), ("saves", "█", Role.WARN), ("validation", "v", Role.NOTE),
           ("recomputed", "x", Role.BAD), ("startup", "~", Role.DIM), ("downtime", "_", Role.BAD),
           ("other", "·", Role.DIM))  # fmt: skip


def goodput_rows(found: Goodput, width: int) -> Iterator[Row]:
    """The share of wall time in steps that count, as a bar, and what the rest went to."""
    yield row(("goodput ", Role.BOLD), f"{found.share('steps'):.0%} of {format_duration(found.total_s)}")
    spans: list[TextSpan] = []
    for name, char, role in _SHARES:
        spans.append((char * round(found.share(name) * max(width - 2, 8)), role))
    yield row(*spans)
    for name, char, role in _SHARES:
        if found.seconds[name] > 0:
            text = f"{found.share(name):>5.1%}  {format_duration(found.seconds[name])}"
            yield row((f"{char} ", role), (f"{name:<10}", Role.DIM), text)
