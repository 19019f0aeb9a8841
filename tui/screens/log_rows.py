"""Lines of the merged logs as rows, shortened on narrow screens, and the line at which the logs open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.incident.busy_with import own_lines
from titan_ckpt.debug.incident.records import LogEvent, RankLog, RankRecord
from titan_ckpt.debug.incident.waits import logs_ahead_s
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.logs.index import LogIndex, LogLine, Positions
from titan_ckpt.tui.data.logs.lines import ERROR, TRACE, WARNING
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, row

ROLES: dict[int, Role] = {0: Role.DIM, 1: Role.PLAIN, WARNING: Role.WARN, ERROR: Role.BAD, TRACE: Role.PLAIN}
_SCAN_LINES = 1 << 16
_AT_ONE_TIME = 256  # lines of one millisecond that are looked at
_AFTER_MS = 1000  # a rank may log on for so long after another one began to wait
_WIDE, _NARROW, _KEPT_LINES = 125, 60, 256
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d,\d{3}) ([A-Z]+) \[rank \d+[^\]]*\] (?:\w+\.)+(\w+): ")
_OF_RANK = re.compile(r"\[rank ?\d+\]:? ?")
# What stands before a message: a date, a time, a rank, a level, or torch's own prefix with its process and line.
_BEFORE = re.compile(
    r"(?:[IWEF]\d{4} |\d{4}-\d\d-\d\d[T ])?(?:(?P<clock>\d\d:\d\d:\d\d)(?:[.,]\d+)?Z? ?)?(?:\d+ \S+:\d+\] ?)?"
    r"(?:\[rank ?\d+\]:? ?)?(?:\[?(?:DEBUG|INFO)\]?:? )?"
)


class LogRows:
    """Log lines, read when painted. `folds` maps a place to the ranks that wrote the same line within two seconds.

    `cause` is the line of the first error that no other rank caused.
    """

    def __init__(
        self, index: LogIndex, view: Positions, folds: Mapping[int, tuple[int, ...]], cause: int | None = None,
        culprits: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.index, self.view, self._folds, self.cause, self.culprits = index, view, folds, cause, culprits
        self._read = lru_cache(_KEPT_LINES)(index.read)  # moving the cursor repaints the same lines

    def __len__(self) -> int:
        return len(self.view)

    def line(self, place: int) -> LogLine:
        return self._read(int(self.view[place]))

    def row(self, index: int, width: int) -> Row:
        line = self.line(index)
        rank = "-" if line.rank is None else str(line.rank)
        same, is_narrow = self._folds.get(index, ()), width < _NARROW
        fold = f"x {len(same):,} ranks: {ranks_text(same, 4)}  " if len(same) > 1 else ""
        fold = f"x{len(same):,} " if fold and is_narrow else fold
        first = "" if int(self.view[index]) != self.cause else "FIRST " if is_narrow else "FIRST ERROR  "
        mark, role = (CULPRIT, Role.BAD) if line.rank in self.culprits else ("", Role.NOTE)
        return row((f"{mark + rank:>{3 if is_narrow else 6}} ", role), (first, Role.BAD), (fold, Role.NOTE),
                   (shortened(line.text, width), ROLES[line.level]), link=RowLink(screen=3, rank=line.rank),
                   is_problem=line.level == ERROR)  # fmt: skip

    def source_of(self, place: int) -> tuple[str, int]:
        """The file of a shown line, and its number there."""
        line = int(self.view[place])
        file = self.index.file_of(line)
        return self.index.files.files[file].path, line - int(self.index.base[file]) + 1

    def place_of(self, line: int | None) -> int | None:
        """Place of a line of the index; None if it is not shown."""
        places = np.flatnonzero(self.view == (-1 if line is None else line))
        return int(places[0]) if len(places) else None

    def place_of_step(self, step: int, logged: tuple[int, float]) -> int:
        """Place of the line in which a rank names a step at a time, given in seconds since the epoch: of the lines of that
        moment its own, else one that names the step, else the first."""
        rank, time_s = logged
        first = self.index.place_of_time(round(time_s * 1000), self.view)
        places = range(first, min(first + _AT_ONE_TIME, len(self)))
        lines = {place: line for place in places if (line := self.line(place)).time_ms == self.line(first).time_ms}
        named = re.compile(rf"\bstep\W{{0,3}}0*{step}\b", re.IGNORECASE)
        told = [place for place, line in lines.items() if named.search(line.text)]
        return next((place for place in told if lines[place].rank == rank), next(iter(told), first))

    def last_of(self, rank: int, until_ms: int | None) -> int | None:
        """The last line in the logs of a rank, at or before a time if there is one."""
        base, index = self.index.base.tolist(), self.index
        of_rank = [i for i in range(len(index.files.files)) if index.files.rank(i) == rank]
        ends = [base[i + 1] - 1 for i in of_rank if base[i + 1] > base[i]]
        if until_ms is not None:
            latest = until_ms - index.first_ms
            found = (base[i] + np.flatnonzero(index.time_ms[base[i] : base[i + 1]] <= latest) for i in of_rank)
            ends = [int(lines[-1]) for lines in found if len(lines)] or ends
        return max(ends, default=None)

    def next_problem(self, index: int, direction: int) -> int | None:
        left = self.view[index + 1 :] if direction > 0 else self.view[:index][::-1]
        for start in range(0, len(left), _SCAN_LINES):
            bad = np.flatnonzero(self.index.level[left[start : start + _SCAN_LINES]] == ERROR)
            if len(bad):
                return index + direction * (start + int(bad[0]) + 1)
        return None


def shortened(text: str, width: int) -> str:
    """Shorten a line on narrow screens: one of our trainer has no date, rank or package, and where hardly more than the time
    would be left, no line has more before its message than the time. `y` copies the full line.

    >>> shortened("2026-11-21 07:46:55,442 INFO [rank 0 dp_shard0 tp0] titan_ckpt.trainer.job.setup: starting from scratch", 78)
    '07:46:55,442 INFO setup: starting from scratch'
    >>> shortened("2026-11-21 02:15:43.796 [rank1] INFO monitor: dumped", 36), shortened("[rank1]: ValueError: bad", 36)
    ('02:15:43 monitor: dumped', 'ValueError: bad')
    """
    match = _OWN_LINE.match(text) if width < _WIDE else None
    text = text if match is None else f"{match[1]} {match[2]} {match[3]}: {text[match.end() :]}"
    start = _BEFORE.match(text) if width < _NARROW else None
    return text if start is None else f"{start['clock'] or ''}{' ' * bool(start['clock'])}{text[start.end() :]}"


def last_line(rows: LogRows, incident: Incident) -> int | None:
    """The last line of the rank at fault at or before the stop, its own if that is later, or within a second: what follows tells
    of the dump and the shutdown. Of a slow job the last one about a step."""
    if incident.foremost is None:
        return None
    log = incident.run.ranks[incident.foremost].log if incident.foremost in incident.run.ranks else None
    if incident.is_slow and log is not None and log.last_step_line:
        return rows.index.line_at(log.source, log.last_step_line)
    steps = log.step_times.values() if log is not None else ()
    stop_s = max([incident.began_ns / 1e9 + logs_ahead_s(incident.run), *steps])
    if not incident.began_ns or incident.is_slow:
        last = rows.last_of(incident.foremost, None)
        return last if last is None else _own_last(rows.index, incident.run.ranks.get(incident.foremost), last)
    last, later = (rows.last_of(incident.foremost, int(stop_s * 1000) + after_ms) for after_ms in (0, _AFTER_MS))
    return later if last is None or later is None else _last_calm(rows.index, log, last, later)


def first_told(index: LogIndex, event: LogEvent) -> int | None:
    """The line of an error: the first that tells of it, which may be a record of the program's above its traceback."""
    line = index.line_at(event.source, event.line)
    if line is None or not event.text:
        return line
    start = max(line - event.line + 1, line - _AT_ONE_TIME)
    errors = (start + np.flatnonzero(index.level[start:line] == ERROR)).tolist()
    return next((each for each in errors if event.text in index.read(each).text), line)


def _own_last(index: LogIndex, record: RankRecord | None, last: int) -> int:
    """The last line that the program itself logged, before what its recorder or a signal handler did; else `last`."""
    words = own_lines(record)[-1:] if record is not None else []
    places = range(last, max(last - _AT_ONE_TIME, -1), -1)
    told = ((place, _OF_RANK.sub("", index.read(place).text)) for place in places if words)
    return next((place for place, text in told if words[0].strip() in text), last)


def _last_calm(index: LogIndex, log: RankLog | None, first: int, last: int) -> int:
    """The last of some lines before one of them warns, or tells of an error or a signal."""
    told = {index.line_at(event.source, event.line) for event in (log.events if log is not None else ())}
    lines = range(first + 1, last + 1)
    return next((line - 1 for line in lines if index.level[line] >= WARNING or line in told), max(first, last))
