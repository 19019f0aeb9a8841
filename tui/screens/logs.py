"""Screen 5: the logs of all ranks merged by time, with filters by rank, level and pattern, and folding across ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from titan_ckpt.debug.incident.records import NO_OPERATIONS, Run
from titan_ckpt.errors import StoreError
from titan_ckpt.location import local_path, scheme
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data.incident import first_error
from titan_ckpt.tui.data.logs.filter import FOLD_LINES, LogQuery, LogView, parse_clock, parse_filter, views
from titan_ckpt.tui.data.logs.index import LogIndex
from titan_ckpt.tui.data.standing import process_text
from titan_ckpt.tui.rows import Role, Row, RowLink, RowList, Rows, counted, placeholder, row, truncate, wrapped
from titan_ckpt.tui.screens.log_rows import ROLES, LogRows, first_told, last_line
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.line_view import LineView
from titan_ckpt.tui.widgets.one_line import OneLine
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

_ABSENT = "Logs are files such as logs/rank_00003.log, plain or compressed (.gz, .zst). `titan-ckpt train` writes them."
_QUARTER_MS, _MINUTE_MS = 900_000, 60_000


class LogsPane(Pane):
    """The merged logs."""

    number = 5
    label = "Logs"
    purpose = "the log lines of all ranks, merged by time"
    keys = (
        ("/", "filter"),
        ("enter", "collective at that time"),
        ("c", "first error"),
        ("z", "fold equal lines"),
        ("t", "go to a time"),
    )
    parts = (Part(name="line", is_below=True),)
    filter_hint = "filter: ranks, level, regex, for example: 0-3,8 warning store.*timeout"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z", "fold", show=False), Binding("c", "cause", show=False), Binding("t", "time", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._found: LogView | None = None
        self._is_folded = False
        self._asked: tuple[LogQuery, object, dict[str, int]] | None = None
        self._is_searching, self._failure = False, ""
        self._anchor_ms: int | None = None

    def compose_list(self) -> ComposeResult:
        yield OneLine(id="unreadable")
        yield LineView()

    def state(self) -> tuple[object, ...]:
        logs = self.session.logs
        return (logs.version, logs.text, self._is_folded, self.session.incident.version)

    def wants_parts(self) -> bool:
        return self.session.logs.value is not None

    def part_rows(self, space: Space) -> Iterable[Row]:
        """The whole line, and who wrote it."""
        rows, incident = self.body.rows, self.session.incident.value
        if not isinstance(rows, LogRows) or not len(rows):
            return
        line = rows.line(min(self.body.cursor, len(rows) - 1))
        for text in wrapped(line.text, space.width, "  "):
            yield row((text, ROLES[line.level]))
        yield row()
        process = process_text(incident, line.rank) if incident is not None and line.rank is not None else ""
        who = f"rank {line.rank}" if line.rank is not None else "no rank"
        source, number = rows.source_of(min(self.body.cursor, len(rows) - 1))
        facts = [who, process, f"{source}:{number}"]
        yield row((" · ".join(fact for fact in facts if fact), Role.DIM))

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        logs = self.session.logs.value
        has_cause = logs is not None and self._cause(logs) is not None
        return [key for key in self.keys if key[0] != "c" or has_cause] if logs is not None else ()

    def title(self) -> str:
        logs, found = self.session.logs.value, self._found
        if logs is None:
            return "logs"
        folded = ""
        if self._is_folded:
            is_cut = found is not None and found.is_cut
            folded = f" · folded: the last {FOLD_LINES:,} lines only" if is_cut else " · folded"
        so_far = " so far" if logs.is_head else ""
        num_shown = len(self.body.rows) if isinstance(self.body.rows, LogRows) else 0
        damaged = f" · {len(logs.problems):,} unreadable" if logs.problems else ""
        files = f"{counted(len(logs.files.files), 'file')}{damaged}"
        return f"{files} · {num_shown:,} of {len(logs):,} lines{so_far}{folded}"

    def make_rows(self, width: int) -> Rows:
        logs = self.session.logs.value
        if logs is None:
            return RowList(self.absent_rows(self.session.logs, _ABSENT, width))
        if not len(logs):
            return RowList([row(("these files have no lines yet", Role.DIM))])
        query = LogQuery(text=self.filter_text, is_folded=self._is_folded)
        if query == LogQuery():
            self._asked = self._found = None
            return LogRows(logs, logs.order, {}, self._cause(logs), self._culprits())
        if self._asked != (query, logs.token, logs.files.told):
            self._run_query(logs, query)
        if self._failure:
            return RowList(row((line, Role.BAD)) for line in wrapped(self._failure, width))
        found, before = self._found, self.body.rows
        if found is not None:
            return LogRows(found.index, found.view, found.folds, self._cause(found.index), self._culprits())
        return before if isinstance(before, LogRows) else RowList([placeholder("searching ...")])

    def filtered(self, rows: Rows) -> Rows:
        """The filter is a query, which make_rows runs."""
        if len(rows) or not self.filter_text:
            return rows
        return RowList([placeholder("searching ...")]) if self._is_searching else self.no_match("no line matches")

    def is_complete(self) -> bool:
        """When all lines and, where there is evidence, the verdict are known."""
        logs, incident = self.session.logs.value, self.session.incident
        return logs is not None and not logs.is_head and not incident.is_loading and self.body.size.height > 0

    def begin(self) -> None:
        """Start at the first error, else at the last line of the rank at fault before the stop, else at the newest line."""
        rows, place, incident = self.body.rows, None, self.session.incident.value
        if isinstance(rows, LogRows):
            own = last_line(rows, incident) if incident is not None and rows.cause is None else rows.cause
            place = rows.place_of(own)
        self.body.move_to(len(rows) - 1 if place is None else place, is_centred=True)

    def _culprits(self) -> tuple[int, ...]:
        incident = self.session.incident.value
        return incident.top.culprits if incident is not None else ()

    def _cause(self, logs: LogIndex) -> int | None:
        incident = self.session.incident.value
        event = first_error(incident) if incident is not None else None
        return first_told(logs, event) if event is not None else None

    def _run_query(self, logs: LogIndex, query: LogQuery) -> None:
        """Run a query in a thread and show results as they come, until the query changes."""
        key = self._asked = (query, logs.token, logs.files.told)
        former = self._found if self._found is not None and self._found.query == query else None
        self._found, self._is_searching, self._failure, app = former, True, "", self.app

        def show(view: LogView | None) -> None:
            if view is not None and self._asked == key:
                self._found = view
                self.update_rows(force=True)

        def fail(text: str) -> None:
            if self._asked == key:
                self._failure = text
                self.update_rows(force=True)

        def finish(view: LogView | None) -> None:
            if self._asked == key:
                self._is_searching = False
            show(view)

        def work() -> LogView | None:
            last = None
            try:
                for view in views(logs, query, former):
                    if self._asked != key:
                        return None
                    if former is None and not query.is_folded:
                        app.post_message(tasks.TaskOutput(view, show))
                    last = view
            except TimeoutError as error:
                app.post_message(tasks.TaskOutput(str(error), fail))
            except StoreError:
                if not logs.files.is_closed:
                    raise  # else: a newer index is being searched
            return last

        self.work(f"searching for {query.text}" if query.text else "folding", work, finish)

    def update_rows(self, *, force: bool = False) -> None:
        """While following, keep a cursor that is at the end there."""
        if not self.is_attached:
            return
        body = self.body
        is_at_end, before = body.cursor >= len(body.rows) - 1, len(body.rows)
        super().update_rows(force=force)
        self._show_unreadable()
        self._return_to_anchor()
        if self.session.is_following and is_at_end and len(body.rows) > before > 1:
            body.move_to(len(body.rows) - 1)

    def _show_unreadable(self) -> None:
        """Show unreadable files on a line above the logs."""
        logs = self.session.logs.value
        problems = logs.problems if logs is not None else ()
        more = f" (and {len(problems) - 1:,} more, see screen 1)" if len(problems) > 1 else ""
        note = self.query_one("#unreadable", OneLine)
        note.display = bool(problems)
        if problems:
            path, problem = problems[0]
            text = problem if path in problem else f"{path}: {problem}"
            note.show(truncate(f" ! not readable: {text}", self.size.width - len(more)) + more)

    def _keep_place(self) -> None:
        """Remember the time under the cursor, to return to it in the new rows."""
        rows = self.body.rows
        if isinstance(rows, LogRows) and len(rows):
            self._anchor_ms = rows.line(self.body.cursor).time_ms

    def _return_to_anchor(self) -> None:
        rows, is_there = self.body.rows, self._found is not None or self._asked is None
        if self._anchor_ms is not None and is_there and isinstance(rows, LogRows):
            self.body.move_to(rows.index.place_of_time(self._anchor_ms, rows.view), is_centred=True)
            self._anchor_ms = None

    def followed(self) -> None:
        self.body.move_to(len(self.body.rows) - 1)

    def set_filter(self, text: str) -> None:
        pattern = parse_filter(text).pattern
        try:
            re.compile(pattern)
        except re.error as error:
            self.post_message(self.ShowStatus(f"{pattern!r} is not a regular expression: {error}"))
            return
        self._keep_place()
        super().set_filter(text)

    def copied_text(self) -> str:
        rows = self.body.rows
        return rows.line(self.body.cursor).text if isinstance(rows, LogRows) and len(rows) else super().copied_text()

    def place_to_edit(self) -> tuple[str, int] | None:
        """The line of the log, if its file is on this machine."""
        rows, store = self.body.rows, self.session.content.store
        if not isinstance(rows, LogRows) or not len(rows) or scheme(store.url) != "file":
            return super().place_to_edit()
        source, number = rows.source_of(min(self.body.cursor, len(rows) - 1))
        return f"{local_path(store.url)}/{source}", number

    def action_cause(self) -> None:
        rows = self.body.rows
        place = rows.place_of(rows.cause) if isinstance(rows, LogRows) else None
        if place is None:
            self.post_message(self.ShowStatus("no first error among these lines"))
        else:
            self.body.move_to(place, is_centred=True)

    def action_time(self) -> None:
        self.ask("go to the time, for example 14:05:30", "", self.go_to_time)

    def go_to_time(self, text: str) -> None:
        """Move to the line at a time, as typed."""
        rows = self.body.rows
        if not isinstance(rows, LogRows) or not len(rows):
            self.post_message(self.ShowStatus("there is no log line to go to"))
            return
        wanted = parse_clock(text, rows.line(self.body.cursor).time_ms)
        if wanted is None:
            self.post_message(self.ShowStatus(f"{text!r} is not a time; write 14:05, 14:05:30.250 or 2026-11-21 14:05"))
        else:
            self._story = self.session.story  # a screen that is shown for the first time starts there
            self.body.move_to(rows.index.place_of_time(wanted, rows.view), is_centred=True)
            self.post_message(self.ShowStatus(beyond(wanted, rows.line(0).time_ms, rows.line(len(rows) - 1).time_ms)))

    def chosen(self, chosen: Row) -> None:
        """Open the collective that the line's rank had issued last at that time."""
        incident, rows = self.session.incident.value, self.body.rows
        rank = chosen.link.rank if chosen.link is not None else None
        if incident is None or rank is None or not isinstance(rows, LogRows):
            super().chosen(chosen)
            return
        found = operation_at(incident.run, rank, rows.line(self.body.cursor).time_ms)
        group, seq = found if found is not None else (None, None)
        self.post_message(self.Go(RowLink(screen=3, rank=rank, group=group, seq=seq)))

    def action_fold(self) -> None:
        self._keep_place()
        self._is_folded = not self._is_folded
        self.update_rows()

    def select(self, link: RowLink) -> None:
        self.update_rows(force=True)
        rows, incident = self.body.rows, self.session.incident.value
        logged = incident.logged_step(link.step) if incident is not None and link.step is not None else None
        if isinstance(rows, LogRows) and link.step is not None and logged is not None:
            self.body.move_to(rows.place_of_step(link.step, logged), is_centred=True)
        if not isinstance(rows, LogRows) or not link.source:
            return
        place = rows.place_of(rows.index.line_at(link.source, max(link.line, 1)))
        if place is not None:
            self.body.move_to(place, is_centred=True)


def beyond(wanted_ms: int, first_ms: int, last_ms: int) -> str:
    """That a time is before the first of the lines, by more than its minute, or after the last; else "".

    >>> beyond(61_000, 0, 60_000), beyond(60_000, 90_000, 95_000)
    ('the lines end at 1970-01-01 00:01:00', '')
    """
    if wanted_ms > last_ms:
        return f"the lines end at {_moment(last_ms)}"
    return f"the lines begin at {_moment(first_ms)}" if wanted_ms < first_ms // _MINUTE_MS * _MINUTE_MS else ""


def _moment(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S}"


def operation_at(run: Run, rank: int, time_ms: int) -> tuple[str, int] | None:
    """(group, seq) of the last collective that `rank` issued before a time; None if no times were recorded.

    The log may be in another time zone, so whole quarters of an hour between the two clocks are removed.
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
