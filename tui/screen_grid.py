"""Screen 2: ranks x operations of one group as a heatmap, with zoom, a time axis and jumps to the next problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static

from titan_ckpt.tui.data_grid import (
    GLYPHS,
    Grid,
    build_grid,
    build_time_grid,
    next_stop,
    reduce_row,
    sort_orders,
)
from titan_ckpt.tui.data_incident import Incident
from titan_ckpt.tui.lineview import MARK, LineView
from titan_ckpt.tui.pane import Pane, filter_ranks
from titan_ckpt.tui.rows import Part, Row, RowList, Rows, Target, row
from titan_ckpt.tui.session import Session

_LABEL = 18
MAX_CELLS_AT_ONCE = 1_000_000


class GridRows:
    """The rows of a heatmap, made as they are painted: a rank each. The cells of column `spot` stand out."""

    def __init__(
        self, grid: Grid, order: np.ndarray, *, first: int, per_cell: int, spot: int | None, pinned: int | None
    ) -> None:
        self.grid, self.order, self._first, self._per_cell = grid, order, first, per_cell
        self._spot, self._pinned = spot, pinned

    def __len__(self) -> int:
        return len(self.order)

    def row(self, index: int, width: int) -> Row:
        place = int(self.order[index])
        rank = int(self.grid.members[place])
        label = f"{'*' if rank == self._pinned else ' '}{rank:>5} {(self.grid.labels or {}).get(rank, ''):<10}"[:_LABEL]
        cells = max(width - _LABEL, 1)
        codes = reduce_row(self.grid.codes, np.array([place]), self._first, cells, self._per_cell)
        parts: list[Part] = [(f"{label:<{_LABEL}}", "bold" if rank == self._pinned else "")]
        cell = None if self._spot is None else (self._spot - self._first) // self._per_cell
        parts += cell_parts(codes.tolist(), cell)
        seq = None if self.grid.is_time else self.grid.first + self._column(place)
        return row(*parts, target=Target(screen=3, group=self.grid.name, seq=seq, rank=rank))

    def _column(self, place: int) -> int:
        """The gravest column of the chosen cell, or of the whole row where no column is chosen."""
        codes = self.grid.codes[place]
        start, stop = (0, len(codes)) if self._spot is None else (self._spot, self._spot + self._per_cell)
        return start + int(codes[start:stop].argmax()) if len(codes[start:stop]) else 0

    def next_problem(self, index: int, direction: int) -> int | None:  # noqa: ARG002 (the protocol's)
        """None: this screen steps through ranks and operations by itself."""
        return None


def cell_parts(codes: list[int], spot: int | None) -> Iterator[Part]:
    """Cells as few parts: a part costs the terminal's driver as much as a line of text."""
    for (code, is_spot), equal in itertools.groupby((code, i == spot) for i, code in enumerate(codes)):
        glyph, role, _ = GLYPHS[code]
        yield glyph * len(list(equal)), "spot" if is_spot else role


class GridView(LineView):
    """A LineView on which left and right choose a column."""

    @dataclass
    class Shifted(Message):
        """Left or right was pressed."""

        by: int

    def action_shift(self, by: int) -> None:
        self.post_message(self.Shifted(1 if by > 0 else -1))


class GridPane(Pane):
    """The heatmap."""

    number = 2
    label = "Grid"
    keys = (
        ("[ ]", "group"),
        ("+ -", "zoom"),
        ("< >", "pan"),
        ("t", "time axis"),
        ("o", "order"),
        ("h l", "column"),
        ("n N", "next problem"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "group(-1)", show=False), Binding("right_square_bracket", "group(1)", show=False),
        Binding("plus", "zoom(0.5)", show=False), Binding("minus", "zoom(2)", show=False),
        Binding("less_than_sign", "pan(-1)", show=False), Binding("greater_than_sign", "pan(1)", show=False),
        Binding("t", "time", show=False), Binding("o", "order", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._per_cell, self._first, self._is_time, self._order = 1, 0, False, 0
        self._spot: int | None = None
        self._is_at_end = True
        self._grid: Grid | None = None
        self._sorted: tuple[np.ndarray, list[tuple[str, np.ndarray]]] | None = None
        self._key: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static("", classes="title", markup=False)
        yield Static("", id="ruler", markup=False)
        yield GridView()

    def state(self) -> tuple[object, ...]:
        view = (self._per_cell, self._first, self._spot, self._is_time, self._order)
        return (*super().state(), self.session.lane, *view)

    def update_rows(self, *, force: bool = False) -> None:
        super().update_rows(force=force)
        self.query_one("#ruler", Static).update(self.ruler())

    def ruler(self) -> str:
        """What stands above the cells: a mark at the chosen column with its name and what the rank under the cursor did."""
        grid, rows = self._grid, self.body.rows
        if grid is None or self._spot is None or not isinstance(rows, GridRows) or not len(rows):
            return ""
        place = rows.order[min(self.body.cursor, len(rows) - 1)]
        what = f"{grid.column_text(self._spot)}: rank {grid.members[place]} {GLYPHS[grid.codes[place, self._spot]][2]}"
        before = _LABEL + len(MARK) + (self._spot - self._first) // self._per_cell
        is_left = before + len(what) + 2 > self.body.line_width
        return f"{what:>{before - 1}} v" if is_left and before > len(what) + 1 else f"{'':>{before}}v {what}"

    def on_line_view_moved(self) -> None:
        self.query_one("#ruler", Static).update(self.ruler())

    def title(self) -> str:
        grid = self._grid
        if grid is None:
            return "no operations were recorded"
        incident = self.session.incident.value
        count = len(incident.lanes) if incident else 0
        scale = f"{self._per_cell} a cell" if self._per_cell > 1 else "1 a cell"
        return (
            f"group {grid.name} ({self.session.lane + 1} of {count}) · {len(grid.members)} ranks · from "
            f"{grid.column_text(self._first)} · {scale} · by {self._order_name()}"
        )

    def _order_name(self) -> str:
        orders = self._orders()
        return orders[self._order % len(orders)][0] if orders else "rank"

    def _orders(self) -> list[tuple[str, np.ndarray]]:
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
            return RowList([row(self.session.incident.text if incident is None else "no operations were recorded")])
        grid = self._grid_of(incident)
        if grid is None:
            return RowList([row(("drawing ...", "dim"))])
        order = self._orders()[self._order % len(self._orders())][1]
        wanted = filter_ranks(self.filter_text)
        if wanted is not None:
            order = order[np.isin(grid.members[order], np.array(wanted))]
        if self._is_at_end:
            self._first = max(0, grid.codes.shape[1] - max(width - _LABEL, 1) * self._per_cell)
        self._first = max(0, min(self._first, grid.codes.shape[1] - 1))
        return GridRows(
            grid, order, first=self._first, per_cell=self._per_cell, spot=self._spot, pinned=self.session.pinned
        )

    def _grid_of(self, incident: Incident) -> Grid | None:
        """The heatmap that is asked for; a large one is made in a thread, and None until it is there."""
        key = (self.session.incident.version, self.session.lane, self._is_time)
        if self._key != key:
            self._key, self._grid, is_time = key, None, self._is_time
            lane = incident.lanes[self.session.lane % len(incident.lanes)]

            def make() -> Grid | None:
                return build_time_grid(incident.run, lane) if is_time else build_grid(incident.run, lane)

            def take(grid: Grid | None) -> None:
                if self._key == key:
                    self._take(grid)

            if lane.row.size <= MAX_CELLS_AT_ONCE:
                take(make())
            else:
                self.post_message(self.Work(f"drawing {lane.row.size:,} operations", make, take))
        return self._grid

    def _take(self, grid: Grid | None) -> None:
        if grid is None:
            self.post_message(self.Say("no times were recorded"))
            self._is_time = False
            self.call_later(self.update_rows)
            return
        self._grid, self._spot, self._is_at_end = grid, None, True
        self.call_later(self.update_rows, force=True)

    def action_group(self, by: int) -> None:
        incident = self.session.incident.value
        if incident is not None and incident.lanes:
            self.session.lane = (self.session.lane + by) % len(incident.lanes)
            self.session.seq = None
            self.update_rows()

    def on_grid_view_shifted(self, message: GridView.Shifted) -> None:
        """Left and right: the column beside; the first time the newest one."""
        grid = self._grid
        if grid is not None:
            last = grid.codes.shape[1] - 1
            spot = last if self._spot is None else self._spot + message.by * self._per_cell
            self._choose(max(0, min(spot, last)))

    def _choose(self, column: int) -> None:
        """Choose a column and bring it into sight."""
        seen = max(self.body.line_width - _LABEL, 1) * self._per_cell
        if not self._first <= column < self._first + seen:
            self._first, self._is_at_end = max(0, column - seen // 2), False
        self._spot = column
        self.update_rows()

    def action_zoom(self, factor: float) -> None:
        self._per_cell = max(1, min(int(self._per_cell * factor), 4096))
        self.update_rows()

    def action_pan(self, by: int) -> None:
        self._is_at_end = False
        self._first = max(0, self._first + by * max((self.body.line_width - _LABEL) // 2, 1) * self._per_cell)
        self.update_rows()

    def action_time(self) -> None:
        self._is_time = not self._is_time
        self.update_rows()

    def action_order(self) -> None:
        self._order += 1
        self.update_rows()

    def next_problem(self, direction: int) -> None:
        """`n` and `N`: operation after operation, and in each the ranks that are worst off."""
        grid, rows = self._grid, self.body.rows
        if grid is None or not isinstance(rows, GridRows):
            return
        outside = -1 if direction > 0 else grid.codes.shape[1]
        spot = (self.body.cursor, outside if self._spot is None else self._spot)
        found = next_stop(grid.codes, rows.order, spot, direction)
        if found is None:
            self.post_message(self.Say("no further problem to the " + ("right" if direction > 0 else "left")))
            return
        self._choose(found[1])
        self.body.move_to(found[0])

    def select(self, target: Target) -> None:
        self.update_rows()
        rows = self.body.rows
        if isinstance(rows, GridRows) and target.rank is not None:
            places = np.flatnonzero(rows.grid.members[rows.order] == target.rank)
            self.body.move_to(int(places[0]) if len(places) else self.body.cursor)
