"""Operations over wall time: of each rank the state at each moment, from when an operation was issued to its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.incident.contradictions import MEETINGS
from titan_ckpt.debug.incident.records import COMPLETED, Array, Run
from titan_ckpt.debug.incident.waits import began_ns
from titan_ckpt.tui.data.arrays import Floats, Ints
from titan_ckpt.tui.data.grid import (
    ABSENT,
    BLANK,
    DIFFERS,
    DONE,
    ENDED,
    FAILED,
    GLYPHS,
    LATE,
    PENDING,
    RUNNING,
    SILENT,
    Codes,
    Grid,
    created_ns,
)
from titan_ckpt.tui.rows import Glyph, Role

LAST_OPERATIONS = 24
_PART_OF_WINDOW = 20  # the window begins with the earliest rank if that adds no more than 1 / 20 to it
FROZEN, DEAD, IN_CODE, LEAVING = 100, 101, 102, 103  # beside the codes of a grid
# Code -> how its bar looks. What was issued and has not ended reaches to the right edge.
BARS: Mapping[int, Glyph] = {
    BLANK: Glyph(char=" ", role=Role.DIM, label="in no operation"),
    DONE: Glyph(char="━", role=Role.GOOD, label="done"),
    ENDED: Glyph(char="╌", role=Role.DIM, label=GLYPHS[ENDED].label),
    LATE: Glyph(char="═", role=Role.NOTE, label="late"),
    SILENT: Glyph(char="?", role=Role.WARN, label="unknown"),
    PENDING: Glyph(char="░", role=Role.WARN, label="waits"),
    RUNNING: Glyph(char="░", role=Role.WARN, label="waits, started"),
    FAILED: Glyph(char="%", role=Role.WARN, label="failed"),
    ABSENT: Glyph(char="x", role=Role.BAD, label="absent"),
    DIFFERS: Glyph(char="#", role=Role.BAD, label="differs"),
    FROZEN: Glyph(char="z", role=Role.BAD, label="frozen"),
    DEAD: Glyph(char="x", role=Role.BAD, label="dead"),
    IN_CODE: Glyph(char="c", role=Role.WARN, label="in host code"),
    LEAVING: Glyph(char="t", role=Role.WARN, label="shuts down"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time, in ns."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return max(self.end - self.start, 1)

    def cell(self, time_ns: int, cells: int) -> int:
        """The cell of `cells` that a time falls into; it may be outside."""
        return int((time_ns - self.start) * cells // self.length)

    def zoomed(self, factor: float, centre: int) -> Window:
        """`factor` times as long, with `centre` where it was."""
        length = max(int(self.length * factor), 1000)
        share = min(max((centre - self.start) / self.length, 0.0), 1.0)
        start = centre - int(length * share)
        return Window(start=start, end=start + length)

    def moved(self, share: float) -> Window:
        """Moved by a share of its length."""
        by = int(self.length * share)
        return Window(start=self.start + by, end=self.end + by)

    def within(self, whole: Window) -> Window:
        """Moved, and shortened if need be, so that nothing of it is outside."""
        length = min(self.length, whole.length)
        start = min(max(self.start, whole.start), whole.end - length)
        return Window(start=start, end=start + length)


def last_window(run: Run, ranks: Iterable[int], last_sign_ns: int, ahead: Mapping[int, int]) -> Window | None:
    """From the 24th operation before the end to a third after the last one that was issued; None if no times are known.

    `last_sign_ns`: the job's last recorded sign of life. `ahead`: how far clocks are ahead, in ns, by rank.
    """
    known = ((rank, run.ranks[rank].operations["created_ns"]) for rank in ranks)
    issued = [np.sort(times[times > 0]) - ahead.get(rank, 0) for rank, times in known]
    issued = [times for times in issued if len(times)]
    if not issued:
        return None
    firsts = [int(times[-LAST_OPERATIONS:][0]) for times in issued]
    last = max(int(times[-1]) for times in issued)
    start, earliest = int(np.median(firsts)), min(firsts)
    if start - earliest <= (last - earliest) // _PART_OF_WINDOW:
        start = earliest
    room = max((last - start) // 3, 1_000_000)
    return Window(start=min(start, last), end=max(min(last_sign_ns, last + room), last + room // 4))


def whole_window(run: Run, lane: Lane, ahead: Floats) -> Window | None:
    """All recorded operations of a lane's ranks, and the wait after them. `ahead`: how far the clock of each is ahead, in ns."""
    first, last = 0, 0
    for rank, by in zip(lane.members, ahead.astype(np.int64).tolist(), strict=True):
        times = run.ranks[rank].operations["created_ns"]
        times = times[times > 0] - by
        if len(times):
            first = min(first or int(times[0]), int(times.min()))
            last = max(last, int(times.max()))
    if not last:
        return None
    room = max((last - first) // 8, 1_000_000)
    return Window(start=first, end=last + room)


def time_codes(created: Ints, completed: Ints, codes: Codes, window: Window, cells: int) -> Codes:
    """The worst code at each moment: an operation reaches from its creation to its end, one without an end to the next."""
    found = np.zeros(cells, np.uint8)
    is_known = created > 0
    if not is_known.any():
        return found
    begin, code = created[is_known], codes[is_known]
    end = np.maximum(completed[is_known], begin)
    end = np.where((code == PENDING) | (code == RUNNING), np.iinfo(np.int64).max, end)
    scale = cells / window.length
    first = np.floor((begin - window.start) * scale)
    last = np.floor((np.minimum(end, window.end) - window.start) * scale)
    is_seen = (last >= 0) & (first < cells) & (end >= window.start)
    first = np.clip(first[is_seen], 0, cells - 1).astype(np.int64)
    last = np.clip(last[is_seen], 0, cells - 1).astype(np.int64)
    for value in np.unique(code[is_seen]).tolist():
        if value == BLANK:
            continue
        of_value = code[is_seen] == value
        change = np.zeros(cells + 1, np.int64)
        np.add.at(change, first[of_value], 1)
        np.add.at(change, last[of_value] + 1, -1)
        found[np.cumsum(change[:-1]) > 0] = value
    return found


def last_issued_ns(run: Run, lane: Lane, ahead: Floats) -> Ints:
    """When the last member issued each operation of a lane; 0 where one has not, or its time is not known."""
    last = np.full(lane.row.shape[1], np.iinfo(np.int64).min)
    for rank, row, by in zip(lane.members, lane.row, ahead.astype(np.int64).tolist(), strict=True):
        created = created_ns(run, rank, row)
        last = np.where((last == 0) | (created == 0), 0, np.maximum(last, created - by))
    return last


def with_waits(codes: Codes, run: Run, lane: Lane, place: int, ahead: int, last_ns: Ints, window: Window) -> Codes:
    """The codes of a member of a lane over time, PENDING where it waited in an operation that no rank leaves before all have
    issued it: until the last one did (`last_ns`), or itself the next. `ahead`: how far its clock is ahead, in ns.

    Also where its recorder does not know when the operation ended; of one that is done, only what it waited most of."""
    rank, row = lane.members[place], lane.row[place]
    table, created = run.ranks[rank].operations, created_ns(run, rank, row)
    if not len(table):
        return codes
    met = [code for code, name in enumerate(run.names.ops) if name in MEETINGS]
    issued = np.append(np.sort(table["created_ns"]), np.iinfo(np.int64).max)
    until = np.minimum(last_ns, issued[np.searchsorted(issued, created, side="right")] - ahead)
    created, completed = _moved(created, ahead), _moved(_completed_ns(run, rank, row), ahead)
    until = np.where(completed > 0, np.minimum(until, completed), until)
    is_held = (row >= 0) & np.isin(table["op"][row], met) & (created > 0) & (until > created)
    is_open = is_held & (completed == 0)
    is_done = np.full(int(is_open.sum()), DONE, np.uint8)
    is_waiting = time_codes(created[is_open], until[is_open], is_done, window, len(codes)) == DONE
    is_mostly = _shares(created[is_held], until[is_held], window, len(codes)) > 0.5
    is_free = ((codes == BLANK) & (is_waiting | is_mostly)) | ((codes == DONE) & is_mostly)
    return np.where(is_free, PENDING, codes).astype(np.uint8)


def _shares(begin: Ints, end: Ints, window: Window, cells: int) -> Floats:
    """The share of each cell that stretches of time take, which do not overlap."""
    if not len(begin):
        return np.zeros(cells)
    order = np.argsort(begin)
    begin, end = begin[order] - window.start, end[order] - window.start
    total = np.cumsum(end - begin)
    times, sums = np.stack([begin, end], axis=1).ravel(), np.stack([total - (end - begin), total], axis=1).ravel()
    length = window.length / cells
    found: Floats = np.diff(np.interp(np.arange(cells + 1) * length, times, sums)) / length
    return found


def build_time_grid(
    run: Run, lane: Lane, sequence: Grid, window: Window | None, cells: int, ahead: Floats, last_ns: Ints | None = None
) -> Grid | None:
    """The heatmap `sequence` over wall time, in `cells` columns; without a window, all of it. None without recorded times.

    What is pending, or absent at a rank while others wait for it, reaches to the right edge. `ahead`: how far the clock of each
    rank is ahead, in ns; without it the hosts' clocks would look like ranks that are late. `last_ns`: of a slow job, for
    `with_waits`.
    """
    whole = whole_window(run, lane, ahead)
    if whole is None:
        return None
    shown = window or whole
    codes = np.zeros((len(lane.members), cells), np.uint8)
    began = 0
    for i, (rank, by) in enumerate(zip(lane.members, ahead.astype(np.int64).tolist(), strict=True)):
        operations = lane.row[i, : sequence.codes.shape[1]]  # the grid may have a column less or more
        created, states = _moved(created_ns(run, rank, operations), by), sequence.codes[i, : lane.row.shape[1]]
        codes[i] = time_codes(created, _moved(_completed_ns(run, rank, operations), by), states, shown, cells)
        if last_ns is not None:
            codes[i] = with_waits(codes[i], run, lane, i, by, last_ns, shown)
        began = max(began, int(created[(states == PENDING) | (states == RUNNING)].max(initial=0)))
        if len(states) and int(states.max()) == ABSENT:
            last = shown.cell(int(created.max()), cells)
            codes[i, min(max(last + 1, 0), cells) :] = ABSENT
    began = began or (0 if ENDED in sequence.occurring else began_ns(run))
    stop = shown.cell(began, cells) if began else -1
    return Grid(
        name=sequence.name, members=sequence.members, codes=codes, bin_ns=max(shown.length // cells, 1),
        first_ns=shown.start - whole.start, stop=stop, labels=sequence.labels,
    )  # fmt: skip


def _moved(times: Ints, by: int) -> Ints:
    """`times` by a clock that is `by` ns ahead; 0 stays unknown."""
    return np.where(times > 0, times - by, 0)


def _completed_ns(run: Run, rank: int, row: Array) -> Ints:
    table = run.ranks[rank].operations
    if not len(table):
        return np.zeros(row.shape, np.int64)
    return np.where(row >= 0, table["completed_ns"][row], 0).astype(np.int64)


def rank_codes(
    table: Array, window: Window, cells: int, ahead: int = 0, failed: int = -1, *, is_over: bool = False
) -> Codes:
    """A rank's operations of all groups over time: done, or waiting. `ahead`: how far its clock is ahead, in ns; `failed`: the
    row of the one at which it failed, -1 for none; `is_over`: all have ended since."""
    is_done = table["retired"] | (table["state"] == COMPLETED)
    codes = np.where(is_done, DONE, ENDED if is_over else PENDING).astype(np.uint8)
    codes[[failed] if failed >= 0 else []] = FAILED
    created = _moved(table["created_ns"].astype(np.int64), ahead)
    completed = _moved(np.where(is_done, table["completed_ns"], 0).astype(np.int64), ahead)
    return time_codes(created, completed, codes, window, cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a usual step, and since the last one began; `num` steps were timed."""

    median_s: float
    last_s: float
    step: int
    num: int


def step_times(run: Run, last_sign_ns: int) -> StepTimes | None:
    """From the steps that a log names with their times; None if there are too few.

    The last step is timed up to the job's last sign of life, which may be a line of a log: a dump has no time.
    """
    logs = [record.log for record in run.ranks.values() if record.log is not None]
    log = max(logs, key=lambda log: len(log.step_times), default=None)
    if log is None or len(log.step_times) < 3:
        return None
    times = [time for _, time in sorted(log.step_times.items())]
    gaps = np.diff(times)
    step = max(log.step_times)
    end = max([last_sign_ns / 1e9, *(log.last_time_s for log in logs if log.last_time_s is not None)])
    return StepTimes(median_s=float(np.median(gaps)), last_s=max(end - times[-1], 0.0), step=step, num=len(gaps))
