"""Round numbers along an axis. Pure."""

from __future__ import annotations

import math

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_CLOCK_STEPS = tuple(n * unit for unit, parts in ((1.0, (1, 2, 5, 10, 15, 30)), (_MINUTE, (1, 2, 5, 10, 15, 30)),
                     (_HOUR, (1, 2, 3, 6, 12))) for n in parts)  # fmt: skip


def round_ticks(low: float, high: float, most: int, least_step: float = 0.0) -> list[float]:
    """Up to `most` multiples of 1, 2 or 5 times a power of ten, from `low` to `high`.

    >>> round_ticks(2.426, 5.786, 4), round_ticks(1, 60, 6), round_ticks(0.0311, 0.0318, 4), round_ticks(0, 3, 9, 1)
    ([3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [0.0312, 0.0314, 0.0316, 0.0318], [0.0, 1.0, 2.0, 3.0])
    """
    if not high > low or most < 1:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    steps = (factor * 10.0**exponent for exponent in range(power, power + 3) for factor in (1, 2, 5))
    return _multiples(low, high, next(step for step in steps if step >= least_step and _count(low, high, step) <= most))


def even_scale(low: float, high: float, lines: int, dots: int = 1) -> tuple[tuple[float, float], dict[int, float]]:
    """The shortest range that holds both and puts the multiples of a round step on lines that are equally far apart, two or more
    (of few lines one); and the multiples, by line from below. A line has `dots`, and the range ends with the last one.

    >>> even_scale(2.426, 5.786, 7), even_scale(0.0, 0.9, 2)
    (((2.0, 6.0), {0: 2.0, 3: 4.0, 6: 6.0}), ((0.0, 1.0), {0: 0.0, 1: 1.0}))
    """
    share = (lines * dots - 1) / (lines * dots)
    power = math.floor(math.log10((high - low) / lines))
    found = []
    for step in (factor * 10.0**exponent for exponent in range(power, power + 3) for factor in (1, 2, 5)):
        first = math.floor(low / step + 1e-9)
        for apart in range(2 if lines > 3 else 1, lines):
            length = step * lines / apart * share
            if first * step + length >= high - 1e-9 * (high - low):
                found.append((length, apart, first, step))
    length, apart, first, step = min(found)
    digits = max(-math.floor(math.log10(step)), 0)
    values = {line: round((first + line // apart) * step, digits) + 0.0 for line in range(0, lines, apart)}
    return (first * step, first * step + length), values


def time_ticks(length_s: float, most: int) -> list[float]:
    """Up to `most` times from 0 to `length_s`, in seconds: above a second in steps of a clock.

    >>> time_ticks(0.038, 4), time_ticks(7.3, 4), time_ticks(200, 4), time_ticks(9000, 4)
    ([0.0, 0.01, 0.02, 0.03], [0.0, 2.0, 4.0, 6.0], [0.0, 60.0, 120.0, 180.0], [0.0, 3600.0, 7200.0])
    """
    step = next((step for step in _CLOCK_STEPS if _count(0.0, length_s, step) <= most), 0.0)
    if length_s < most or not step:
        unit = 1.0 if length_s < most else _DAY
        return [tick * unit for tick in round_ticks(0.0, length_s / unit, most)]
    return _multiples(0.0, length_s, step)


def time_text(seconds: float) -> str:
    """A time of `time_ticks`.

    >>> [time_text(s) for s in (0.0005, 0.01, 2.0, 120.0, 5400.0, 172800.0)]
    ['500 us', '10 ms', '2 s', '2 min', '1 h 30 min', '2 d']
    """
    if seconds < _MINUTE:
        unit, name = next(
            each for each in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= each[0] or each[0] < 1e-5
        )
        return f"{round(seconds / unit, 3):g} {name}"
    days, rest = divmod(round(seconds), int(_DAY))
    hours, minutes = rest // 3600, rest % 3600 // 60
    parts = (f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if number)
    return " ".join(parts)


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, digits = math.ceil(low / step - 1e-9), max(-math.floor(math.log10(step)), 0)
    return [round((first + i) * step, digits) + 0.0 for i in range(_count(low, high, step))]
