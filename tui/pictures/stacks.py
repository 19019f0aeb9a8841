"""Which stack of a rank shows where it hung or ended, and not how it dumped, or what it did after the end. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from titan_ckpt.debug.incident.frames import hang_stack, is_library, program_frames, user_frame
from titan_ckpt.debug.incident.kinds import STALL, RankState
from titan_ckpt.debug.incident.records import Frame, Operation, RankRecord, StackSnapshot
from titan_ckpt.tui.data.incident import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStack:
    """Frames of the program, most recent call first, and what they are the stack of."""

    name: str
    frames: tuple[Frame, ...]


def stack_of(incident: Incident, rank: int) -> ShownStack | None:
    """The stack to show of a rank; None if none of its stacks says anything.

    Of a rank that died: of the crash, or of its exception, or the line of that. Else where it hung, or how it issued what it
    waits in.
    """
    record, state = incident.run.ranks.get(rank), incident.states.get(rank)
    if record is None or state is None:
        return None
    if state.kind == RankState.DEAD:
        found = _of_crash(record) or _of_exception(record, state.frame) or _of_hang(record)
    else:
        found = _of_stall(record) if incident.is_over else _of_hang(record)
        raised = None if incident.is_over or record.has_flight_recorder else _of_error(record)
        found = found or raised or _of_operation(incident, rank)
    return found if found is not None and found.frames else None


def stacks_of(incident: Incident, members: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """Each rank's stack, outermost call first; ranks without a stack are omitted.

    Without the libraries that called the program, such as `runpy`: a recorder may have cut the outermost calls off.
    """
    found = ((rank, stack_of(incident, rank)) for rank in members)
    return {rank: _from_program(stack.frames[::-1]) for rank, stack in found if stack is not None}


def _from_program(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(itertools.dropwhile(is_library, frames)) or frames


def _of_crash(record: RankRecord) -> ShownStack | None:
    crashed = next((stack for stack in reversed(record.stacks) if stack.reason.startswith("fatal")), None)
    thread = (crashed.current or crashed.main) if crashed is not None else None
    return ShownStack(name="stack of the crash", frames=program_frames(thread)) if thread is not None else None


def _of_exception(record: RankRecord, frame: Frame | None) -> ShownStack | None:
    if frame is None:
        return None
    calls = next((event.calls for event in record.events if frame in event.calls), ())
    return ShownStack(name="stack of its exception" if calls else "line of its exception", frames=calls or (frame,))


def _of_error(record: RankRecord) -> ShownStack | None:
    """Where the communication library raised an error in a rank: there it had waited."""
    calls = next((event.calls for event in record.events if event.kind.is_communication and event.calls), ())
    return ShownStack(name="stack of its error", frames=calls) if calls else None


def _of_hang(record: RankRecord) -> ShownStack | None:
    return _of_snapshot(hang_stack(record))


def _of_stall(record: RankRecord) -> ShownStack | None:
    """Of a job that ended well: taken while it stood. Others may have been taken after the end."""
    return _of_snapshot(next((stack for stack in record.stacks if stack.reason.startswith(STALL)), None))


def _of_snapshot(stack: StackSnapshot | None) -> ShownStack | None:
    main = stack.main if stack is not None else None
    return ShownStack(name="stack", frames=program_frames(main)) if main is not None else None


def _of_operation(incident: Incident, rank: int) -> ShownStack | None:
    """The calls that issued the operation in which a rank waits or failed."""
    wait, failed = incident.wait_of.get(rank), incident.failed.get(rank)
    op: Operation | None = wait.operation if wait is not None else None
    if failed is not None:
        op = incident.run.operation(rank, failed)
    if op is None or incident.is_over:
        return None
    number = f" #{op.seq}" if op.seq >= 0 else ""
    record, line = incident.run.ranks[rank], user_frame(op.frames, incident.run.wrappers)
    if record.has_flight_recorder or line is None:
        return ShownStack(name=f"stack of {op.op}{number}", frames=op.frames)
    return ShownStack(
        name=f"line of {op.op}{number}", frames=(line,)
    )  # a black box keeps one stack for all calls of a line
