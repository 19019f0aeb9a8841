"""Per-rank logs merged by time: an index of offsets, times and levels. Text is read when it is painted.

Ten million lines take about 130 MB: 13 bytes per line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_ckpt.errors import TitanError
from titan_ckpt.location import redact_text
from titan_ckpt.tui.data.arrays import ByteArray, Ints, LineMask
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.lines import UNKNOWN_TIME, Lines, filled, scan, with_year, year_of
from titan_ckpt.tui.data.logs.matcher import LIMIT_S, Matcher
from titan_ckpt.tui.data.logs.spans import may_span
from titan_ckpt.tui.rows import shown

BLOCK_BYTES = 8 << 20
HEAD_BYTES = 16 << 10
MAX_LINE_BYTES = 4_096
CONTEXT_BYTES, CONTEXT_LINES = 16_384, 120  # before a line, in which a private key or a block may begin
# What secrets of several lines have: marks of keys, `key:` and `key: |` of YAML, names beside values, triple quotes.
Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line with its file and rank."""

    file: int
    rank: int | None
    text: str
    time_ms: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What an index shares with the one it grew from: the first `kept[i]` lines of file `i`, formerly from `base[i]`."""

    token: object
    base: Ints
    kept: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIndex:
    """Columns of the lines of all files, file after file; `order` sorts them by time.

    Lines of file `i` are `[base[i], base[i + 1])`, its bytes `[0, end[i])`; `has_times[i]`: it has timestamps. `problems`:
    (path, error) of unreadable files. `is_head`: only the beginning of each file is indexed. `token` identifies this index.
    """

    files: LogFiles
    base: Ints
    end: Ints
    start: npt.NDArray[np.uint32] | Ints
    time_ms: Ints | npt.NDArray[np.uint32]
    first_ms: int
    level: ByteArray
    order: Positions
    has_times: LineMask
    problems: tuple[tuple[str, str], ...] = ()
    is_head: bool = False
    growth: Growth | None = None
    token: object = field(default_factory=object)

    def __len__(self) -> int:
        return len(self.start)

    def file_of(self, line: int) -> int:
        """Index of the file of a line (a position in the columns)."""
        return int(np.searchsorted(self.base, line, side="right")) - 1

    def read(self, line: int) -> LogLine:
        """Read a line, at most 4,096 bytes of it, without secrets: also if it is the middle of a key of several lines."""
        file = self.file_of(line)
        start = int(self.start[line])
        is_last = line + 1 >= int(self.base[file + 1])
        length = MAX_LINE_BYTES if is_last else min(MAX_LINE_BYTES, int(self.start[line + 1]) - start)
        return LogLine(
            file=file, rank=self.files.rank(file), text=self._text(file, line, start, length),
            time_ms=self.first_ms + int(self.time_ms[line]), level=int(self.level[line]),
        )  # fmt: skip

    def _text(self, file: int, line: int, start: int, length: int) -> str:
        """The line as a part of what is around it: in a private key, a list or a YAML block other lines show what it is."""
        starts = self.start[int(self.base[file]) : int(self.base[file + 1])]
        number = line - int(self.base[file])
        first = max(int(np.searchsorted(starts, start - CONTEXT_BYTES)), number - CONTEXT_LINES, 0)
        begin = int(starts[first])
        data = self.files.read(file, begin, start - begin + length + CONTEXT_BYTES // 4)
        if not may_span(data):
            own = data[start - begin : start - begin + length]
            return shown(own.split(b"\n", 1)[0].decode("utf-8", "replace")).rstrip()
        lines = _redacted(data).split("\n")
        return lines[data[: start - begin].count(b"\n")].rstrip()[:MAX_LINE_BYTES]

    def line_at(self, source: str, number: int) -> int | None:
        """Position of a line by file path and line number; what stands below a file is a section of it, by the file's numbers."""
        for i, file in enumerate(self.files.files):
            if f"{source}/".startswith(f"{file.path}/") and 0 < number <= int(self.base[i + 1] - self.base[i]):
                return int(self.base[i]) + number - 1
        return None

    def place_of_time(self, time_ms: int, view: Positions) -> int:
        """Place in `view` of the first line at or after a time."""
        wanted = time_ms - self.first_ms
        low, high = 0, len(view)
        while low < high:
            middle = (low + high) // 2
            if int(self.time_ms[view[middle]]) < wanted:
                low = middle + 1
            else:
                high = middle
        return low


@lru_cache(64)
def _redacted(data: bytes) -> str:
    return redact_text(data.decode("utf-8", "replace"))


def load_logs(
    files: LogFiles, *, head_bytes: int | None = None, on_bytes: Callable[[int], object] = lambda _: None
) -> LogIndex:
    """Index all files, or only the first `head_bytes` of each; `on_bytes` is called with the bytes of each piece."""
    parts, problems, ends = [], [], np.zeros(len(files.files), np.int64)
    for i, file in enumerate(files.files):
        try:
            lines, ends[i] = index_file(files, i, stop=head_bytes, on_bytes=on_bytes)
            parts.append(lines)
        except (OSError, TitanError) as error:
            problems.append((file.path, str(error)))
            parts.append(NOTHING)
    years = [year for part in parts if (year := year_of(part.time_ms)) is not None]
    year = max(years, default=None)
    for i in range(len(parts)):
        times = with_year(parts[i].time_ms, files.year(i) if year is None else year)
        parts[i] = Lines(start=parts[i].start, time_ms=filled(times), level=parts[i].level)
    return _assemble(files, parts, ends, problems, is_head=head_bytes is not None)


NOTHING = Lines(start=np.zeros(0, np.int64), time_ms=np.zeros(0, np.int64), level=np.zeros(0, np.uint8))


def index_file(
    files: LogFiles,
    index: int,
    *,
    begin: int = 0,
    stop: int | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> tuple[Lines, int]:
    """Index a file from byte `begin`; returns its lines, with unknown times not filled in, and the end offset."""
    size = files.size(index)
    stop = size if stop is None else min(size, stop)
    parts, at = [], begin
    while at < stop:
        data = files.read(index, at, min(BLOCK_BYTES, stop - at))
        if not data:
            break
        cut = data.rfind(b"\n") + 1
        if cut and (at + len(data) < size):
            data = data[:cut]
        parts.append(scan(data, at) if starts_line(files, index, at) else _without_first(scan(data, at)))
        at += len(data)
        on_bytes(len(data))
    if not parts:
        return NOTHING, begin
    return (parts[0] if len(parts) == 1 else _joined(parts)), at


def starts_line(files: LogFiles, index: int, at: int) -> bool:
    """Whether a line begins at this byte."""
    return at == 0 or files.read(index, at - 1, 1) == b"\n"


def _without_first(lines: Lines) -> Lines:
    """Drop the tail of a line that is longer than a block."""
    return Lines(start=lines.start[1:], time_ms=lines.time_ms[1:], level=lines.level[1:])


def _joined(parts: Sequence[Lines]) -> Lines:
    return Lines(
        start=np.concatenate([part.start for part in parts]),
        time_ms=np.concatenate([part.time_ms for part in parts]),
        level=np.concatenate([part.level for part in parts]),
    )


def _assemble(
    files: LogFiles, parts: list[Lines], end: Ints, problems: list[tuple[str, str]], *, is_head: bool
) -> LogIndex:  # fmt: skip
    lengths = [len(part.start) for part in parts]
    base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total, largest = int(base[-1]), max((int(part.start[-1]) for part in parts if len(part.start)), default=0)
    start: Any = np.zeros(total, np.uint32 if largest < 1 << 32 else np.int64)
    level = np.zeros(total, np.uint8)
    has_times = np.array([len(part.time_ms) > 0 and part.time_ms[0] != UNKNOWN_TIME for part in parts], np.bool_)
    spans = [(int(parts[i].time_ms.min()), int(parts[i].time_ms.max())) for i in np.flatnonzero(has_times)]
    first_ms = min((first for first, _ in spans), default=0)
    last_ms = max((last for _, last in spans), default=0)
    time_ms: Any = np.zeros(total, np.uint32 if last_ms - first_ms < 1 << 32 else np.int64)
    for i in range(len(parts)):
        part, parts[i] = parts[i], NOTHING  # free each file's wide columns once copied
        here = slice(int(base[i]), int(base[i + 1]))
        start[here], level[here] = part.start, part.level
        time_ms[here] = np.where(part.time_ms == UNKNOWN_TIME, last_ms, part.time_ms) - first_ms
    order = np.argsort(time_ms, kind="stable").astype(np.int32)
    return LogIndex(
        files=files, base=base, end=end, start=start, time_ms=time_ms, first_ms=first_ms, level=level, order=order,
        has_times=has_times, problems=tuple(problems), is_head=is_head,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Conditions on lines; all must hold."""

    ranks: tuple[int, ...] | None = None
    level: int = 0
    pattern: str = ""

    @property
    def is_open(self) -> bool:
        """Whether every line passes."""
        return self.ranks is None and self.level == 0 and not self.pattern


def cheap_mask(index: LogIndex, wanted: LogFilter) -> LineMask:
    """Mask of the lines that pass by rank and level, without reading files."""
    mask = np.ones(len(index), np.bool_)
    if wanted.ranks is not None:
        ranks = set(wanted.ranks)
        for i in range(len(index.files.files)):
            if index.files.rank(i) not in ranks:
                mask[int(index.base[i]) : int(index.base[i + 1])] = False
    if wanted.level:
        mask &= index.level >= wanted.level
    return mask


def search(index: LogIndex, pattern: str, mask: LineMask) -> Iterator[tuple[float, LineMask]]:
    """Search files for a pattern; yields (share searched, matches within `mask` so far) as it goes.

    TimeoutError for a pattern that would not end.
    """
    found = np.zeros(len(index), np.bool_)
    read_bytes, total_bytes, reported = 0, sum(file.size_bytes for file in index.files.files) or 1, 0
    with Matcher(pattern, LIMIT_S) as matcher:
        for i in range(len(index.files.files)):
            here = slice(int(index.base[i]), int(index.base[i + 1]))
            if mask[here].any():
                found[here] = _search_file(index, i, mask[here], matcher)
            read_bytes += index.files.files[i].size_bytes
            if read_bytes - reported >= 4 * BLOCK_BYTES:
                reported = read_bytes
                yield min(read_bytes / total_bytes, 1.0), found.copy()
    yield 1.0, found


def _search_file(index: LogIndex, file: int, mask: LineMask, matcher: Matcher) -> LineMask:
    """Matching lines of a file, reading from its first to its last line in `mask`."""
    starts = index.start[int(index.base[file]) : int(index.base[file + 1])]
    found, wanted = np.zeros(len(starts), np.bool_), np.flatnonzero(mask)
    at = int(starts[wanted[0]])
    end = int(starts[wanted[-1] + 1]) if wanted[-1] + 1 < len(starts) else int(index.end[file])
    while at < end:
        data = index.files.read(file, at, min(BLOCK_BYTES, end - at))
        if not data:
            break
        cut = data.rfind(b"\n") + 1
        if cut and at + len(data) < end:
            data = data[:cut]
        places = np.asarray(matcher.starts(data)) + at
        if len(places):
            found[np.searchsorted(starts, places, side="right") - 1] = True
        at += len(data)
    return found & mask


def lines_by_time(index: LogIndex, mask: LineMask) -> Positions:
    """Positions in `mask`, ordered by time."""
    found = np.flatnonzero(mask)
    if len(found) == len(mask):
        return index.order
    if len(found) > len(mask) // 16:
        return index.order[mask[index.order]]
    return found[np.argsort(index.time_ms[found], kind="stable")].astype(np.int32)
