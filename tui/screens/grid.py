"""Screen 2: ranks x operations of one group as a heatmap, with zoom, a time axis and steps from problem to problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from titan_ckpt.tui.data.grid import Grid, Order, next_stop, per_row_to_fit, sort_orders
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.timeline import Window, whole_window
from titan_ckpt.tui.pictures.details import operation_rows, rank_rows
from titan_ckpt.tui.pictures.timeline import bars_rows
from titan_ckpt.tui.rows import Role, Row, RowLink, RowList, Rows, placeholder, row
from titan_ckpt.tui.screens.grid_rows import (
    GridRows,
    Viewport,
    axis_line,
    drawn,
    grid_of,
    label_width,
    legend_text,
    no_lane_rows,
    operations_text,
    pointer_text,
    title_of,
)
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.grid_view import GridView
from titan_ckpt.tui.widgets.line_view import MARK
from titan_ckpt.tui.widgets.one_line import OneLine
from titan_ckpt.tui.widgets.pane import Pane, filter_ranks
from titan_ckpt.tui.widgets.part import Part, Space

MAX_CELLS_AT_ONCE = 1_000_000
_AROUND, _AROUND_BARS = 5, 7  # lines around the cells, and around the bars
_LEAST_HEIGHT, _LEAST_BARS = 17, 9  # lines of the list with its details, and of the bars below


class GridPane(Pane):
    """The heatmap."""

    number = 2
    label = "Grid"
    purpose = "every operation of every rank"
    keys = (
        ("n N", "next problem"), ("enter", "open"), ("h l", "column"), ("+ -", "zoom"), ("v V", "ranks per row"), ("t", "time"),
        ("[ ]", "group"), ("o", "order"), ("< >", "pan"),
    )  # fmt: skip
    parts = (Part(name="details"), Part(name="bars", is_below=True, is_of_line=False))
    filter_hint = "filter: ranks, for example 0-7,12"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "group(-1)", show=False), Binding("right_square_bracket", "group(1)", show=False),
        Binding("plus", "zoom(0.5)", show=False), Binding("minus", "zoom(2)", show=False),
        Binding("v", "rows(2)", show=False), Binding("V", "rows(0.5)", show=False),
        Binding("less_than_sign", "pan(-1)", show=False), Binding("greater_than_sign", "pan(1)", show=False),
        Binding("t", "time", show=False), Binding("o", "order", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._per_cell, self._first, self._is_time, self._order = 1, 0, False, 0
        self._per_row: int | None = None  # None: enough to show all ranks
        self._opened_from: tuple[int | None, int] | None = None
        self._spot: int | None = None
        self._is_at_end = True
        self._wanted: tuple[int, int] | None = None  # a rank, and where the cursor stood on it
        self._grid: Grid | None = None
        self._sorted: tuple[np.ndarray, list[Order]] | None = None
        self._key: tuple[object, ...] = ()
        self._window: Window | None = None  # of the timeline; None: all

    def compose_list(self) -> ComposeResult:
        yield OneLine(id="ruler")
        yield OneLine(id="axis")
        yield GridView()
        yield OneLine(id="legend")

    def state(self) -> tuple[object, ...]:
        height = self.body.scrollable_content_region.height
        view = (self._per_cell, self._first, self._spot, self._is_time, self._window)
        return (*super().state(), self.session.lane, *view, self._order, self._per_row, height)

    def update_rows(self, *, force: bool = False) -> None:
        wanted = self._wanted if self._wanted is not None and self._wanted[1] == self.body.cursor else None
        self._divide()
        super().update_rows(force=force)
        if wanted is not None and wanted is self._wanted:
            self.move_to_rank(wanted[0])
        grid = self._grid
        self._show_ruler()
        axis = "" if grid is None else axis_line(grid, self._first, self._per_cell, self._cell_width(grid))
        self.query_one("#axis", OneLine).show(axis)
        self.query_one("#legend", OneLine).show(
            "" if grid is None else f" {legend_text(grid, self.body.size.width - 1)}"
        )

    def _divide(self) -> None:
        """Under few ranks on a tall terminal show the ranks over time; the list with its details has the rest of the lines."""
        incident = self.session.incident.value
        lanes = incident.lanes if incident is not None else ()
        height = max(len(lanes[self.session.lane % len(lanes)].members) + _AROUND, _LEAST_HEIGHT) if lanes else 0
        is_roomy = bool(lanes) and not self._is_time and height + _LEAST_BARS <= self.size.height
        bars = len(incident.states) + _AROUND_BARS if incident is not None else 0
        height = max(height, self.size.height - max(bars, _LEAST_BARS))
        self.set_class(not is_roomy, "-tight")
        self.query_one(".split").styles.height = height if is_roomy and self.screen.has_class("-wide") else "1fr"

    def _cell_width(self, grid: Grid) -> int:
        return max(self.body.line_width - label_width(grid), 1)

    def ruler(self) -> str:
        """The line above the cells: operations where there is room, else the one in which the group stands; or the selected
        column and the state of the row in it."""
        grid, rows, spot = self._grid, self.body.rows, self._spot
        if grid is None or not isinstance(rows, GridRows) or not len(rows):
            return ""
        if spot is not None:
            what = f"{grid.column_text(spot)}: {rows.what(min(self.body.cursor, len(rows) - 1))}"
            return pointer_text(grid, spot, what, self._view(rows), self.body.line_width)
        names = operations_text(grid, self._first, self._per_cell, self._cell_width(grid))
        if names or not 0 <= grid.stand < grid.codes.shape[1]:
            return f"{'':>{label_width(grid) + len(MARK)}}{names}".rstrip()
        return pointer_text(grid, grid.stand, grid.stand_text, self._view(rows), self.body.line_width)

    def _view(self, rows: GridRows) -> Viewport:
        """The part of the grid that the keys have moved to, which `rows` may not show yet."""
        return replace(rows.viewport, first=self._first, per_cell=self._per_cell)

    def _show_ruler(self) -> None:
        line, text = self.query_one("#ruler", OneLine), self.ruler()
        line.display = bool(text)
        line.show(text)

    def on_line_view_moved(self) -> None:
        self._show_ruler()

    def part_rows(self, space: Space) -> Iterable[Row]:
        """The operation and the rank of the cell; of a row of several ranks those of the worst cell."""
        incident, grid, rows = self.session.incident.value, self._grid, self.body.rows
        if incident is None or grid is None or not isinstance(rows, GridRows) or not len(rows):
            return
        if space.name == "bars":
            yield from bars_rows(incident, space.width, space.height)
            return
        place, column = rows.worst(min(self.body.cursor, len(rows) - 1))
        rank = int(grid.members[place])
        if not grid.is_time:
            lane = incident.lanes[self.session.lane % len(incident.lanes)]
            yield from operation_rows(incident, lane, grid.first + column, rank, space.width)
            yield row()
        yield from rank_rows(incident, rank, space.width)

    def part_title(self, name: str) -> str:
        return "ranks over time, all groups" if name == "bars" else name

    def title(self) -> str:
        grid, rows = self._grid, self.body.rows
        if grid is None:
            return "operations"
        incident = self.session.incident.value
        place = f"{self.session.lane + 1} of {len(incident.lanes) if incident else 0}"
        per_row, orders = rows.viewport.per_row if isinstance(rows, GridRows) else 1, self._orders()
        order = orders[self._order % len(orders)].name if orders else "rank"
        return f"{title_of(grid, place, per_row, self._per_cell)} · by {order}"

    def _orders(self) -> list[Order]:
        incident, grid = self.session.incident.value, self._grid
        if incident is None or grid is None:
            return []
        if self._sorted is None or self._sorted[0] is not grid.members:
            self._sorted = (grid.members, sort_orders(incident.run, grid.members.tolist()))
        return self._sorted[1]

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            self._grid = None
            return self.no_incident(width) if incident is None else RowList(no_lane_rows(incident, width))
        grid = self._grid_of(incident)
        if grid is None:
            return RowList([placeholder("drawing ...")])
        order = self._orders()[self._order % len(self._orders())]
        wanted = filter_ranks(self.filter_text)
        if self.filter_text and wanted is None:
            return self.no_match("write ranks such as 0-7,12, not")
        if wanted is not None:
            order = order.only(np.isin(grid.members, np.array(wanted)))
        if not len(order.places):
            return RowList([row((f"no rank of this group matches {self.filter_text}", Role.DIM))])
        if self._is_at_end:
            self._first = max(0, grid.codes.shape[1] - self._cell_width(grid) * self._per_cell)
        self._first = max(0, min(self._first, grid.codes.shape[1] - 1))
        per_row = self._per_row or per_row_to_fit(order.keys, max(self.body.scrollable_content_region.height, 1))
        viewport = Viewport(
            first=self._first, per_cell=self._per_cell, per_row=per_row, spot=self._spot, pinned=self.session.pinned,
            culprits=incident.top.culprits,
        )  # fmt: skip
        return GridRows(grid, order, viewport)

    def filtered(self, rows: Rows) -> Rows:
        """The filter chooses ranks, in make_rows."""
        return rows

    def is_complete(self) -> bool:
        return self._grid is not None and super().is_complete()

    def move_to_rank(self, rank: int | None) -> None:
        """Move now, and again whenever the height changes how many ranks a row has, until the cursor is moved."""
        rows = self.body.rows
        place = rows.row_of_rank(rank) if isinstance(rows, GridRows) and rank is not None else None
        if place is not None:
            self.body.move_to(place)
        self._wanted = None if rank is None else (rank, self.body.cursor)

    def copied_text(self) -> str:
        """The worst operation of the row, in words."""
        rows = self.body.rows
        return rows.in_words(self.body.cursor) if isinstance(rows, GridRows) and len(rows) else super().copied_text()

    def _grid_of(self, incident: Incident) -> Grid | None:
        """The current heatmap; None while a large one is built in a thread. While following, the former one stays until then."""
        shown = (self._window, self.body.line_width) if self._is_time else ()
        key = (self.session.incident.version, self.session.lane, self._is_time, shown)
        if self._key != key:
            is_same = self._key[1:3] == key[1:3]
            spot, self._key, is_time, window = self._spot if is_same else None, key, self._is_time, self._window
            self._grid = self._grid if is_same else None
            lane = incident.lanes[self.session.lane % len(incident.lanes)]
            width = self.body.line_width

            def make() -> Grid | None:
                return drawn(incident, lane, window, width) if is_time else grid_of(incident, lane)

            def take(grid: Grid | None) -> None:
                if self._key == key:
                    self._take(grid, spot)

            if lane.row.size <= MAX_CELLS_AT_ONCE:
                take(make())
            else:
                self.work(f"drawing {lane.row.size:,} operations", make, take)
        return self._grid

    def _take(self, grid: Grid | None, spot: int | None) -> None:
        if grid is None:
            self.post_message(self.ShowStatus("no times recorded"))
            self._is_time = False
            self.call_later(self.update_rows)
            return
        self._grid = grid
        if spot is None or spot >= grid.codes.shape[1]:
            self._spot, self._is_at_end = None, True
        if grid.is_time:
            self._per_cell, self._first = 1, 0
        self.call_later(self.update_rows, force=True)

    def action_group(self, by: int) -> None:
        incident = self.session.incident.value
        if incident is not None and incident.lanes:
            self.session.lane = (self.session.lane + by) % len(incident.lanes)
            self.session.seq = None
            self.update_rows()

    def on_grid_view_shifted(self, message: GridView.Shifted) -> None:
        """Handle left and right: select the next column, initially the one in which the group stands, else the newest."""
        grid = self._grid
        if grid is not None:
            last, stand = grid.codes.shape[1] - 1, grid.stop if grid.is_time else grid.stand
            begin = stand if 0 <= stand <= last else last
            spot = begin if self._spot is None else self._spot + message.by * self._per_cell
            self._choose(max(0, min(spot, last)))

    def on_grid_view_pointed(self, message: GridView.Pointed) -> None:
        rows = self.body.rows
        if isinstance(rows, GridRows) and (column := rows.column_at(message.at, self.body.line_width)) is not None:
            self._choose(column)

    def _choose(self, column: int) -> None:
        """Select a column and scroll to it."""
        assert self._grid is not None
        seen = self._cell_width(self._grid) * self._per_cell
        if not self._first <= column < self._first + seen:
            self._first, self._is_at_end = max(0, column - seen // 2), False
        self._spot = column
        self.update_rows()

    def action_zoom(self, factor: float) -> None:
        if self._is_time:
            self._move_window(lambda window, centre: window.zoomed(factor, centre))
            return
        self._per_cell = max(1, min(int(self._per_cell * factor), 4096))
        self.update_rows()

    def _move_window(self, change: Callable[[Window, int], Window]) -> None:
        """Show another stretch of time: about the chosen column, else where the last rank began to wait, else the last entry."""
        incident, grid = self.session.incident.value, self._grid
        if incident is None or grid is None:
            return
        lane = incident.lanes[self.session.lane]
        whole = whole_window(incident.run, lane, incident.clock_offsets(lane))
        if whole is not None:
            spot, columns, window = self._spot, grid.codes.shape[1], self._window or whole
            last = int(np.flatnonzero(grid.codes.any(axis=0)).max(initial=0))
            spot = spot if spot is not None else grid.stop if 0 <= grid.stop < columns else last
            share = spot / columns
            self._window = change(window, window.start + int(window.length * share)).within(whole)
            self._spot = None
            self.update_rows()

    def action_pan(self, by: int) -> None:
        if self._is_time:
            self._move_window(lambda window, _: window.moved(by / 2))
            return
        if self._grid is not None:
            self._is_at_end = False
            self._first = max(0, self._first + by * max(self._cell_width(self._grid) // 2, 1) * self._per_cell)
            self.update_rows()

    def action_rows(self, factor: float) -> None:
        """Change the number of ranks per row, keeping the cursor on its rank."""
        rows = self.body.rows
        if isinstance(rows, GridRows) and len(rows):
            per_row = min(int(rows.viewport.per_row * factor), len(rows.order))
            self._show_rows(max(1, per_row), self.body.cursor)

    def _show_rows(self, per_row: int | None, index: int) -> None:
        rows = self.body.rows
        assert isinstance(rows, GridRows)
        rank = int(rows.grid.members[rows.worst(index)[0]])
        self._per_row = per_row
        self.update_rows(force=True)
        self.select(RowLink(screen=self.number, rank=rank))

    def chosen(self, chosen: Row) -> None:
        """Open a row of several ranks into single ones, or a single rank's operation."""
        rows = self.body.rows
        if isinstance(rows, GridRows) and rows.viewport.per_row > 1:
            self._opened_from = (self._per_row, self.body.cursor)
            self._show_rows(1, self.body.cursor)
        else:
            super().chosen(chosen)

    def go_back(self) -> bool:
        if super().go_back():
            return True
        if self._opened_from is None:
            return False
        self._per_row, cursor = self._opened_from
        self._opened_from = None
        self.update_rows(force=True)
        self.body.move_to(cursor)
        return True

    def action_time(self) -> None:
        self._is_time = not self._is_time
        self._per_cell, self._window, self._spot = 1, None, None
        self.update_rows()

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        incident, grid = self.session.incident.value, self._grid
        is_whole = self._window is None and self._per_cell == 1
        useful = {
            "o": len(self._orders()) > 1,
            "[ ]": incident is None or len(incident.lanes) > 1,
            "v V": grid is None or len(grid.codes) > self.body.size.height,
            "< >": grid is None or not is_whole or grid.codes.shape[1] > self._cell_width(grid),
        }
        return [key for key in super().useful_keys() if useful.get(key[0], True)]

    def action_order(self) -> None:
        if len(self._orders()) < 2:
            self.post_message(self.ShowStatus("by rank is the only order: these ranks have no mesh axes"))
        self._order += 1
        self.update_rows()

    def next_problem(self, direction: int) -> None:
        """Step through problem operations, and in each through its worst ranks."""
        grid, rows = self._grid, self.body.rows
        if grid is None or not isinstance(rows, GridRows):
            return
        outside = -1 if direction > 0 else grid.codes.shape[1]
        spot = (self.body.cursor, outside if self._spot is None else self._spot)
        found = next_stop(grid.codes, rows.order, rows.starts, spot, direction)
        if found is not None:
            self._choose(found[1])
            self.body.move_to(found[0])
        else:
            self.post_message(self.ShowStatus("no further problem to the " + ("right" if direction > 0 else "left")))

    def select(self, link: RowLink) -> None:
        self.update_rows()
        self.move_to_rank(link.rank)
