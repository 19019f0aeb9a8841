"""Screen 5: the logs of all ranks merged by time, filtered by ranks, level and pattern, equal lines folded across ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from textual.app import App
from textual.binding import Binding, BindingType

from titan_ckpt.debug.records import NO_OPERATIONS, Run
from titan_ckpt.errors import StoreError
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data_incident import first_error
from titan_ckpt.tui.data_logs import LogFilter, LogIndex, LogLine, Mask, Positions, cheap_mask, search, visible
from titan_ckpt.tui.log_scan import ERROR, LEVELS, WARNING
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Role, Row, RowList, Rows, Target, parse_ranks, ranks_text, row
from titan_ckpt.tui.session import Session

FOLD_MS, FOLD_LINES = 2_000, 2_000
_SCAN_LINES = 1 << 16
_ROLES: dict[int, Role] = {0: "dim", 1: "", WARNING: "warn", ERROR: "bad"}
_QUARTER_MS = 900_000
_NUMBERS = re.compile(r"\d+(?:\.\d+)?|0x[0-9a-f]+")


class LogRows:
    """Lines read as they are painted. `folds` says how many ranks said the same within two seconds, by position.

    `cause` is the line of the first error that is not derived from another one's.
    """

    def __init__(
        self, index: LogIndex, view: Positions, folds: dict[int, tuple[int, ...]], cause: int | None = None
    ) -> None:
        self.index, self.view, self._folds, self.cause = index, view, folds, cause

    def __len__(self) -> int:
        return len(self.view)

    def line(self, place: int) -> LogLine:
        return self.index.read(int(self.view[place]))

    def row(self, index: int, width: int) -> Row:  # noqa: ARG002 (the protocol's)
        line = self.line(index)
        rank = f"{line.rank:>5}" if line.rank is not None else "    -"
        same = self._folds.get(index, ())
        fold = f"  (x {len(same):,} ranks: {ranks_text(same, 4)})" if len(same) > 1 else ""
        is_cause = int(self.view[index]) == self.cause
        return row((f"{rank} ", "note"), ("FIRST ERROR  " if is_cause else "", "bad"), (line.text, _ROLES[line.level]),
                   (fold, "dim"), target=Target(screen=3, rank=line.rank), is_problem=line.level == ERROR)  # fmt: skip

    def place_of(self, line: int | None) -> int | None:
        """Where a line of the index stands, None where it is not shown."""
        places = np.flatnonzero(self.view == (-1 if line is None else line))
        return int(places[0]) if len(places) else None

    def next_problem(self, index: int, direction: int) -> int | None:
        left = self.view[index + 1 :] if direction > 0 else self.view[:index][::-1]
        for start in range(0, len(left), _SCAN_LINES):
            bad = np.flatnonzero(self.index.level[left[start : start + _SCAN_LINES]] == ERROR)
            if len(bad):
                return index + direction * (start + int(bad[0]) + 1)
        return None


class LogsPane(Pane):
    """The merged logs."""

    number = 5
    label = "Logs"
    keys = (
        ("/", "filter: ranks 0-3, level warning, or a regex"),
        ("z", "fold equal lines"),
        ("c", "first error"),
        ("enter", "the collective"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z", "fold", show=False), Binding("c", "cause", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._view: Positions | None = None
        self._is_folded = self._is_cut = False
        self._asked: tuple[str, int] = ("", -1)

    def state(self) -> tuple[object, ...]:
        logs = self.session.logs
        return (logs.version, logs.text, self._is_folded, self._asked, self.session.incident.version)

    def title(self) -> str:
        logs = self.session.logs.value
        if logs is None:
            return self.session.logs.text
        shown = len(self.body.rows)
        folded = f" · folded: the last {FOLD_LINES:,} lines only" if self._is_cut else " · folded" * self._is_folded
        so_far = " so far" if logs.is_head else ""
        return f"{len(logs.files.files)} files · {shown:,} of {len(logs):,} lines{so_far}{folded}"

    def make_rows(self, width: int) -> Rows:  # noqa: ARG002 (the base's)
        logs = self.session.logs.value
        if logs is None:
            return RowList([row(self.session.logs.text)])
        wanted = parse_filter(self.filter_text)
        if wanted.pattern and self._asked != (self.filter_text, self.session.logs.version):
            self._search(logs, wanted)
        if wanted.pattern and self._view is None:
            return RowList([row(("searching ...", "dim"))])
        view = self._view if wanted.pattern and self._view is not None else visible(logs, cheap_mask(logs, wanted))
        self._is_cut = self._is_folded and len(view) > FOLD_LINES
        view, folds = fold(logs, view) if self._is_folded else (view, {})
        return LogRows(logs, view, folds, self._cause(logs))

    def _cause(self, logs: LogIndex) -> int | None:
        incident = self.session.incident.value
        event = first_error(incident) if incident is not None else None
        return logs.line_at(event.source, event.line) if event is not None else None

    def _search(self, logs: LogIndex, wanted: LogFilter) -> None:
        """Search in a thread; what is found is shown as it is found, until another search is asked for."""
        asked = self._asked = (self.filter_text, self.session.logs.version)
        self._view = None

        def show(view: Positions | None) -> None:
            if view is not None and self._asked == asked:
                self._view = view
                self.update_rows(force=True)

        def work() -> Positions | None:
            try:
                return _streamed(self.app, search(logs, wanted.pattern, cheap_mask(logs, wanted)), logs, show)
            except StoreError:
                if logs.files.is_closed:
                    return None  # the logs were read again: the newer index is being searched
                raise

        self.post_message(self.Work(f"searching for {wanted.pattern}", work, show))

    def set_filter(self, text: str) -> None:
        pattern = parse_filter(text).pattern
        try:
            re.compile(pattern)
        except re.error as error:
            self.post_message(self.Say(f"{pattern!r} is not a regular expression: {error}"))
            return
        super().set_filter(text)

    def action_cause(self) -> None:
        rows = self.body.rows
        place = rows.place_of(rows.cause) if isinstance(rows, LogRows) else None
        if place is None:
            self.post_message(self.Say("no error of a rank's own is among these lines"))
        else:
            self.body.move_to(place)

    def chosen(self, chosen: Row) -> None:
        """The collective that the line's rank had issued last when it wrote the line."""
        incident, rows = self.session.incident.value, self.body.rows
        rank = chosen.target.rank if chosen.target is not None else None
        if incident is None or rank is None or not isinstance(rows, LogRows):
            super().chosen(chosen)
            return
        found = operation_at(incident.run, rank, rows.line(self.body.cursor).time_ms)
        group, seq = found if found is not None else (None, None)
        self.post_message(self.Go(Target(screen=3, rank=rank, group=group, seq=seq)))

    def action_fold(self) -> None:
        self._is_folded = not self._is_folded
        self.update_rows()

    def select(self, target: Target) -> None:
        self.update_rows(force=True)
        rows = self.body.rows
        if not isinstance(rows, LogRows) or not target.source:
            return
        place = rows.place_of(rows.index.line_at(target.source, max(target.line, 1)))
        if place is not None:
            self.body.move_to(place)


def _streamed(
    app: App[Any], found: Iterator[tuple[float, Mask]], logs: LogIndex, show: Callable[[Positions | None], None]
) -> Positions:
    """The last of what was found; what comes before it goes to the screen at once."""
    view = np.zeros(0, np.int32)
    for share, mask in found:
        view = visible(logs, mask)
        if share < 1:
            app.post_message(tasks.Progress(view, show))
    return view


def operation_at(run: Run, rank: int, time_ms: int) -> tuple[str, int] | None:
    """(group, seq) of the collective that `rank` issued last before a time; None where no such time was recorded.

    A log's clock may be another time zone's: whole quarters of an hour between the two are taken out.
    """
    table = run.ranks[rank].operations if rank in run.ranks else NO_OPERATIONS
    rows = np.flatnonzero((table["created_ns"] > 0) & (table["p2p"] == 0))
    if not len(rows):
        return None
    created_ms = table["created_ns"][rows] // 1_000_000
    offset = round((time_ms - int(created_ms[-1])) / _QUARTER_MS) * _QUARTER_MS
    before = np.flatnonzero(created_ms <= time_ms - offset)
    entry = table[rows[before[-1] if len(before) else 0]]
    return str(run.groups[entry["group"]]), int(entry["seq"])


def parse_filter(text: str) -> LogFilter:
    """`0-3,8` is a set of ranks, `level warning` (or a level's name) a level; anything else is a pattern.

    >>> parse_filter("0-2"), parse_filter("level error").level, parse_filter("nan|inf").pattern
    (LogFilter(ranks=(0, 1, 2), level=0, pattern=''), 3, 'nan|inf')
    """
    word = text.removeprefix("level ").strip().lower()
    if word in LEVELS:
        return LogFilter(level=LEVELS.index(word))
    ranks = parse_ranks(text) if text else None
    return LogFilter(ranks=ranks) if ranks is not None else LogFilter(pattern=text)


def fold(logs: LogIndex, view: Positions) -> tuple[Positions, dict[int, tuple[int, ...]]]:
    """Lines that differ in numbers only, said by several ranks within two seconds, as one. Of a longer view its last part."""
    view = view[-FOLD_LINES:]
    kept: list[int] = []
    seen: dict[str, tuple[int, int]] = {}
    ranks: dict[int, set[int]] = {}
    for position in view.tolist():
        line = logs.read(position)
        key = _NUMBERS.sub("#", line.text)
        at = seen.get(key)
        if at is not None and line.time_ms - at[1] <= FOLD_MS:
            ranks[at[0]].add(-1 if line.rank is None else line.rank)
            continue
        seen[key] = (len(kept), line.time_ms)
        ranks[len(kept)] = {-1 if line.rank is None else line.rank}
        kept.append(position)
    return np.array(kept, np.int32), {place: tuple(sorted(said)) for place, said in ranks.items()}
