"""Two ranks side by side at one sequence number: the operation, those around it, and where their stacks diverge."""

from __future__ import annotations

from collections.abc import Iterator

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import Frame, Operation
from titan_ckpt.tui.data.incident import Incident, frame_text
from titan_ckpt.tui.pictures.details import signature_text
from titan_ckpt.tui.pictures.stacks import stacks_of
from titan_ckpt.tui.rows import Role, Row, fitted, head, piece, place_text, row, truncate
from titan_ckpt.tui.screens.stack_tree import source_line

BEFORE, AFTER = 5, 2
_NAME = 12


def operation_of(incident: Incident, lane: Lane, seq: int, rank: int) -> Operation | None:
    """The operation of a rank under a sequence number."""
    at = row_of(lane, seq, rank)
    return incident.run.operation(rank, at) if at >= 0 else None


def row_of(lane: Lane, seq: int, rank: int) -> int:
    """The row of that operation among the rank's; -1 if it has none."""
    column = seq - lane.first_seq
    if rank not in lane.members or not 0 <= column < lane.row.shape[1]:
        return -1
    return int(lane.row[lane.members.index(rank), column])


def rank_diff_rows(incident: Incident, lane: Lane, seq: int, ranks: tuple[int, int], width: int) -> Iterator[Row]:
    """A line per fact, `!` before differing ones."""
    a, b = ranks
    room = max((width - _NAME - 6) // 2, 10)
    yield head(f"ranks {a} and {b} at {incident.number_of(lane, seq)} of {incident.name_of(lane)}")
    yield _pair("", f"rank {a}", f"rank {b}", room, is_plain=True)
    first, second = (_facts(incident, lane, seq, rank, room) for rank in ranks)
    for name in first:
        yield _pair(name, first[name], second[name], room)
    yield row()
    yield head("operations before and after")
    for number in range(seq - BEFORE, seq + AFTER + 1):
        texts = [_issued(incident, lane, number, rank) for rank in ranks]
        if any(texts):
            yield _pair(incident.number_of(lane, number), texts[0] or "-", texts[1] or "-", room)
    yield row()
    yield from _stack_rows(incident, ranks, width)


def _facts(incident: Incident, lane: Lane, seq: int, rank: int, room: int) -> dict[str, str]:
    op, record, state = operation_of(incident, lane, seq, rank), incident.run.ranks[rank], incident.states[rank]
    frame = user_frame(op.frames, incident.run.wrappers) if op is not None else None
    beat = record.heartbeat
    return {
        "operation": op.op if op is not None else "not issued",
        "sizes": op.sizes if op is not None else "-",
        "dtype": op.dtypes if op is not None else "-",
        "state": "-" if op is None else incident.word_of(rank, row_of(lane, seq, rank)),
        "call site": _place(frame, room),
        "activity": f"{incident.doing(rank)}{f' ({state.detail})' if state.detail else ''}",
        "location": _place(state.frame, room),
        "phase": f"{beat.phase or 'between phases'}, step {beat.step}" if beat is not None else "-",
        "coordinates": " ".join(f"{axis}{place}" for axis, place in record.coordinates.items()) or "-",
    }


def _place(frame: Frame | None, room: int) -> str:
    if frame is None or len(frame_text(frame)) <= room:
        return "-" if frame is None else frame_text(frame)
    return piece(place_text(frame.place, room), frame_text(frame))


def _issued(incident: Incident, lane: Lane, seq: int, rank: int) -> str:
    op = operation_of(incident, lane, seq, rank)
    return signature_text(op) if op is not None else ""


def _pair(name: str, a: str, b: str, room: int, *, is_plain: bool = False) -> Row:
    is_other = a != b and not is_plain and name != "coordinates"
    role: Role = Role.BAD if is_other else Role.BOLD if is_plain else Role.PLAIN
    mark = "! " if is_other else "  "
    return row((mark, Role.BAD), f"{name:<{_NAME}}", (fitted(a, room), role), "  ", (truncate(b, room), role),
               is_problem=is_other)  # fmt: skip


def _stack_rows(incident: Incident, ranks: tuple[int, int], width: int) -> Iterator[Row]:
    """The number of common outer calls, then the rest of each stack."""
    stacks = stacks_of(incident, ranks)
    if len(stacks) < 2:
        missing = [rank for rank in ranks if rank not in stacks]
        yield row(("no stack for rank " + " and rank ".join(map(str, missing)), Role.DIM))
        return
    first, second = stacks[ranks[0]], stacks[ranks[1]]
    common = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    calls = "the outermost call is" if common == 1 else f"the {common} outermost calls are"
    yield head(f"stacks: {calls} the same" if common else "stacks: they differ from the outermost call on")
    for rank in ranks:
        yield row((f"  rank {rank}", Role.BOLD), "" if len(stacks[rank]) > common else " ends there")
        for frame in stacks[rank][common:]:
            yield row(f"    {_place(frame, width - 4)}")
            if text := source_line(frame):
                yield row((truncate(f"      > {text}", width), Role.DIM))
