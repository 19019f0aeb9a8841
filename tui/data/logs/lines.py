"""Split log bytes into columns of line starts, times and levels, without a Python object per line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_ckpt.tui.data.arrays import ByteArray, Ints

DEBUG, INFO, WARNING, ERROR, TRACE = range(5)  # TRACE: a line of a traceback before its last, which is an ERROR
_TRACEBACK, _MOST_TRACE_LINES = b"Traceback (most", 400
LEVELS = ("debug", "info", "warning", "error")
_WORDS = (
    (b"DEBUG", DEBUG), (b"WARN", WARNING), (b"ERROR", ERROR), (b"CRITICAL", ERROR), (b"FATAL", ERROR),
    (_TRACEBACK, ERROR), (b"Fatal Python error", ERROR),
)  # fmt: skip
UNKNOWN_TIME = -1
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A timestamp format: columns of its digits and separators. `date` has 4 or 8 digits."""

    pattern: re.Pattern[bytes]
    date: tuple[int, ...]
    clock: tuple[int, ...]
    between: tuple[tuple[int, bytes], ...]

    @property
    def dot(self) -> int:
        """Column of the decimal point after the seconds."""
        return self.clock[-1] + 1


# `2026-01-31T23:59:59.123`, and `W0131 23:59:59.123456` of torch's own logging, which has no year.
FULL = Stamp(
    pattern=re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{3})?"),
    date=(0, 1, 2, 3, 5, 6, 8, 9), clock=(11, 12, 14, 15, 17, 18), between=((4, b"-"), (7, b"-"), (13, b":"), (16, b":")),
)  # fmt: skip
YEARLESS = Stamp(
    pattern=re.compile(rb"(?<!\w)[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{3}"),
    date=(1, 2, 3, 4), clock=(6, 7, 9, 10, 12, 13), between=((5, b" "), (8, b":"), (11, b":"), (14, b".")),
)  # fmt: skip
# Times without a year are parsed in this leap year until `with_year` corrects them.
_NO_YEAR = 1972
_NO_YEAR_MS = (63_072_000_000, 94_694_400_000)
_LETTERS = ((b"W", WARNING), (b"E", ERROR), (b"F", ERROR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Columns of lines: byte offsets, milliseconds since the epoch or UNKNOWN_TIME, levels."""

    start: Ints
    time_ms: Ints
    level: ByteArray


def scan(data: bytes, offset: int = 0) -> Lines:
    """Lines of `data`, which begins at a line start; `offset` is added to the starts."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw == 10).astype(np.int64)
    start = np.concatenate([np.zeros(1, np.int64), ends + 1])
    if len(start) and start[-1] >= len(raw):
        start = start[:-1]
    level, times = _levels(data, start), np.full(len(start), UNKNOWN_TIME, np.int64)
    for stamp in (FULL, YEARLESS):
        _read_times(data, raw, start, stamp, times)
    _mark_letters(data, raw, start, times, level)
    for place in _places(data, _TRACEBACK) if len(start) else []:
        _mark_traceback(data, start, place, level)
    return Lines(start=start + offset, time_ms=times, level=level)


def _levels(data: bytes, start: Ints) -> ByteArray:
    level = np.full(len(start), INFO, np.uint8)
    for word, value in _WORDS:
        places = _places(data, word)
        if places and len(start):
            lines = np.searchsorted(start, np.array(places, np.int64), side="right") - 1
            level[lines] = np.maximum(level[lines], value) if value > INFO else np.minimum(level[lines], value)
    return level


def _mark_traceback(data: bytes, start: Ints, place: int, level: ByteArray) -> None:
    """Mark the indented lines after the head of a traceback, and the exception on its last line, whatever its name.

    What stands before the head, such as `[rank0]: `, stands before all of its lines, or before the head alone."""
    head = int(np.searchsorted(start, place, side="right")) - 1
    before = _without_digits(data[start[head] : place])
    is_everywhere: bool | None = None
    for line in range(head + 1, min(head + _MOST_TRACE_LINES, len(start))):
        at = int(start[line])
        has_it = _without_digits(data[at : at + len(before)]) == before
        at += len(before) if has_it else 0
        if data[at : at + 1] in (b" ", b"\t"):
            level[line], is_everywhere = TRACE, has_it
        elif has_it or is_everywhere is False:
            level[line] = ERROR
            return


def _without_digits(text: bytes) -> bytes:
    """Times differ from line to line; the number after `rank` does not."""
    return re.sub(rb"(?<![A-Za-z0-9])\d+", lambda found: b"0" * len(found[0]), text)


def _mark_letters(data: bytes, raw: ByteArray, start: Ints, times: Ints, level: ByteArray) -> None:
    """Set the level from the letter of timestamps without a year (W, E, F)."""
    lines = np.flatnonzero(_is_yearless(times))
    column = _column(data, start, YEARLESS) if len(lines) else None
    if column is None:
        return
    fits = _is_stamp(raw, start[lines], column, YEARLESS)
    letters = np.full(len(lines), ord("I"), np.uint8)
    letters[fits] = raw[start[lines[fits]] + column]
    for place in np.flatnonzero(~fits).tolist():
        match = _match(data, int(start[lines[place]]), YEARLESS)
        letters[place] = match.group()[0] if match is not None else ord("I")
    for letter, value in _LETTERS:
        marked = lines[letters == letter[0]]
        level[marked] = np.maximum(level[marked], value)


def _places(data: bytes, word: bytes) -> list[int]:
    found, at = [], data.find(word)
    while at >= 0:
        found.append(at)
        at = data.find(word, at + len(word))
    return found


def _read_times(data: bytes, raw: ByteArray, start: Ints, stamp: Stamp, times: Ints) -> None:
    """Read missing times: first at the column of the first timestamp found, then by search."""
    unknown = np.flatnonzero(times == UNKNOWN_TIME)
    if not len(unknown):
        return
    column = _column(data, start[unknown], stamp)
    if column is not None:
        lines = unknown[_is_stamp(raw, start[unknown], column, stamp)]
        times[lines] = _fixed_times(raw, start[lines] + column, stamp)
    if len(start) <= 20_000:
        for line in unknown[times[unknown] == UNKNOWN_TIME].tolist():
            match = _match(data, int(start[line]), stamp)
            if match is not None:
                at = np.array([match.start()], np.int64)
                times[line] = int(_fixed_times(raw, at, stamp)[0])


def _match(data: bytes, begin: int, stamp: Stamp) -> re.Match[bytes] | None:
    end = data.find(b"\n", begin)
    return stamp.pattern.search(data, begin, min(begin + 120, len(data) if end < 0 else end))


def _column(data: bytes, start: Ints, stamp: Stamp) -> int | None:
    for begin in start[:200].tolist():
        match = _match(data, begin, stamp)
        if match:
            return int(match.start() - begin)
    return None


def _is_stamp(raw: ByteArray, start: Ints, column: int, stamp: Stamp) -> npt.NDArray[np.bool_]:
    """Mask of the lines with a timestamp at this column."""
    found = start + column + stamp.dot <= len(raw)
    at = start[found] + column
    digits = raw[at[:, None] + np.array(stamp.date + stamp.clock)]
    fits = ((digits >= 48) & (digits <= 57)).all(axis=1)
    for place, character in stamp.between:
        if place < stamp.dot:
            fits &= raw[at + place] == character[0]
    found[found] = fits
    return found


def _fixed_times(raw: ByteArray, at: Ints, stamp: Stamp) -> Ints:
    digits = raw[at[:, None] + np.array(stamp.date + stamp.clock)].astype(np.int64) - 48
    num_date = len(stamp.date)
    clock = digits[:, num_date:] @ np.array((36_000_000, 3_600_000, 600_000, 60_000, 10_000, 1_000))
    days = digits[:, :num_date] @ 10 ** np.arange(num_date - 1, -1, -1)
    day_ms = _days_ms(days if num_date == 8 else days + _NO_YEAR * 10_000)
    return np.where(day_ms == UNKNOWN_TIME, UNKNOWN_TIME, day_ms + clock + _millis(raw, at + stamp.dot))


def _millis(raw: ByteArray, dot: Ints) -> Ints:
    millis = np.zeros(len(dot), np.int64)
    fits = np.flatnonzero(dot + 4 <= len(raw))
    at = dot[fits]
    digits = raw[at[:, None] + np.array((1, 2, 3))].astype(np.int64) - 48
    has_millis = ((digits >= 0) & (digits <= 9)).all(axis=1) & np.isin(raw[at], (44, 46))
    millis[fits] = np.where(has_millis, digits @ np.array((100, 10, 1)), 0)
    return millis


def _days_ms(dates: npt.NDArray[Any]) -> Ints:
    """Milliseconds at the start of each day given as 20261231; UNKNOWN_TIME if invalid."""
    days, place = np.unique(dates, return_inverse=True)
    return np.array([_day_ms(int(day)) for day in days], np.int64)[place]


def _day_ms(day: int) -> int:
    try:
        return int(datetime(day // 10_000, day // 100 % 100, day % 100, tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        return UNKNOWN_TIME


def year_of(times: Ints) -> int | None:
    """Year of the newest time with a year; None without one."""
    known = times[(times != UNKNOWN_TIME) & ~_is_yearless(times)]
    return datetime.fromtimestamp(int(known.max()) / 1000, UTC).year if len(known) else None


def _is_yearless(times: Ints) -> npt.NDArray[np.bool_]:
    return (times >= _NO_YEAR_MS[0]) & (times < _NO_YEAR_MS[1])


def with_year(times: Ints, year: int) -> Ints:
    """Move times without a year into `year`."""
    lines = np.flatnonzero(_is_yearless(times))
    if not len(lines):
        return times
    days, place = np.unique(times[lines] // DAY_MS, return_inverse=True)
    dates = [datetime.fromtimestamp(int(day) * DAY_MS / 1000, UTC) for day in days]
    moved = np.array(
        [_day_ms(year * 10_000 + date.month * 100 + min(date.day, 28 if date.month == 2 else 31)) for date in dates]
    )
    times = times.copy()
    times[lines] = moved[place] + times[lines] % DAY_MS
    return times


def filled(times: Ints) -> Ints:
    """Fill unknown times from the previous line, leading ones from the first known; unchanged if all are unknown."""
    known = times != UNKNOWN_TIME
    if not known.any():
        return times
    last = np.maximum.accumulate(np.where(known, np.arange(len(times)), -1))
    first = int(np.flatnonzero(known)[0])
    return np.where(last >= 0, times[last], times[first])
