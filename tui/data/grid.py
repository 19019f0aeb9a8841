"""The heatmap of one group: a byte per rank and operation. Codes grow with severity, so zooming out is a maximum. Pure.

16,384 ranks x 2,000 operations take 33 MB. A painted cell is the maximum of the codes under it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.stragglers import clock_offsets
from titan_ckpt.debug.incident.records import COMPLETED, STARTED, Run
from titan_ckpt.tui.data.arrays import ByteArray, Floats, Ints
from titan_ckpt.tui.data.p2p import ordinal
from titan_ckpt.tui.rows import Glyph, Role

Codes = ByteArray

BLANK, DONE, ENDED, LATE, SILENT, PENDING, RUNNING, FAILED, ABSENT, DIFFERS = range(10)
GLYPHS: Sequence[Glyph] = (
    Glyph(char=" ", role=Role.DIM, label="not recorded"),
    Glyph(char="·", role=Role.DIM, label="done"),
    Glyph(char="e", role=Role.DIM, label="ended since"),
    Glyph(char="+", role=Role.NOTE, label="late"),
    Glyph(char="?", role=Role.WARN, label="unknown"),
    Glyph(char="o", role=Role.GOOD, label="pending"),
    Glyph(char="@", role=Role.GOOD, label="started"),
    Glyph(char="%", role=Role.WARN, label="failed"),
    Glyph(char="x", role=Role.BAD, label="absent"),
    Glyph(char="#", role=Role.BAD, label="differs"),
)
ENDED_TEXT = f"open when recorded, {GLYPHS[ENDED].label}"  # of a job that ended well
LATE_NS = 50_000_000
_MEDIAN_OF = 1_024
_MOST_NAMED = 32  # columns
_BLOCK_ROWS, _BLOCK_COLUMNS = 256, 512


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`codes[i, j]` is the state of rank `members[i]` in column `j`.

    Columns are sequence numbers from `first`, or time bins of `bin_ns` if that is not 0: the first one `first_ns` after the
    first operation, column `stop` where the last rank began to wait (-1: not among them). `stand`: the column of the operation
    in which the group stands (-1: not among them), `stand_op` its name. `operations`: the usual one of each column, where there
    are few columns.
    """

    name: str
    members: Ints
    codes: Codes
    first: int = 0
    bin_ns: int = 0
    first_ns: int = 0
    stop: int = -1
    stand: int = -1
    stand_op: str = ""
    operations: tuple[str, ...] = ()
    labels: Mapping[int, str] | None = None
    is_p2p: bool = False

    @property
    def is_time(self) -> bool:
        """Whether columns are times."""
        return self.bin_ns > 0

    @property
    def stand_text(self) -> str:
        """The column in which the group stands, and its operation: `#7: all_reduce`."""
        return f"{self.column_text(self.stand)}{f': {self.stand_op}' if self.stand_op else ''}"

    @cached_property
    def occurring(self) -> tuple[int, ...]:
        """The codes that occur, in order."""
        found = np.zeros(len(GLYPHS), np.int64)
        for start in range(0, len(self.codes), _BLOCK_ROWS):
            found += np.bincount(self.codes[start : start + _BLOCK_ROWS].ravel(), minlength=len(GLYPHS))
        return tuple(np.flatnonzero(found).tolist())

    def column_text(self, column: int) -> str:
        """Label of a column: `#7`, `3rd` of sends and receives, or seconds since the start."""
        if not self.is_time:
            return ordinal(self.first + column) if self.is_p2p else f"#{self.first + column}"
        digits = min(max(-math.floor(math.log10(self.bin_ns / 1e9)), 0), 6)
        return f"{round((self.first_ns + column * self.bin_ns) / 1e9, digits) + 0.0:+.{digits}f} s"


def in_order(run: Run, found: Sequence[Lane]) -> list[Lane]:
    """Lanes of one name one after the other, by their ranks; names as they come first."""
    names: dict[str, int] = {}
    for lane in found:
        names.setdefault(str(run.groups[lane.group]), len(names))
    return sorted(found, key=lambda lane: (names[str(run.groups[lane.group])], tuple(sorted(lane.members))))


def build_grid(run: Run, lane: Lane) -> Grid:
    """Build the heatmap over sequence numbers."""
    codes = _states(run, lane)
    _mark_late(run, lane, codes)
    _mark_different(lane, codes)
    return Grid(
        name=str(run.groups[lane.group]),
        members=np.array(lane.members, np.int64),
        codes=codes,
        first=lane.first_seq,
        operations=_usual_operations(run, lane),
        labels=coordinate_labels(run, lane.members),
    )


def _usual_operations(run: Run, lane: Lane) -> tuple[str, ...]:
    """What most ranks issued under each number; () where there are too many numbers to name each."""
    if lane.row.shape[1] > _MOST_NAMED:
        return ()
    return tuple(usual_operation(run, lane, column) for column in range(lane.row.shape[1]))


def usual_operation(run: Run, lane: Lane, column: int) -> str:
    """What most ranks issued in a column; "" where that is not known."""
    signature = lane.signature[:, column]
    places = np.flatnonzero((signature >= 0) & (signature == usual_signature(signature)) & (lane.row[:, column] >= 0))
    return run.operation(lane.members[places[0]], int(lane.row[places[0], column])).op if len(places) else ""


def mark_failed(grid: Grid, lane: Lane, failed: Mapping[int, int]) -> None:
    """Mark FAILED the operations at which ranks failed; `failed`: their rows, by rank."""
    for place in [place for place, rank in enumerate(lane.members) if rank in failed]:
        is_failed = lane.row[place, : grid.codes.shape[1]] == failed[lane.members[place]]
        grid.codes[place, is_failed] = np.maximum(grid.codes[place, is_failed], FAILED)


def build_p2p_grid(run: Run, lane: Lane, missing: Mapping[int, int], different: Mapping[int, int]) -> Grid:
    """Build the heatmap of sends and receives: column j is each rank's j-th. `missing` and `different`: columns by place."""
    codes = np.zeros(lane.row.shape, np.uint8)
    for i, rank in enumerate(lane.members):
        row = lane.row[i]
        codes[i, row >= 0] = _issued(run.ranks[rank].operations[row[row >= 0]])
    for code, columns in ((ABSENT, missing), (DIFFERS, different)):
        for place, column in columns.items():
            codes[place, column] = code
    is_used = bool(codes[:, -1].any())
    return Grid(
        name=f"{run.groups[lane.group]}", members=np.array(lane.members, np.int64), codes=codes if is_used else codes[:, :-1],
        first=lane.first_seq, labels=coordinate_labels(run, lane.members), is_p2p=True,
    )  # fmt: skip


def _issued(table: npt.NDArray[Any]) -> Codes:
    is_done = table["retired"] | (table["state"] == COMPLETED)
    codes: Codes = np.where(is_done, DONE, np.where(table["state"] == STARTED, RUNNING, PENDING)).astype(np.uint8)
    return codes


def _states(run: Run, lane: Lane) -> Codes:
    codes = np.zeros(lane.row.shape, np.uint8)
    columns = np.arange(lane.row.shape[1])
    is_known = lane.row.max(axis=0, initial=-1) >= 0  # operations that no rank recorded (issued in C++) are not absent
    for i, rank in enumerate(lane.members):
        row = lane.row[i]
        seen = row >= 0
        codes[i, seen] = _issued(run.ranks[rank].operations[row[seen]])
        first = int(columns[seen][0]) if seen.any() else 0
        missing = SILENT if lane.is_silent[i] else ABSENT
        codes[i, ~seen & is_known & (columns >= first)] = missing
        if lane.last[i] >= 0 and not lane.done[i]:
            codes[i, int(lane.last[i]) - lane.first_seq] = max(
                PENDING, int(codes[i, int(lane.last[i]) - lane.first_seq])
            )
    return codes


def _mark_late(run: Run, lane: Lane, codes: Codes) -> None:
    """Mark LATE what was issued over 50 ms after the median rank (of about a thousand evenly chosen ranks)."""
    ahead = clock_offsets(run, lane)
    for start in range(0, lane.row.shape[1], _BLOCK_COLUMNS):
        columns = slice(start, start + _BLOCK_COLUMNS)
        limit = _median_created_ns(run, lane, columns, ahead) + LATE_NS
        for i, rank in enumerate(lane.members):
            created = created_ns(run, rank, lane.row[i, columns])
            block = codes[i, columns]
            block[(block == DONE) & (created - ahead[i] > limit)] = LATE


def newest_late(run: Run, lane: Lane, ranks: Sequence[int], ahead: Floats) -> int | None:
    """The newest number at which one of `ranks` was late for what all ranks issued; None if there is none.

    `ahead`: how far the clock of each member is ahead, in ns.
    """
    columns = np.flatnonzero((lane.row[~lane.is_silent] >= 0).all(axis=0))
    limit = _median_created_ns(run, lane, slice(None), ahead)[columns] + LATE_NS
    found = [
        columns[created_ns(run, lane.members[i], lane.row[i, columns]) - ahead[i] > limit]
        for i in map(lane.members.index, set(ranks) & set(lane.members))
    ]
    return max((lane.first_seq + int(late[-1]) for late in found if len(late)), default=None)


def _median_created_ns(run: Run, lane: Lane, columns: slice, ahead: Floats) -> Floats:
    """When the median rank issued each operation of `columns`; infinite where fewer than two ranks say when."""
    some = range(0, len(lane.members), -(-len(lane.members) // _MEDIAN_OF))
    created = np.stack([created_ns(run, lane.members[i], lane.row[i, columns]) for i in some])
    enough = (created > 0).sum(axis=0) > 1
    median = np.full(created.shape[1], np.inf)
    if enough.any():
        known = np.where(created > 0, created - ahead[list(some), None], np.nan)
        median[enough] = np.nanmedian(known[:, enough], axis=0)
    return median


def _mark_different(lane: Lane, codes: Codes) -> None:
    """Mark DIFFERS an operation, size or dtype other than that of most ranks under the same number."""
    highest = np.iinfo(lane.signature.dtype).max
    largest = lane.signature.max(axis=0)  # -1 where nothing was issued
    smallest = np.full(lane.signature.shape[1], highest, lane.signature.dtype)
    for start in range(0, len(lane.members), _BLOCK_ROWS):
        block = lane.signature[start : start + _BLOCK_ROWS]
        np.minimum(smallest, np.where(block >= 0, block, highest).min(axis=0), out=smallest)
    for column in np.flatnonzero((largest != smallest) & (largest >= 0)).tolist():
        signature = lane.signature[:, column]
        codes[(signature >= 0) & (signature != usual_signature(signature)), column] = DIFFERS


def usual_signature(column: Ints) -> int:
    """The most common signature of a column; -1 if no rank issued anything."""
    values, counts = np.unique(column[column >= 0], return_counts=True)
    return int(values[counts.argmax()]) if len(values) else -1


def created_ns(run: Run, rank: int, row: npt.NDArray[np.signedinteger[Any]]) -> Ints:
    """When the operations in `row` were issued; 0 where that is not known."""
    table = run.ranks[rank].operations
    if not len(table):
        return np.zeros(row.shape, np.int64)
    return np.where(row >= 0, table["created_ns"][row], 0).astype(np.int64)


def coordinate_labels(run: Run, members: Sequence[int]) -> dict[int, str]:
    """`pp0 tp1` by rank, from recorded coordinates, for the axes on which the ranks differ."""
    some = [record.coordinates for record in run.ranks.values()]
    axes = [axis for axis in (some[0] if some else ()) if len({place.get(axis) for place in some}) > 1]
    return {
        rank: " ".join(f"{axis}{run.ranks[rank].coordinates.get(axis, '?')}" for axis in axes)
        for rank in members
        if axes and run.ranks[rank].coordinates
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the rows: `places` are indices into the members, `keys` their coordinates on the axis `name`."""

    name: str
    places: Ints
    keys: Ints

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> Order:
        """The same order with the wanted members only."""
        left = is_wanted[self.places]
        return Order(name=self.name, places=self.places[left], keys=self.keys[left])


def sort_orders(run: Run, members: Sequence[int]) -> list[Order]:
    """Orders of the rows: by rank, and by each mesh axis."""
    places = [run.ranks[rank].coordinates for rank in members]
    axes = list(places[0]) if places else []
    orders = [Order(name="rank", places=np.arange(len(members)), keys=np.zeros(len(members), np.int64))]
    for axis in axes:
        keys = np.array([place.get(axis, 0) for place in places], np.int64)
        if len(set(keys.tolist())) > 1:
            sorted_ = np.argsort(keys, kind="stable").astype(np.int64)
            orders.append(Order(name=axis, places=sorted_, keys=keys[sorted_]))
    return orders


def row_starts(keys: Ints, per_row: int) -> Ints:
    """Start index of each row of up to `per_row` ranks; each key begins a new row.

    >>> row_starts(np.array([0, 0, 0, 1, 1]), 2)
    array([0, 2, 3])
    """
    begins = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    ends = np.append(begins[1:], len(keys))
    return np.concatenate([np.arange(a, b, per_row) for a, b in zip(begins, ends, strict=True)] or [begins])


def per_row_to_fit(keys: Ints, num_rows: int) -> int:
    """Smallest power of two of ranks per row with which all rows fit on the screen."""
    per_row, most = 1, max(len(keys), 1)
    while per_row < most and len(row_starts(keys, per_row)) > num_rows:
        per_row *= 2
    return per_row


def reduce_row(codes: Codes, rows: Ints, first: int, num_cells: int, per_cell: int) -> Codes:
    """Highest code under each of `num_cells` cells, `per_cell` columns wide, over `rows`."""
    stop = min(first + num_cells * per_cell, codes.shape[1])
    if stop <= first or not len(rows):
        return np.zeros(num_cells, np.uint8)
    is_run = len(rows) == 1 or int(rows[-1]) - int(rows[0]) == len(rows) - 1
    block = codes[int(rows[0]) : int(rows[-1]) + 1, first:stop] if is_run else codes[rows, first:stop]
    worst = block.max(axis=0)
    padded = np.zeros(num_cells * per_cell, np.uint8)
    padded[: len(worst)] = worst
    return np.asarray(padded.reshape(num_cells, per_cell).max(axis=1), dtype=np.uint8)


def next_stop(codes: Codes, order: Ints, starts: Ints, spot: tuple[int, int], direction: int) -> tuple[int, int] | None:
    """The next (row, column) to inspect: the worst rows of a problem column, then the next problem column.

    Rows are the slices of `order` that begin at `starts`. A column in which all rows are equal has one stop.
    """
    row, column = spot
    shown = codes if len(order) == len(codes) else codes[order]
    columns = problem_columns(shown)
    if column in columns:
        rows = _stops_in(np.maximum.reduceat(codes[order, column], starts))
        left = rows[rows > row] if direction > 0 else rows[rows < row][::-1]
        if len(left):
            return int(left[0]), column
    further = columns[columns > column] if direction > 0 else columns[columns < column][::-1]
    if not len(further):
        return None
    rows = _stops_in(np.maximum.reduceat(codes[order, int(further[0])], starts))
    return int(rows[0 if direction > 0 else -1]), int(further[0])


def _stops_in(column: Codes) -> Ints:
    places = np.flatnonzero(column == column.max())
    return places[:1] if len(places) == len(column) else places


def problem_columns(codes: Codes) -> Ints:
    """Columns where a state worse than DONE begins: the stops of `n` and `N`."""
    worst = codes.max(axis=0) if codes.size else np.zeros(codes.shape[1], np.uint8)
    is_bad = (worst >= LATE) & (worst != SILENT)
    begins = is_bad & (worst != np.concatenate([np.zeros(1, np.uint8), worst[:-1]]))
    return np.flatnonzero(begins).astype(np.int64)
