"""What is known of one rank, one operation or one line: the rows of a `details` pane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from titan_ckpt.console.units import format_duration
from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.mismatches.splits import splits_text
from titan_ckpt.debug.incident.frames import is_library, user_frame
from titan_ckpt.debug.incident.records import SEND, Frame, Operation, RankRecord
from titan_ckpt.tui.data.grid import DONE, ENDED_TEXT, GLYPHS
from titan_ckpt.tui.data.incident import HALTED, SITUATIONS, Incident
from titan_ckpt.tui.data.logs.index import LogIndex
from titan_ckpt.tui.data.standing import exit_text, fault_elsewhere, kind_text, process_text
from titan_ckpt.tui.pictures.stacks import stack_of
from titan_ckpt.tui.rows import (
    CULPRIT,
    Role,
    Row,
    RowLink,
    TextSpan,
    head,
    place_text,
    ranks_named,
    row,
    truncate,
    wrapped,
)

_NAME = 11
_MOST_FRAMES = 40
_AROUND = 3


def fact(
    name: str,
    text: str,
    width: int,
    role: Role = Role.PLAIN,
    link: RowLink | None = None,
    at: tuple[str, int] | None = None,
) -> Iterator[Row]:
    """A name and its text, wrapped beside it."""
    for i, line in enumerate(wrapped(text, max(width - _NAME, 12)) if text else ()):
        yield row((f"{name if i == 0 else '':<{_NAME}}", Role.DIM), (line, role), link=link, at=at)


def rank_rows(incident: Incident, rank: int, width: int) -> Iterator[Row]:
    """The rank's process, state, place and stack."""
    record, state = incident.run.ranks.get(rank), incident.states.get(rank)
    if record is None or state is None:
        yield row((f"nothing was collected of rank {rank}", Role.DIM))
        return
    glyph, link = SITUATIONS[state.kind], RowLink(screen=6, rank=rank)
    is_culprit = rank in incident.top.culprits
    title: list[TextSpan] = [(f"rank {rank}", Role.BOLD)]
    title += [(f" {CULPRIT} culprit", Role.BAD)] if is_culprit else []
    where = " ".join(f"{axis}{place}" for axis, place in record.coordinates.items())
    yield row(*title, link=link)
    yield from fact("mesh", where, width)
    yield from fact("process", process_text(incident, rank), width)
    if is_culprit and (found := fault_elsewhere(incident, rank)) is not None:
        place = place_text(f"{found[0]}:{found[1]}", max(width - _NAME, 12))
        yield from fact("fault at", place, width, Role.BAD, at=found)
    detail = f" ({kind_text(state.detail)})" if state.detail else ""
    yield from fact("state", f"{glyph.char} {incident.doing(rank)}{detail}", width, glyph.role, link)
    yield from fact("step", _step_text(record), width)
    yield from fact("exit", exit_text(record.exit) if record.exit is not None else "", width)
    yield from fact(*_newest(incident, record), width, link=RowLink(screen=2, rank=rank))
    yield from _wait_rows(incident, rank, width)
    if state.frame is not None:
        yield from fact("line", _line_text(state.frame, width), width, link=link, at=_at(state.frame))
    yield from _stack_rows(incident, rank, width)


def _line_text(frame: Frame, width: int) -> str:
    """`/srv/job/train.py:12 in step`, without the folders where the place does not fit on a line."""
    return f"{place_text(frame.place, max(width - _NAME, 12))} in {frame.function}"


def _newest(incident: Incident, record: RankRecord) -> tuple[str, str]:
    """What a rank waits in, else its last operation, or the one that was open when the recording of a job ended that went on."""
    wait = incident.wait_of.get(record.rank)
    at = int(record.operations["created_ns"].argmax()) if len(record.operations) else -1
    op = wait.operation if wait is not None else incident.run.operation(record.rank, at) if at >= 0 else None
    if op is None:
        return "last op", ""
    number = f" #{op.seq}" if op.seq >= 0 else ""
    text = f"{op.op}{number} of group {op.group}"
    if wait is not None and not incident.is_over and incident.states[record.rank].kind in HALTED:
        return "stopped in", text
    if wait is not None and not incident.is_over:
        past = "failed in" if record.rank in incident.failed else "waited in"
        return past if incident.is_past((record.rank,)) else "waits in", text
    return "last op", f"{text}, {ENDED_TEXT if wait is not None else incident.word_of(record.rank, at)}"


def _step_text(record: RankRecord) -> str:
    beat = record.heartbeat
    if beat is None or beat.step < 0:
        return f"{record.log.last_step} logged last" if record.log and record.log.last_step is not None else ""
    return f"{beat.step}{f', in {beat.phase}' if beat.phase else ''}"


def _wait_rows(incident: Incident, rank: int, width: int) -> Iterator[Row]:
    awaited = sorted({edge.awaited for edge in incident.edges if edge.waiter == rank})
    waiting = sorted({edge.waiter for edge in incident.edges if edge.awaited == rank})
    if awaited:
        name = "waited for" if incident.is_past((rank,)) else "waits for"
        yield from fact(name, ranks_named(awaited, 4), width, Role.PLAIN, RowLink(screen=6, rank=awaited[0]))
    if waiting:
        name = "awaited by" if incident.is_running else "held up" if incident.is_past(waiting) else "holds up"
        role: Role = Role.PLAIN if incident.is_slow or incident.is_running else Role.WARN
        through = sorted(incident.held_up_by(waiting) - {rank, *waiting})
        more = f", and through {'it' if len(waiting) == 1 else 'them'} {ranks_named(through, 4)}" if through else ""
        yield from fact(name, ranks_named(waiting, 4) + more, width, role, RowLink(screen=6, rank=waiting[0]))


def _stack_rows(incident: Incident, rank: int, width: int) -> Iterator[Row]:
    """The stack of a rank, the innermost call first; calls of libraries in a row are one line."""
    stack = stack_of(incident, rank)
    if stack is None:
        return
    yield row()
    order = ", innermost call first" if len(stack.frames) > 1 else ""
    yield head(truncate(f"{stack.name}{order}", width))
    yield from frame_rows(stack.frames[:_MOST_FRAMES], width)


def frame_rows(frames: Iterable[Frame], width: int) -> Iterator[Row]:
    """A line per call of the user's code, with its source if that was recorded; libraries are counted where there is any."""
    num_library, frames = 0, list(frames)
    has_own = not all(map(is_library, frames))
    for frame in frames:
        if has_own and is_library(frame):
            num_library += 1
            continue
        if num_library:
            yield row((f"  {num_library:,} in libraries", Role.DIM))
            num_library = 0
        name = f"{frame.file.rpartition('/')[2]}:{frame.line}"
        place = f"  {place_text(name, width - 2)}"
        yield row(truncate(f"{place} in {frame.function}", width) if len(place) + 8 <= width else place, at=_at(frame))
        if frame.text:
            yield row((truncate(f"    > {frame.text}", width), Role.DIM), at=_at(frame))
    if num_library:
        yield row((f"  {num_library:,} in libraries", Role.DIM))


def signature_text(op: Operation) -> str:
    """Operation, sizes and dtypes: these must be equal on all ranks."""
    peer = f" {'to' if op.p2p == SEND else 'from'} rank {op.peer}:" if op.p2p and op.peer >= 0 else ""
    return f"{op.op}{peer} {op.sizes} {op.dtypes}"


def operation_rows(incident: Incident, lane: Lane, seq: int, rank: int, width: int) -> Iterator[Row]:
    """The operation of a rank under a number: what, when, how long, from which line."""
    column, name = seq - lane.first_seq, incident.name_of(lane)
    is_there = rank in lane.members and 0 <= column < lane.row.shape[1]
    at = int(lane.row[lane.members.index(rank), column]) if is_there else -1
    link = RowLink(screen=3, group=name, seq=seq, rank=rank)
    yield row((incident.number_of(lane, seq), Role.BOLD), f" of group {name}", link=link)
    waiters = {e.waiter for e in incident.edges if (e.group, e.seq, e.is_after) == (lane.group, seq - 1, True)}
    if at < 0 and waiters and column >= lane.row.shape[1]:
        text = "not recorded: seen in the stacks of those that wait in it"
        yield from fact("operation", text, width, Role.PLAIN)
        return
    if at < 0:
        is_unknown = rank in lane.members and bool(lane.is_silent[lane.members.index(rank)])
        text, role = (
            ("unknown: this rank left no record", Role.WARN) if is_unknown else ("not issued by this rank", Role.BAD)
        )
        text, role = ("not issued when this was recorded", Role.NOTE) if incident.is_slow else (text, role)
        yield from fact("operation", text, width, role)
        return
    op = incident.run.operation(rank, at)
    word = incident.word_of(rank, at)
    is_done = word == GLYPHS[DONE].label
    yield from fact("operation", signature_text(op), width)
    yield from fact("number", f"#{op.seq} of this pair" if op.p2p and op.seq >= 0 else "", width)
    did_not_end = not is_done and at != incident.failed.get(rank)
    shown = ENDED_TEXT if did_not_end and incident.is_over else f"{word}, did not end" if did_not_end else word
    yield from fact("state", shown, width, Role.PLAIN if is_done or incident.is_slow or incident.is_over else Role.WARN)
    yield from fact("issued", _lag_text(incident, lane, column, rank, op), width)
    if op.completed_ns and op.created_ns:
        yield from fact("took", format_duration((op.completed_ns - op.created_ns) / 1e9), width)
    if op.timeout_ms:
        yield from fact("timeout", format_duration(op.timeout_ms / 1e3), width)
    splits = incident.run.ranks[rank].splits.get((lane.group, seq))
    if splits is not None:
        yield from fact("splits", splits_text(splits), width)
    frame = user_frame(op.frames, incident.run.wrappers)
    if frame is not None:
        yield from fact("line", _line_text(frame, width), width, at=_at(frame))


def _lag_text(incident: Incident, lane: Lane, column: int, rank: int, op: Operation) -> str:
    """How long after the first rank it was issued."""
    if not op.created_ns:
        return ""
    rows, ahead = lane.row[:, column], incident.clock_offsets(lane)
    places = np.flatnonzero(rows >= 0)[:1024]
    created = {i: int(incident.run.ranks[lane.members[i]].operations["created_ns"][rows[i]]) for i in places.tolist()}
    mine_ns = op.created_ns - ahead[lane.members.index(rank)]
    lag_s = (mine_ns - min((time - ahead[i] for i, time in created.items() if time), default=mine_ns)) / 1e9
    return f"{format_duration(lag_s)} after the first rank" if round(lag_s * 1e3) else "within 1 ms of the first rank"


def log_rows(logs: LogIndex, source: str, line: int, width: int) -> Iterator[Row]:
    """A line of a log in full, with those around it in the same file."""
    found = logs.line_at(source, max(line, 1))
    if found is None:
        return
    yield row((f"{source}:{line}", Role.DIM), link=RowLink(screen=5, source=source, line=line))
    for number in range(max(found - _AROUND, 0), min(found + _AROUND + 1, len(logs))):
        for text in wrapped(logs.read(number).text, width, "  "):
            yield row(
                (text, Role.BOLD if number == found else Role.DIM), link=RowLink(screen=5, source=source, line=line)
            )


def link_rows(incident: Incident, link: RowLink | None, logs: LogIndex | None, width: int) -> Iterator[Row]:
    """The item that a line leads to: its log lines, its operation, its rank; else the rank at fault."""
    if link is not None and link.source and logs is not None:
        yield from log_rows(logs, link.source, link.line, width)
        return
    rank = link.rank if link is not None and link.rank is not None else incident.foremost
    if link is not None and link.seq is not None and rank is not None and incident.lanes:
        lane = incident.lanes[incident.lane_of(link.group)]
        yield from operation_rows(incident, lane, link.seq, rank, width)
        yield row()
    if rank is not None:
        yield from rank_rows(incident, rank, width)
    elif incident.lanes:
        lane = incident.lanes[0]
        yield from operation_rows(incident, lane, incident.stands_at(lane), lane.members[0], width)


def _at(frame: Frame) -> tuple[str, int]:
    return frame.file, frame.line
