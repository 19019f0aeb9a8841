"""Lines of a block of log bytes as columns: starts, times, levels, without one Python object per line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

DEBUG, INFO, WARNING, ERROR = range(4)
LEVELS = ("debug", "info", "warning", "error")
_WORDS = (
    (b"DEBUG", DEBUG), (b"WARN", WARNING), (b"ERROR", ERROR), (b"CRITICAL", ERROR), (b"FATAL", ERROR),
    (b"Traceback (most", ERROR), (b"Fatal Python error", ERROR),
)  # fmt: skip
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{3})?")
# Columns of the digits in `2026-01-31T23:59:59.123`.
_DATE = (0, 1, 2, 3, 5, 6, 8, 9)
_CLOCK = (11, 12, 14, 15, 17, 18)
_MILLIS = (20, 21, 22)
UNKNOWN_TIME = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Columns of some lines: byte offsets, milliseconds since the epoch (UNKNOWN_TIME), levels."""

    start: Ints
    time_ms: Ints
    level: Bytes


def scan(data: bytes, offset: int = 0) -> Lines:
    """The lines that begin in `data`, which begins a line; `offset` is added to the starts."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw == 10).astype(np.int64)
    start = np.concatenate([np.zeros(1, np.int64), ends + 1])
    if len(start) and start[-1] >= len(raw):
        start = start[:-1]
    return Lines(start=start + offset, time_ms=_times(data, raw, start), level=_levels(data, start))


def _levels(data: bytes, start: Ints) -> Bytes:
    level = np.full(len(start), INFO, np.uint8)
    for word, value in _WORDS:
        places = _places(data, word)
        if places and len(start):
            lines = np.searchsorted(start, np.array(places, np.int64), side="right") - 1
            level[lines] = np.maximum(level[lines], value) if value > INFO else np.minimum(level[lines], value)
    return level


def _places(data: bytes, word: bytes) -> list[int]:
    found, at = [], data.find(word)
    while at >= 0:
        found.append(at)
        at = data.find(word, at + len(word))
    return found


def _times(data: bytes, raw: Bytes, start: Ints) -> Ints:
    """The time at the column where the first stamped lines have it; a regular expression where there is no such column."""
    column = _column(data, start)
    times = np.full(len(start), UNKNOWN_TIME, np.int64)
    if column is not None:
        times = _fixed_times(raw, start, column)
    if len(start) <= 20_000 and bool((times == UNKNOWN_TIME).any()):
        for line in np.flatnonzero(times == UNKNOWN_TIME).tolist():
            begin = int(start[line])
            match = _TIME.search(data, begin, min(begin + 120, _end(data, begin)))
            if match:
                times[line] = _parsed(match.group())
    return times


def _end(data: bytes, begin: int) -> int:
    end = data.find(b"\n", begin)
    return len(data) if end < 0 else end


def _column(data: bytes, start: Ints) -> int | None:
    for begin in start[:200].tolist():
        match = _TIME.search(data, begin, min(begin + 120, _end(data, begin)))
        if match:
            return int(match.start() - begin)
    return None


def _parsed(text: bytes) -> int:
    try:
        moment = datetime.fromisoformat(text.decode().replace(",", ".").replace("T", " "))
    except ValueError:
        return UNKNOWN_TIME
    return int(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _fixed_times(raw: Bytes, start: Ints, column: int) -> Ints:
    times = np.full(len(start), UNKNOWN_TIME, np.int64)
    fits = np.flatnonzero(start + column + 23 <= len(raw))
    if not len(fits):
        return times
    at = start[fits] + column
    digits = raw[at[:, None] + np.array(_DATE + _CLOCK)].astype(np.int64) - 48
    separators = raw[at[:, None] + np.array((4, 7, 13, 16))]
    is_stamp = ((digits >= 0) & (digits <= 9)).all(axis=1) & (separators == np.frombuffer(b"--::", np.uint8)).all(
        axis=1
    )
    fits, at, digits = fits[is_stamp], at[is_stamp], digits[is_stamp]
    clock = digits[:, 8:] @ np.array((36_000_000, 3_600_000, 600_000, 60_000, 10_000, 1_000))
    times[fits] = _days_ms(digits[:, :8] @ 10 ** np.arange(7, -1, -1)) + clock + _millis(raw, at)
    return times


def _millis(raw: Bytes, at: Ints) -> Ints:
    digits = raw[at[:, None] + np.array(_MILLIS)].astype(np.int64) - 48
    has_millis = ((digits >= 0) & (digits <= 9)).all(axis=1) & np.isin(raw[at + 19], (44, 46))
    return np.where(has_millis, digits @ np.array((100, 10, 1)), 0).astype(np.int64)


def _days_ms(dates: npt.NDArray[Any]) -> Ints:
    """Milliseconds at the start of each day, days given as 20261231."""
    days, place = np.unique(dates, return_inverse=True)
    return np.array([_day_ms(int(day)) for day in days], np.int64)[place]


def _day_ms(day: int) -> int:
    try:
        return int(datetime(day // 10_000, day // 100 % 100, day % 100, tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        return 0


def filled(times: Ints) -> Ints:
    """Times with the unknown ones taken from the line before, or the first known one; all unknown stays so."""
    known = times != UNKNOWN_TIME
    if not known.any():
        return times
    last = np.maximum.accumulate(np.where(known, np.arange(len(times)), -1))
    first = int(np.flatnonzero(known)[0])
    return np.where(last >= 0, times[last], times[first])
