"""Ranks over time as rows of bars: done, waiting, and the moment from which everybody waits. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.console.units import format_duration
from titan_ckpt.debug.incident.kinds import EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.waits import pending
from titan_ckpt.debug.report.facts import LAST_WAITS
from titan_ckpt.tui.data.grid import BLANK, DONE, FAILED, GLYPHS, PENDING, RUNNING, SILENT, Codes
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.timeline import (
    BARS,
    DEAD,
    FROZEN,
    IN_CODE,
    LEAVING,
    StepTimes,
    Window,
    last_window,
    rank_codes,
    step_times,
    with_waits,
)
from titan_ckpt.tui.pictures.ticks import time_text, time_ticks
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, TextSpan, counted, fitted, row, truncate

_FEW_RANKS = 24
_ERRORS = (EventKind.EXCEPTION, EventKind.OOM)
_MOST_ALIGNED = 1024  # ranks whose clocks are compared
_STOP, _OLDER, _NEWER = "╎", "‹", "›"
_HALTED: Mapping[RankState, int] = {RankState.FROZEN: FROZEN, RankState.DEAD: DEAD}
_BUSY: Mapping[RankState, int] = {
    RankState.ON_CPU: IN_CODE,
    RankState.GIL_HELD: IN_CODE,
    RankState.IN_TEARDOWN: LEAVING,
}


def parties(incident: Incident, most: int) -> list[tuple[int, ...]]:
    """Ranks to draw: each by itself while they are few, else those of one state and line together; culprits first."""
    culprits = incident.top.culprits
    if len(incident.states) <= min(most, _FEW_RANKS):
        return [(rank,) for rank in sorted(incident.states)]
    alike: dict[object, list[int]] = {}
    for rank, state in incident.states.items():
        is_culprit = rank in culprits
        place = (state.frame.file, state.frame.line) if state.frame is not None else None
        alike.setdefault((not is_culprit, state.kind, place), []).append(rank)
    found = sorted(alike.items(), key=lambda item: (item[0][0], -len(item[1])))  # type: ignore[index]
    return [tuple(ranks) for _, ranks in found[:most]]


def bars_rows(incident: Incident, width: int, height: int) -> Iterator[Row]:
    """A row per rank, or per party of ranks in one state, with an axis above."""
    run, shown = incident.run, parties(incident, max(height - 5, 1))
    firsts = [ranks[0] for ranks in shown]
    ahead = incident.clocks_ahead if len(incident.states) <= _MOST_ALIGNED else {}
    window = last_window(run, firsts, incident.last_sign_ns, ahead)
    if window is None:
        yield row(("no operation has a time", Role.DIM))
        return
    labels = [_label(incident, ranks) for ranks in shown]
    before = min(max(map(len, labels)), width // 3) + 1
    cells = max(width - before, 8)
    is_calm = incident.is_slow or incident.top.verdict in (VerdictKind.HEALTHY, VerdictKind.RUNNING)
    is_standing = bool(incident.stop_s) and not is_calm
    stop = window.cell(_stop_ns(incident, firsts, ahead), cells) if is_standing else -1
    seen: set[int] = set()
    older = _OLDER if _has_older(incident, firsts, window, ahead) else ""
    newer = _NEWER if is_standing and incident.last_sign_ns > window.end else ""
    yield row((f"{older:>{before}}{axis(window, cells, cells - len(newer)):<{cells - len(newer)}}{newer}", Role.DIM))
    if 0 <= stop < cells:
        stood_s = _stood_until_s(incident) - incident.stop_s
        has_failed = any(_failed_ns(incident, rank) < window.end for rank in firsts if rank in incident.failed)
        bare = "nobody goes on from here" if has_failed else LAST_WAITS
        whole = f"{bare}, for {format_duration(stood_s)}" if stood_s >= 1 else bare
        text = whole if len(whole) + 2 <= max(stop, cells - stop) else bare
        text = f"{text} ▼" if stop > len(text) + 1 else f"▼ {text}"
        start = before + (stop - len(text) + 1 if text.endswith("▼") else stop)
        yield row((f"{'':<{start}}{truncate(text, width - start)}", Role.WARN))
    for ranks, label in zip(shown, labels, strict=True):
        is_culprit = ranks[0] in incident.top.culprits
        codes = _codes(incident, ranks[0], window, cells, ahead, stop)
        seen |= set(codes)
        name, link = (
            (fitted(label, before - 1), Role.BAD if is_culprit else Role.PLAIN),
            RowLink(screen=2, rank=ranks[0]),
        )
        yield row(name, " ", *_bar(incident, ranks[0], codes, stop), link=link, is_problem=is_culprit)
    yield row()
    yield row(*(span for code in sorted({DONE, *seen} - {BLANK}, reverse=True) for span in
                ((f"{BARS[code].char} ", BARS[code].role), f"{BARS[code].label}  ")))  # fmt: skip


def _has_older(incident: Incident, ranks: Sequence[int], window: Window, ahead: Mapping[int, int]) -> bool:
    """Whether a rank issued anything before the window."""
    begun = ((rank, incident.run.ranks[rank].operations["created_ns"]) for rank in ranks)
    return any(
        0 < int(times[times > 0].min(initial=window.end)) - ahead.get(rank, 0) < window.start for rank, times in begun
    )


def _stood_until_s(incident: Incident) -> float:
    """When the first rank that waits ended its wait with an error of the communication, else the last sign of life."""
    records = (incident.run.ranks[edge.waiter] for edge in incident.edges)
    errors = (event.time_s for record in records for event in record.events if event.kind.is_communication)
    return min((time for time in errors if time and time > incident.stop_s), default=incident.last_sign_ns / 1e9)


def _bar(incident: Incident, rank: int, codes: Sequence[int], stop: int) -> Iterator[TextSpan]:
    """The bar of a rank; one of which no operation is known was not idle."""
    word = "" if incident.run.ranks[rank].operations["created_ns"].any() else f"{GLYPHS[SILENT].label} "
    yield word, Role.DIM
    yield from bar_spans(codes[len(word) :], stop - len(word))


def _codes(incident: Incident, rank: int, window: Window, cells: int, ahead: Mapping[int, int], stop: int) -> list[int]:
    """What a rank did at each moment. Where it waits in an operation that its recorder does not see, it does so from its last one
    on."""
    table = incident.run.ranks[rank].operations
    codes = rank_codes(
        table, window, cells, ahead.get(rank, 0), incident.failed.get(rank, -1), is_over=incident.is_over
    )
    at = incident.failed.get(rank, -1)
    if at >= 0:
        codes = _waited_before(
            codes, int(table["created_ns"][at]), _failed_ns(incident, rank), window, ahead.get(rank, 0)
        )
    state = incident.states.get(rank)
    after = PENDING if _waits_unseen(incident, rank) else _BUSY.get(state.kind, 0) if state is not None else 0
    if stop >= 0 and after:
        codes[int(np.flatnonzero(codes).max(initial=-1)) + 1 :] = after
    for lane in incident.lanes if incident.is_slow else ():
        if rank in lane.members and not incident.is_p2p(lane):
            last_ns = incident.last_issued_ns[lane.group]
            codes = with_waits(codes, incident.run, lane, lane.members.index(rank), ahead.get(rank, 0), last_ns, window)
    return _after_its_end(incident, rank, codes.tolist(), window, ahead.get(rank, 0))


def _failed_ns(incident: Incident, rank: int) -> int:
    """When a rank logged its first error of the communication; 0 if no such line has a time."""
    errors = (event for event in incident.run.ranks[rank].events if event.kind.is_communication)
    return int(min((event.time_s for event in errors if event.time_s), default=0) * 1e9)


def _waited_before(codes: Codes, created_ns: int, failed_ns: int, window: Window, ahead: int) -> Codes:
    """The codes of a rank that waited in the operation at which it failed, up to its error."""
    first, last = (window.cell(time_ns - ahead, len(codes)) for time_ns in (created_ns, failed_ns))
    if not 0 <= first < last:
        return codes
    codes = codes.copy()
    codes[first:last] = np.where(codes[first:last] == DONE, DONE, PENDING)
    codes[last : last + 1] = FAILED
    return codes


def _after_its_end(incident: Incident, rank: int, codes: list[int], window: Window, ahead: int) -> list[int]:
    """The codes of a rank, frozen or dead from its last sign of life on; in place of its last wait if no sign has a time."""
    state, record = incident.states.get(rank), incident.run.ranks[rank]
    code = _HALTED.get(state.kind) if state is not None else None
    if code is None or incident.is_over:
        return codes
    table = record.operations
    newest = (int(table["created_ns"].max()), int(table["completed_ns"].max())) if len(table) else (0,)
    raised = (event.time_s for event in record.events if event.kind in _ERRORS and code == DEAD)
    raised_ns = min((int(time_s * 1e9) for time_s in raised if time_s and time_s * 1e9 >= max(newest)), default=0)
    signs = (
        (raised_ns,)
        if raised_ns
        else (
            *newest,
            record.heartbeat.alive_ns if record.heartbeat is not None else 0,
            int((record.exit.time_s or 0) * 1e9) if record.exit is not None and code == DEAD else 0,
            int((record.log.last_time_s or 0) * 1e9) if record.log is not None else 0,
        )
    )
    last_ns = max(signs)
    first = min(window.cell(last_ns - ahead, len(codes)), len(codes) - 1) if last_ns else 0
    halts = (PENDING, RUNNING, BLANK) if last_ns else (PENDING, RUNNING)
    return [code if i >= first and each in halts else each for i, each in enumerate(codes)]


def _waits_unseen(incident: Incident, rank: int) -> bool:
    """Whether a rank waits in an operation that its recorder does not see, as gloo's does not see sends and receives."""
    state, is_known = incident.states.get(rank), rank in incident.wait_of or rank in incident.failed
    return (
        state is not None and state.kind.is_waiting and not is_known and bool(len(incident.run.ranks[rank].operations))
    )


def _stop_ns(incident: Incident, ranks: Sequence[int], ahead: Mapping[int, int]) -> int:
    """When the last of the shown ranks that wait began to, else when the job stopped."""
    times = [since - ahead.get(rank, 0) for rank in ranks if (since := _waits_since_ns(incident, rank))]
    return max(times, default=int(incident.stop_s * 1e9))


def _waits_since_ns(incident: Incident, rank: int) -> int:
    """When a rank issued what it waits in or failed at, by its own clock; after its last one where that is not seen; else 0."""
    table = incident.run.ranks[rank].operations
    open_rows = np.flatnonzero(pending(table))
    at = incident.failed.get(rank, int(open_rows[0]) if len(open_rows) else -1)
    if at >= 0:
        return int(table["created_ns"][at])
    if not _waits_unseen(incident, rank):
        return 0
    return max(int(table["created_ns"].max()), int(table["completed_ns"].max()))


def _label(incident: Incident, ranks: tuple[int, ...]) -> str:
    mark = CULPRIT if ranks[0] in incident.top.culprits else " "
    return f"{mark}{ranks[0]}" if len(ranks) == 1 else f"{mark}{ranks_text(ranks, 3)}"


def bar_spans(codes: Sequence[int], stop: int = -1, spot: int | None = None) -> Iterator[TextSpan]:
    """Bars as spans; `stop` is the cell of a vertical line, which shows where nothing is drawn, `spot` the selected one."""
    marked = ((code, i == stop, i == spot) for i, code in enumerate(codes))
    for (code, is_stop, is_spot), same in itertools.groupby(marked):
        glyph, text = BARS[code], BARS[code].char * len(list(same))
        if is_stop and code == 0:
            text, glyph = _STOP, BARS[PENDING]
        yield text, glyph.role.chosen if is_spot else glyph.role


def axis(window: Window, cells: int, room: int = 0) -> str:
    """Times since the start of the window, each above its cell; `room`: how many cells are free for them, if not all."""
    text = "0"
    for time_s in time_ticks(window.length / 1e9, max(min(cells // 12, 8), 2))[1:]:
        name = f"+{time_text(time_s)}"
        start = round(time_s * 1e9 * cells / window.length)
        if len(text) + 1 < start <= (room or cells) - len(name):
            text = f"{text:<{start}}{name}"
    return text


def step_rows(incident: Incident, width: int) -> Iterator[Row]:
    """The usual step beside the last one."""
    found = step_times(incident.run, incident.last_sign_ns)
    if found is not None:
        yield from _step_bars(replace(found, last_s=0.0) if incident.is_over else found, width)


def _step_bars(found: StepTimes, width: int) -> Iterator[Row]:
    names = (f"median of {counted(found.num, 'step')}", "since the last step was logged")
    before = max(map(len, names)) + 2
    longest = max(found.median_s, found.last_s, 1e-9)
    for name, seconds in zip(names, (found.median_s, found.last_s), strict=True):
        if not seconds:
            continue  # nothing is known after the last step
        text = f" {format_duration(seconds)}"
        room = max(width - before - len(text) - 1, 4)
        is_long = seconds > 3 * found.median_s
        bar = "━" * max(round(seconds / longest * room), 1)
        yield row((f"{name:<{before}}", Role.DIM), (bar, Role.WARN if is_long else Role.GOOD), text)
