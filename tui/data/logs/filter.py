"""Filter merged logs: parse the typed filter, select lines, fold equal lines of several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from titan_ckpt.tui.data.logs.growth import fresh_mask, merged, moved
from titan_ckpt.tui.data.logs.index import LogFilter, LogIndex, Positions, cheap_mask, lines_by_time, search
from titan_ckpt.tui.data.logs.lines import DAY_MS, LEVELS
from titan_ckpt.tui.rows import parse_ranks

FOLD_MS, FOLD_LINES = 2_000, 100_000
# When and by whom a line was written: the clock, torch's letter and thread, NCCL's host:pid:tid [device], the process,
# torchrun's bracket, an address.
_WRITER = re.compile(
    r"(?:\d{4}-)?\d\d-\d\d[T ](?=\d\d:)|(?<!\w)[IWEF]\d{4} (?=\d\d:)|\d\d:\d\d:\d\d(?:[.,]\d+)?(?: +\d+(?= ))?"
    r"|[\w.-]+:\d+:\d+ \[\d+\](?= NCCL)|\bpid[ =:]?\d+|\[default\d+\]|0x[0-9a-f]{6,}"
)
_RANK = re.compile(r"\brank[ =:]?(\d+)\b(?: [a-z_]+\d+)*\]?", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[T ])?(\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d{1,3}))?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """The filter as typed, and whether equal lines are folded."""

    text: str = ""
    is_folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """Result of a query: line positions by time. `folds` maps a place in `view` to the ranks that wrote the same line."""

    query: LogQuery
    index: LogIndex
    passed: Positions
    view: Positions
    folds: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    is_cut: bool = False


def views(index: LogIndex, query: LogQuery, former: LogView | None) -> Iterator[LogView]:
    """Yield growing results, the last one complete. With `former`, a result for the index this one grew from, only new lines are
    searched."""
    wanted = parse_filter(query.text)
    view = LogView(query=query, index=index, passed=index.order, view=index.order)
    for passed in _passed(index, wanted, former) if not wanted.is_open else [index.order]:
        view = replace(view, passed=passed, view=passed)
        yield view
    if query.is_folded:
        folded, folds = fold(index, view.passed[-FOLD_LINES:])
        yield replace(view, view=folded, folds=folds, is_cut=len(view.passed) > FOLD_LINES)


def _passed(index: LogIndex, wanted: LogFilter, former: LogView | None) -> Iterator[Positions]:
    mask, known = cheap_mask(index, wanted), np.zeros(0, np.int32)
    growth = index.growth
    if former is not None and growth is not None and growth.token is former.index.token:
        known = moved(growth, index.base, former.passed)
        mask &= fresh_mask(index)
    for _, found in search(index, wanted.pattern, mask) if wanted.pattern else [(1.0, mask)]:
        yield merged(known, np.flatnonzero(found), index.time_ms) if len(known) else lines_by_time(index, found)


def parse_filter(text: str) -> LogFilter:
    """Parse `[ranks] [level] [pattern]`.

    >>> parse_filter("0-2"), parse_filter("level error").level, parse_filter("nan|inf").pattern
    (LogFilter(ranks=(0, 1, 2), level=0, pattern=''), 3, 'nan|inf')
    >>> parse_filter("3,5 warning store.*timeout")
    LogFilter(ranks=(3, 5), level=2, pattern='store.*timeout')
    """
    ranks, level, left = None, 0, text.strip()
    word, _, rest = left.partition(" ")
    found = parse_ranks(word) if word else None
    if found is not None:
        ranks, left = found, rest.strip()
    word, _, rest = left.removeprefix("level ").strip().partition(" ")
    if word.lower() in LEVELS:
        level, left = LEVELS.index(word.lower()), rest.strip()
    return LogFilter(ranks=ranks, level=level, pattern=left)


def parse_clock(text: str, near_ms: int) -> int | None:
    """Parse a time to milliseconds since the epoch; without a date, on the day of `near_ms`. None if invalid.

    >>> parse_clock("00:01:02.5", near_ms=86_400_000) - 86_400_000, parse_clock("noon", 0)
    (62500, None)
    """
    match = _CLOCK.fullmatch(text.strip().removesuffix(" UTC"))
    if match is None or int(match[2]) > 23 or max(int(match[3]), int(match[4] or 0)) > 59:
        return None
    day, hours, minutes, seconds, fraction = match.groups()
    try:
        start = (
            int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1000
            if day
            else near_ms // DAY_MS * DAY_MS
        )
    except ValueError:
        return None
    clock = (int(hours) * 60 + int(minutes)) * 60 + int(seconds or 0)
    return start + clock * 1000 + int((fraction or "0").ljust(3, "0"))


def fold(index: LogIndex, view: Positions) -> tuple[Positions, dict[int, tuple[int, ...]]]:
    """Merge lines that several ranks wrote within two seconds, equal but for when and by whom they were written.

    What a rank says twice is two lines: its n-th merges with the n-th of the others.
    """
    kept: list[int] = []
    groups: dict[str, list[tuple[int, int]]] = {}
    turns: dict[tuple[str, int | None], int] = {}
    ranks: dict[int, set[int]] = {}
    for position in view.tolist():
        line = index.read(position)
        key, rank = without_writer(line.text, line.rank), line.rank
        same, turn = groups.setdefault(key, []), turns.get((key, rank), 0)
        while turn < len(same) and line.time_ms - same[turn][1] > FOLD_MS:
            turn += 1
        turns[key, rank] = turn + 1
        if turn < len(same) and rank is not None:
            ranks[same[turn][0]].add(rank)
            continue
        same.append((len(kept), line.time_ms))
        turns[key, rank] = len(same)
        ranks[len(kept)] = {rank} if rank is not None else set()
        kept.append(position)
    return np.array(kept, np.int32), {place: tuple(sorted(found)) for place, found in ranks.items() if len(found) > 1}


def without_writer(text: str, rank: int | None) -> str:
    """A line without its time, its process and its own rank; every other number stays.

    >>> without_writer("2026-11-21 07:46:55,442 INFO [rank 1 tp1] step 7 waits for rank 2", 1)
    '# INFO [# step 7 waits for rank 2'
    """
    text = _WRITER.sub("#", text)
    return _RANK.sub(lambda found: "#" if int(found[1]) == rank else found[0], text).replace("##", "#")
