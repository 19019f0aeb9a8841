"""Extend the index of logs that have grown, reading only the new bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from titan_ckpt.tui.data.arrays import Ints, LineMask
from titan_ckpt.tui.data.content import LogFile
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.index import NOTHING, Growth, LogIndex, Positions, index_file, starts_line
from titan_ckpt.tui.data.logs.lines import TRACE, UNKNOWN_TIME, Lines, filled, with_year, year_of


def grown_files(before: tuple[LogFile, ...], now: tuple[LogFile, ...]) -> tuple[LogFile, ...] | None:
    """Order `now` like `before`, new files last; None if a file is gone, has shrunk, or is compressed and has changed."""
    sizes = {file.path: file for file in now}
    for file in before:
        found = sizes.get(file.path)
        if found is None or found.size_bytes < file.size_bytes:
            return None
        if file.is_packed and found.size_bytes != file.size_bytes:
            return None
    known = {file.path for file in before}
    return (*(sizes[file.path] for file in before), *(file for file in now if file.path not in known))


def grow(former: LogIndex, files: LogFiles, now: tuple[LogFile, ...]) -> LogIndex | None:
    """Index `now` from the former index; None if all files have to be read again."""
    before = files.files
    ordered = None if former.is_head else grown_files(before, now)
    if ordered is None:
        return None
    files.grow(ordered)
    kept = np.diff(former.base, append=np.full(len(ordered) - len(before), former.base[-1]))
    end = np.concatenate([former.end, np.zeros(len(ordered) - len(before), np.int64)])
    tails: dict[int, Lines] = {}
    for i, file in enumerate(ordered):
        if i >= len(before) or file.size_bytes != before[i].size_bytes:
            kept[i], begin = _resume(former, i) if i < len(before) else (0, 0)
            if not starts_line(files, i, begin):
                return None  # a different file under the same name
            tails[i], end[i] = index_file(files, i, begin=begin)
    return _with_tails(former, kept, end, tails)


def _resume(former: LogIndex, file: int) -> tuple[int, int]:
    """(number of lines to keep, first byte to read): the last line may have been incomplete, or its traceback."""
    first, stop = int(former.base[file]), int(former.base[file + 1])
    if first == stop:
        return 0, 0
    line = last = stop - 1
    while line > first and former.level[line - 1] == TRACE:
        line -= 1
    if line > first and (line < last or former.level[last] == TRACE):
        line -= 1  # the head of the traceback
    return line - first, int(former.start[line])


def _with_tails(former: LogIndex, kept: Ints, end: Ints, tails: dict[int, Lines]) -> LogIndex | None:
    num_new = len(kept) - len(former.base) + 1
    old_base = np.concatenate([former.base, np.full(num_new, former.base[-1])])
    has_times = np.concatenate([former.has_times, np.zeros(num_new, np.bool_)])
    lasts = _tail_times(former, old_base, kept, has_times, tails)
    lengths = kept + np.array([len(tails.get(i, NOTHING).start) for i in range(len(kept))], np.int64)
    base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if any(len(times) and int(times.min()) < 0 for times in lasts.values()) or base[-1] >= np.iinfo(np.int32).max:
        return None
    start = _spliced(former.start, old_base, base, kept, {i: tail.start for i, tail in tails.items()})
    time_ms = _spliced(former.time_ms, old_base, base, kept, lasts)
    level = _spliced(former.level, old_base, base, kept, {i: tail.level for i, tail in tails.items()})
    growth = Growth(token=former.token, base=old_base, kept=kept)
    fresh = np.concatenate([np.arange(base[i] + kept[i], base[i + 1]) for i in tails] or [np.zeros(0, np.int64)])
    order = merged(moved(growth, base, former.order), fresh, time_ms)
    return replace(
        former, base=base, end=end, start=start, time_ms=time_ms, level=level, order=order, has_times=has_times,
        growth=growth, token=object(),
    )  # fmt: skip


def _tail_times(
    former: LogIndex, old_base: Ints, kept: Ints, has_times: LineMask, tails: dict[int, Lines]
) -> dict[int, Ints]:
    """Times of the new lines, in milliseconds after `first_ms`.

    A line without a time gets that of the line before; in a file without any times, the newest time of all.
    """
    years = [year for tail in tails.values() if (year := year_of(tail.time_ms)) is not None]
    newest = int(former.time_ms[former.order[-1]]) if len(former.order) else 0
    year = max([*years, *(y for y in [year_of(np.array([former.first_ms + newest]))] if y is not None)], default=1970)
    found: dict[int, Ints] = {}
    for i, tail in tails.items():
        before = int(former.time_ms[old_base[i] + kept[i] - 1]) if kept[i] and has_times[i] else None
        times = with_year(tail.time_ms, year)
        if before is not None:
            times = filled(np.concatenate([[before + former.first_ms], times]))[1:]
        else:
            times = filled(times)
        has_times[i] |= bool(len(times) and times[0] != UNKNOWN_TIME)
        found[i] = times
    last = max((int(times.max()) for times in found.values() if len(times)), default=UNKNOWN_TIME)
    last = max(last, former.first_ms + newest)
    return {i: np.where(times == UNKNOWN_TIME, last, times) - former.first_ms for i, times in found.items()}


def _spliced(column: Any, old_base: Ints, base: Ints, kept: Ints, tails: dict[int, Any]) -> Any:
    """Join each file's kept and new lines into one column, widened to int64 if necessary."""
    largest = max((int(tail.max()) for tail in tails.values() if len(tail)), default=0)
    dtype = np.int64 if column.dtype == np.uint32 and largest >= 1 << 32 else column.dtype
    made = np.empty(int(base[-1]), dtype)
    for i in range(len(kept)):
        made[base[i] : base[i] + kept[i]] = column[old_base[i] : old_base[i] + kept[i]]
        if i in tails:
            made[base[i] + kept[i] : base[i + 1]] = tails[i]
    return made


def moved(growth: Growth, base: Ints, view: Positions) -> Positions:
    """Translate positions of the former index into the grown one, dropping lines that were read again."""
    shift = (base[:-1] - growth.base[:-1]).astype(np.int32)
    lengths = np.diff(growth.base)
    stays = np.ones(int(growth.base[-1]), np.bool_)
    for file in np.flatnonzero(growth.kept < lengths):
        stays[growth.base[file] + growth.kept[file] : growth.base[file + 1]] = False
    places = np.arange(len(stays), dtype=np.int32) + np.repeat(shift, lengths)
    return places[view] if stays.all() else places[view[stays[view]]]


def merged(order: Positions, fresh: Ints, time_ms: Any) -> Positions:
    """Merge `fresh` into `order` by time, copying the part that is older than all of `fresh`."""
    if not len(fresh):
        return order
    first, low, high = time_ms[fresh].min(), 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if time_ms[order[middle]] < first else (low, middle)
    tail = np.sort(np.concatenate([order[low:], fresh.astype(np.int32)]))
    return np.concatenate([order[:low], tail[np.argsort(time_ms[tail], kind="stable")]])


def fresh_mask(index: LogIndex) -> LineMask:
    """Mask of the lines that the former index did not have."""
    mask = np.ones(len(index), np.bool_)
    if index.growth is not None:
        for i, kept in enumerate(index.growth.kept.tolist()):
            mask[int(index.base[i]) : int(index.base[i]) + kept] = False
    return mask
