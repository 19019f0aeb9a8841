"""Screen 5: the logs of all ranks merged by time, filtered by ranks, level and pattern, equal lines folded across ranks."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from titan_ckpt.tui.data_logs import LogFilter, LogIndex, LogLine, Positions, cheap_mask, search, visible
from titan_ckpt.tui.log_scan import ERROR, LEVELS, WARNING
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Role, Row, RowList, Rows, Target, parse_ranks, ranks_text, row
from titan_ckpt.tui.session import Session

FOLD_MS, FOLD_LINES = 2_000, 2_000
_ROLES: dict[int, Role] = {0: "dim", 1: "", WARNING: "warn", ERROR: "bad"}
_NUMBERS = re.compile(r"\d+(?:\.\d+)?|0x[0-9a-f]+")


class LogRows:
    """Lines read as they are painted. `folds` says how many ranks said the same within two seconds, by position."""

    def __init__(self, index: LogIndex, view: Positions, folds: dict[int, tuple[int, ...]]) -> None:
        self.index, self.view, self._folds = index, view, folds

    def __len__(self) -> int:
        return len(self.view)

    def line(self, place: int) -> LogLine:
        return self.index.read(int(self.view[place]))

    def row(self, index: int, width: int) -> Row:  # noqa: ARG002 (the protocol's)
        line = self.line(index)
        rank = f"{line.rank:>5}" if line.rank is not None else "    -"
        same = self._folds.get(index, ())
        fold = f"  (x {len(same):,} ranks: {ranks_text(same, 4)})" if len(same) > 1 else ""
        return row((f"{rank} ", "note"), (line.text, _ROLES[line.level]), (fold, "dim"),
                   target=Target(screen=3, rank=line.rank), is_problem=line.level == ERROR)  # fmt: skip

    def next_problem(self, index: int, direction: int) -> int | None:
        bad = np.flatnonzero(self.index.level[self.view] == ERROR)
        later = bad[bad > index] if direction > 0 else bad[bad < index][::-1]
        return int(later[0]) if len(later) else None


class LogsPane(Pane):
    """The merged logs."""

    number = 5
    label = "Logs"
    keys = (
        ("/", "filter: ranks 0-3, level warning, or a regex"),
        ("z", "fold equal lines"),
        ("enter", "the collective"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("z", "fold", show=False)]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._view: Positions | None = None
        self._is_folded = False
        self._searched: tuple[str, int] = ("", -1)

    def state(self) -> tuple[object, ...]:
        logs = self.session.logs
        return (logs.version, logs.text, self._is_folded, self._searched)

    def title(self) -> str:
        logs = self.session.logs.value
        if logs is None:
            return self.session.logs.text
        shown = len(self.body.rows)
        return f"{len(logs.files.files)} files · {shown:,} of {len(logs):,} lines{' so far' if logs.is_head else ''}"

    def make_rows(self, width: int) -> Rows:  # noqa: ARG002 (the base's)
        logs = self.session.logs.value
        if logs is None:
            return RowList([row(self.session.logs.text)])
        wanted = parse_filter(self.filter_text)
        if wanted.pattern and self._searched != (self.filter_text, self.session.logs.version):
            self._search(logs, wanted)
            return RowList([row(("searching ...", "dim"))])
        view = self._view if wanted.pattern and self._view is not None else visible(logs, cheap_mask(logs, wanted))
        view, folds = fold(logs, view) if self._is_folded else (view, {})
        return LogRows(logs, view, folds)

    def _search(self, logs: LogIndex, wanted: LogFilter) -> None:
        asked = (self.filter_text, self.session.logs.version)

        def work() -> Any:
            mask = cheap_mask(logs, wanted)
            for _, found in search(logs, wanted.pattern, mask):
                mask = found
            return visible(logs, mask)

        def done(view: Positions) -> None:
            self._view, self._searched = view, asked
            self.update_rows(force=True)

        self.post_message(self.Work(f"searching for {wanted.pattern}", work, done))

    def set_filter(self, text: str) -> None:
        pattern = parse_filter(text).pattern
        try:
            re.compile(pattern)
        except re.error as error:
            self.post_message(self.Say(f"{pattern!r} is not a regular expression: {error}"))
            return
        super().set_filter(text)

    def action_fold(self) -> None:
        self._is_folded = not self._is_folded
        self.update_rows()

    def select(self, target: Target) -> None:
        self.update_rows(force=True)
        rows = self.body.rows
        if not isinstance(rows, LogRows) or not target.source:
            return
        line = rows.index.line_at(target.source, max(target.line, 1))
        places = np.flatnonzero(rows.view == (-1 if line is None else line))
        if len(places):
            self.body.move_to(int(places[0]))


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
