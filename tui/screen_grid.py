"""Screen 2: ranks x operations of one group as a heatmap, with zoom, a time axis and jumps to the next problem."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from titan_ckpt.tui.data_grid import (
    BLANK,
    GLYPHS,
    Grid,
    build_grid,
    build_time_grid,
    problem_columns,
    reduce_row,
    sort_orders,
)
from titan_ckpt.tui.data_incident import Incident
from titan_ckpt.tui.pane import Pane, filter_ranks
from titan_ckpt.tui.rows import Part, Row, RowList, Rows, Target, row
from titan_ckpt.tui.session import Session

_LABEL = 18


class GridRows:
    """The rows of a heatmap, made as they are painted: a rank each."""

    def __init__(self, grid: Grid, order: np.ndarray, *, first: int, per_cell: int, session: Session) -> None:
        self.grid, self._order, self._first, self._per_cell = grid, order, first, per_cell
        self._pinned, self._seq, self._group = session.pinned, session.seq, grid.name

    def __len__(self) -> int:
        return len(self._order)

    def row(self, index: int, width: int) -> Row:
        place = int(self._order[index])
        rank = int(self.grid.members[place])
        label = f"{'*' if rank == self._pinned else ' '}{rank:>5} {(self.grid.labels or {}).get(rank, ''):<10}"[:_LABEL]
        cells = max(width - _LABEL, 1)
        codes = reduce_row(self.grid.codes, np.array([place]), self._first, cells, self._per_cell)
        parts: list[Part] = [(f"{label:<{_LABEL}}", "bold" if rank == self._pinned else "")]
        parts += [(GLYPHS[code][0], GLYPHS[code][1]) for code in codes.tolist()]
        worst = int(self.grid.codes[place].argmax()) if self.grid.codes.shape[1] else 0
        seq = None if self.grid.is_time else self.grid.first + worst
        return row(*parts, target=Target(screen=3, group=self._group, seq=self._seq or seq, rank=rank))

    def next_problem(self, index: int, direction: int) -> int | None:
        places = range(index + 1, len(self)) if direction > 0 else range(index - 1, -1, -1)
        return next((i for i in places if self.grid.codes[int(self._order[i])].max(initial=BLANK) > 3), None)


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
        ("p", "next problem column"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "group(-1)", show=False), Binding("right_square_bracket", "group(1)", show=False),
        Binding("plus", "zoom(0.5)", show=False), Binding("minus", "zoom(2)", show=False),
        Binding("less_than_sign", "pan(-1)", show=False), Binding("greater_than_sign", "pan(1)", show=False),
        Binding("t", "time", show=False), Binding("o", "order", show=False), Binding("p", "problem_column", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._per_cell, self._first, self._is_time, self._order = 1, 0, False, 0
        self._grid: Grid | None = None
        self._key: tuple[object, ...] = ()

    def state(self) -> tuple[object, ...]:
        return (
            *super().state(),
            self.session.lane,
            self.session.seq,
            self._per_cell,
            self._first,
            self._is_time,
            self._order,
        )

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
        return sort_orders(incident.run, [int(m) for m in grid.members]) if incident and grid else []

    def make_rows(self, width: int) -> Rows:  # noqa: ARG002 (the base's)
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            self._grid = None
            return RowList([row(self.session.incident.text if incident is None else "no operations were recorded")])
        grid = self._grid = self._grid_of(incident)
        order = self._orders()[self._order % len(self._orders())][1]
        wanted = filter_ranks(self.filter_text)
        if wanted is not None:
            order = order[np.isin(grid.members[order], np.array(wanted))]
        self._first = max(0, min(self._first, grid.codes.shape[1] - 1))
        return GridRows(grid, order, first=self._first, per_cell=self._per_cell, session=self.session)

    def _grid_of(self, incident: Incident) -> Grid:
        key = (self.session.incident.version, self.session.lane, self._is_time)
        if self._key != key or self._grid is None:
            lane = incident.lanes[self.session.lane % len(incident.lanes)]
            timed = build_time_grid(incident.run, lane) if self._is_time else None
            if self._is_time and timed is None:
                self.post_message(self.Say("no times were recorded"))
            self._grid, self._key = timed or build_grid(incident.run, lane), key
            room = max(self.body.line_width - _LABEL, 1)
            self._first = max(0, self._grid.codes.shape[1] - room * self._per_cell)
        return self._grid

    def action_group(self, by: int) -> None:
        incident = self.session.incident.value
        if incident is not None and incident.lanes:
            self.session.lane = (self.session.lane + by) % len(incident.lanes)
            self.session.seq = None
            self.update_rows()

    def action_zoom(self, factor: float) -> None:
        self._per_cell = max(1, min(int(self._per_cell * factor), 4096))
        self.update_rows()

    def action_pan(self, by: int) -> None:
        self._first = max(0, self._first + by * max((self.body.line_width - _LABEL) // 2, 1) * self._per_cell)
        self.update_rows()

    def action_time(self) -> None:
        self._is_time = not self._is_time
        self.update_rows()

    def action_order(self) -> None:
        self._order += 1
        self.update_rows()

    def action_problem_column(self) -> None:
        columns = problem_columns(self._grid.codes) if self._grid is not None else np.zeros(0, np.int64)
        later = columns[columns > self._first]
        if not len(later):
            self.post_message(self.Say("no further problem to the right"))
            return
        self._first = int(later[0])
        if self._grid is not None and not self._grid.is_time:
            self.session.seq = self._grid.first + self._first
        self.update_rows()

    def select(self, target: Target) -> None:  # noqa: ARG002 (the base's)
        self.update_rows()
