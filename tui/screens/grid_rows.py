"""The painted lines of the heatmap: rows of ranks, the axis and the legend. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.report.facts import LAST_WAITS
from titan_ckpt.tui.data.grid import (
    ABSENT,
    BLANK,
    DONE,
    ENDED,
    GLYPHS,
    LATE,
    PENDING,
    RUNNING,
    SILENT,
    Grid,
    Order,
    build_grid,
    build_p2p_grid,
    mark_failed,
    reduce_row,
    row_starts,
    usual_operation,
)
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.p2p import different_halves
from titan_ckpt.tui.data.timeline import BARS, Window, build_time_grid
from titan_ckpt.tui.data.unseen import unseen_operation
from titan_ckpt.tui.pictures.timeline import bar_spans
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, TextSpan, counted, ranks_named, row, truncate, wrapped
from titan_ckpt.tui.widgets.line_view import MARK, MORE_LEFT, MORE_RIGHT

_LEAST_LABEL, _MOST_LABEL = 14, 26
_MOST_STRETCH = 3
_WORDS, _MOST_NAME = 12, 16  # a cell of that width holds its state in a word; names of operations are cut


def no_lane_rows(incident: Incident, width: int) -> Iterator[Row]:
    """In place of the operations that ranks have in common: that there are none, or of one rank alone."""
    ranks = [rank for rank, record in incident.run.ranks.items() if len(record.operations)]
    if not ranks:
        yield row("no operations recorded")
        return
    text = f"operations of {ranks_named(ranks, 4)} alone are recorded, and nothing to compare with; enter shows what it waits in"
    yield from (row(line, link=RowLink(screen=6, rank=ranks[0])) for line in wrapped(text, width))


def grid_of(incident: Incident, lane: Lane) -> Grid:
    """The heatmap of a lane over its operations."""
    stand = incident.stands_at(lane) - lane.first_seq
    if not incident.is_p2p(lane):
        grid = build_grid(incident.run, lane)
        if incident.is_slow:
            grid.codes[grid.codes == ABSENT] = BLANK if incident.is_over else LATE
        elif incident.is_running:
            grid.codes[grid.codes == ABSENT] = BLANK
    else:
        missing, different = incident.left_out(lane), different_halves(incident.run, lane, incident.top)
        grid = build_p2p_grid(incident.run, lane, missing, different)
    mark_failed(grid, lane, incident.failed)
    if incident.is_over:
        grid.codes[(grid.codes == PENDING) | (grid.codes == RUNNING)] = ENDED
    is_named = not incident.is_p2p(lane) and 0 <= stand < lane.row.shape[1]
    op = usual_operation(incident.run, lane, stand) if is_named else ""
    grid = replace(grid, name=incident.name_of(lane), stand=stand, stand_op=op)
    return grid if incident.is_p2p(lane) else with_unseen(incident, lane, grid)


def with_unseen(incident: Incident, lane: Lane, grid: Grid) -> Grid:
    """The heatmap with a column for the operation that ranks wait in and no recorder holds, after the last one that is done."""
    unseen = unseen_operation(incident, lane)
    if unseen is None:
        return grid
    place = {rank: i for i, rank in enumerate(lane.members)}
    column = np.zeros((len(lane.members), 1), np.uint8)
    column[lane.is_silent] = SILENT
    column[[place[rank] for rank in unseen.awaited if not lane.is_silent[place[rank]]]] = ABSENT
    column[[place[rank] for rank in unseen.waiters]] = PENDING
    return replace(
        grid, codes=np.hstack([grid.codes, column]), stand=grid.codes.shape[1], stand_op=unseen.op,
        operations=(*grid.operations, unseen.op) if grid.operations else (),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewport:
    """The part of a grid on the screen: columns from `first`, `per_cell` to a cell, up to `per_row` ranks to a row."""

    first: int
    per_cell: int
    per_row: int
    spot: int | None
    pinned: int | None
    culprits: tuple[int, ...] = ()


class GridRows:
    """Rows of up to `per_row` ranks, built when painted; a cell shows the highest code under it.

    Cells in the viewport's column `spot` are highlighted.
    """

    def __init__(self, grid: Grid, order: Order, viewport: Viewport) -> None:
        self.grid, self.order, self.viewport = grid, order.places, viewport
        self.starts = row_starts(order.keys, viewport.per_row)
        self.label_width = label_width(grid)
        self._axis, self._keys = order.name, order.keys

    def __len__(self) -> int:
        return len(self.starts)

    def places(self, index: int) -> np.ndarray:
        """Indices into the grid's members of the ranks in a row."""
        stop = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.order)
        return self.order[self.starts[index] : stop]

    def row_of_rank(self, rank: int) -> int | None:
        """Index of the row with a rank."""
        found = np.flatnonzero(self.grid.members[self.order] == rank)
        return int(np.searchsorted(self.starts, found[0], side="right")) - 1 if len(found) else None

    def row(self, index: int, width: int) -> Row:
        places, view = self.places(index), self.viewport
        ranks = self.grid.members[places]
        stretch = stretch_of(self.grid, width - self.label_width, view.per_cell)
        cells = max((width - self.label_width) // stretch, 1)
        codes = reduce_row(self.grid.codes, places, view.first, cells, view.per_cell)
        is_pinned = view.pinned is not None and bool((ranks == view.pinned).any())
        is_at_fault = bool(view.culprits) and bool(np.isin(ranks, view.culprits).any())
        mark = "*" if is_pinned else CULPRIT if is_at_fault else " "
        label = f"{mark}{self._label(index, ranks)}"[: self.label_width - 1]
        role: Role = Role.BAD if is_at_fault else Role.BOLD if is_pinned else Role.PLAIN
        spans: list[TextSpan] = [(f"{label:<{self.label_width}}", role)]
        cell = None if view.spot is None else (view.spot - view.first) // view.per_cell
        spans += (
            bar_spans(codes.tolist(), self.grid.stop, cell)
            if self.grid.is_time
            else cell_spans(codes.tolist(), cell, stretch)
        )
        place, column = self.worst(index)
        seq = None if self.grid.is_time else self.grid.first + column
        return row(*spans, link=RowLink(screen=3, group=self.grid.name, seq=seq, rank=int(self.grid.members[place])))

    def _label(self, index: int, ranks: np.ndarray) -> str:
        first, last = int(ranks[0]), int(ranks[-1])
        if self.viewport.per_row == 1:
            return f"{first:>5} {(self.grid.labels or {}).get(first, '')}"
        key = "" if self._axis == "rank" else f" {self._axis}{int(self._keys[self.starts[index]])}"
        is_run = last - first == len(ranks) - 1
        return f"{f'{first}-{last}' if is_run else f'{first}..{last} x{len(ranks)}'}{key}"

    def column_at(self, at: int, width: int) -> int | None:
        """The column that is drawn at this character of a line; None beside the cells."""
        stretch = stretch_of(self.grid, width - self.label_width, self.viewport.per_cell)
        column = self.viewport.first + (at - self.label_width) // stretch * self.viewport.per_cell
        return column if at >= self.label_width and column < self.grid.codes.shape[1] else None

    def in_words(self, index: int) -> str:
        """The worst operation of a row, in words."""
        grid, (place, column) = self.grid, self.worst(index)
        state = (BARS if grid.is_time else GLYPHS)[int(grid.codes[place, column])].label
        return f"group {grid.name} {grid.column_text(column)}: rank {grid.members[place]} {state}"

    def worst(self, index: int) -> tuple[int, int]:
        """(member index, column) of the highest code in a row, within the selected cell if there is one.

        Of equal ones it is the operation in which the group stands.
        """
        places = self.places(index)
        spot = self.viewport.spot
        start, stop = (0, None) if spot is None else (spot, spot + self.viewport.per_cell)
        codes = self.grid.codes[places, start:stop]
        if not codes.size:
            return int(places[0]), start
        place, column = np.unravel_index(int(codes.argmax()), codes.shape)
        stand = self.grid.stand
        if spot is None and 0 <= stand < codes.shape[1] and codes[:, stand].max() == codes.max():
            return int(places[int(codes[:, stand].argmax())]), stand
        return int(places[place]), start + int(column)

    def next_problem(self, index: int, direction: int) -> int | None:  # noqa: ARG002 (the protocol's)
        """None: the grid screen steps through ranks and operations itself."""
        return None

    def what(self, index: int) -> str:
        """States of the ranks of a row in the selected column."""
        spot = self.viewport.spot
        assert spot is not None
        places = self.places(index)
        glyphs = BARS if self.grid.is_time else GLYPHS
        counts = Counter(self.grid.codes[places, spot].tolist())
        if len(places) == 1:
            return f"rank {self.grid.members[places[0]]} {glyphs[next(iter(counts))].label}"
        return ", ".join(f"{count:,} {glyphs[code].label}" for code, count in sorted(counts.items(), reverse=True))


def drawn(incident: Incident, lane: Lane, window: Window | None, width: int) -> Grid | None:
    """The heatmap of a lane over wall time in lines of `width` characters; None without recorded times."""
    grid = grid_of(incident, lane)
    last_ns = None if incident.is_p2p(lane) else incident.last_issued_ns.get(lane.group)
    cells = max(width - label_width(grid), 1)
    return build_time_grid(incident.run, lane, grid, window, cells, incident.clock_offsets(lane), last_ns)


def title_of(grid: Grid, place: str, per_row: int, per_cell: int) -> str:
    """The group and its `place` among the groups, its ranks, and how many ranks and columns a cell stands for."""
    parts = [f"group {grid.name} ({place})", counted(len(grid.members), "rank")]
    parts += [f"up to {per_row} ranks per row"] if per_row > 1 else []
    parts += [f"{per_cell} {'time steps' if grid.is_time else 'operations'} per cell"] if per_cell > 1 else []
    return " · ".join(parts)


def label_width(grid: Grid) -> int:
    """Width of the row labels: that of the longest, within limits."""
    labels = itertools.islice((grid.labels or {}).values(), 64)
    return min(max([_LEAST_LABEL, *(len(label) + 9 for label in labels)]), _MOST_LABEL)


def stretch_of(grid: Grid, width: int, per_cell: int) -> int:
    """Characters per cell: more than one if there are few operations."""
    if grid.is_time:
        return 1
    num_cells = -(-int(grid.codes.shape[1]) // per_cell)
    named = min(max(map(len, grid.operations), default=0), _MOST_NAME) + 2
    if per_cell == 1 and num_cells * max(named, _WORDS) <= width and named > 2:
        return max(named, _WORDS)
    return max(1, min(width // max(num_cells, 1), _MOST_STRETCH))


def cell_spans(codes: list[int], spot: int | None, stretch: int) -> Iterator[TextSpan]:
    """Join equal cells into spans: each span costs the terminal driver as much as a line of text."""
    for (code, is_spot), equal in itertools.groupby((code, i == spot) for i, code in enumerate(codes)):
        glyph = GLYPHS[code]
        has_word = stretch >= max(_WORDS, len(glyph.label) + 3) and code not in (BLANK, DONE)
        word = f" {glyph.label}" if has_word else ""
        if is_spot:
            yield glyph.char + word, glyph.role.chosen
            yield " " * (stretch - 1 - len(word)), Role.PLAIN
        else:
            yield f"{glyph.char + word:<{stretch}}" * len(list(equal)), glyph.role


def axis_line(grid: Grid, first: int, per_cell: int, width: int) -> str:
    """The line over the cells: names of columns, and a mark at each end beyond which there are more."""
    stretch = stretch_of(grid, width, per_cell)
    is_cut = first + width // stretch * per_cell < grid.codes.shape[1]
    names = axis_text(grid, first, per_cell, width - 2 * is_cut)
    left, right = MORE_LEFT if first > 0 else "", MORE_RIGHT if is_cut else ""
    return f"{left:>{label_width(grid) + len(MARK) - 1}} {names:<{width - is_cut}}{right}".rstrip()


def axis_text(grid: Grid, first: int, per_cell: int, width: int) -> str:
    """Names of some columns, each above its cell."""
    stretch = stretch_of(grid, width, per_cell)
    text, cell = "", 0
    while cell * stretch < width and first + cell * per_cell < grid.codes.shape[1]:
        name = grid.column_text(first + cell * per_cell)
        if cell * stretch >= len(text) and cell * stretch + len(name) <= width:
            text = f"{text:<{cell * stretch}}{name}  "
        cell += 1 if stretch > 1 else 10
    return text.rstrip()


def operations_text(grid: Grid, first: int, per_cell: int, width: int) -> str:
    """The usual operation of each column, above its cell, where a cell is wide enough for its name."""
    stretch = stretch_of(grid, width, per_cell)
    if stretch < _WORDS or grid.is_time:
        return ""
    return "".join(f"{truncate(name, stretch - 2):<{stretch}}" for name in grid.operations[first:])


def pointer_text(grid: Grid, column: int, what: str, view: Viewport, line_width: int) -> str:
    """The line above the cells with a mark above those of `column` and `what` beside it."""
    width = max(line_width - label_width(grid), 1)
    cell = (column - view.first) // view.per_cell * stretch_of(grid, width, view.per_cell)
    if not 0 <= cell < width:  # panned out of sight
        is_left = cell < 0
        return f"{'':>{label_width(grid)}}{MORE_LEFT} {what}" if is_left else f"{what:>{line_width}} {MORE_RIGHT}"
    before = label_width(grid) + len(MARK) + cell
    is_left = before + len(what) + 2 > line_width
    return f"{what:>{before - 1}} v" if is_left and before > len(what) + 1 else f"{'':>{before}}v {what}"


def legend_text(grid: Grid, width: int) -> str:
    """The glyphs that occur and their labels, the worst first."""
    here = [code for code in reversed(grid.occurring) if code != BLANK]
    if grid.is_time:
        text = "  ".join(f"{BARS[code].char} {BARS[code].label}" for code in here)
        stop = f"  ╎ {LAST_WAITS}" if 0 <= grid.stop < grid.codes.shape[1] else ""
        return truncate(f"{text}{stop}", width)
    blank = f"  blank: {GLYPHS[BLANK].label}" if BLANK in grid.occurring and not grid.is_p2p else ""
    return truncate("  ".join(f"{GLYPHS[code].char} {GLYPHS[code].label}" for code in here) + blank, width)
