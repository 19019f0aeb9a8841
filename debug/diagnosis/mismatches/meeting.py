"""Ranks that met at one sequence number, the parties among them, and what each had done before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from titan_ckpt.debug.diagnosis.align import Lane, can_match, elements_of, is_uneven
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import Frame, Operation, Run

HISTORY = 256
Key: TypeAlias = tuple[str, str, tuple[int, ...], int]  # op, dtypes, numbers of elements, root (-1: none is known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks that issued the same thing, with one of their operations."""

    ranks: tuple[int, ...]
    operation: Operation

    @property
    def key(self) -> Key:
        return key_of(self.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The first sequence number of a lane at which ranks issued different operations."""

    run: Run
    lane: Lane
    seq: int

    @property
    def group(self) -> str:
        return str(self.run.groups[self.lane.group])


def sides_at(run: Run, lane: Lane, seq: int) -> list[Side]:
    """The parties at `seq`, largest first. Operations of which too little is known to tell them apart are one party's."""
    column = lane.signature[:, seq - lane.first_seq]
    alike: dict[int, list[int]] = {}
    for rank, signature in zip(lane.members, column.tolist(), strict=True):
        if signature >= 0:
            alike.setdefault(signature, []).append(rank)
    parties: list[tuple[list[int], list[int]]] = []  # codes, ranks
    for signature, ranks in sorted(alike.items(), key=lambda one: (-len(one[1]), one[1])):
        code = int(lane.codes[signature])
        party = next((party for party in parties if can_match([*party[0], code])), None)
        if party is None:
            parties.append(([code], ranks))
        else:
            party[0].append(code)
            party[1].extend(ranks)
    rows = lane.seen_at(seq)
    sides = [Side(ranks=tuple(sorted(r)), operation=run.operation(r[0], rows[r[0]])) for _, r in parties]
    return sorted(sides, key=lambda side: (-len(side.ranks), side.ranks))


def history(meeting: Meeting, rank: int) -> list[tuple[Key, tuple[Frame, ...]]]:
    """(key, call site) of the rank's collectives on this group before the meeting, oldest first."""
    run, lane = meeting.run, meeting.lane
    stop = meeting.seq - lane.first_seq
    rows = [int(row) for row in lane.row[lane.members.index(rank), max(0, stop - HISTORY) : stop] if row >= 0]
    operations = (run.operation(rank, row) for row in rows)
    return [(key_of(operation), call_site(run, operation)) for operation in operations]


def key_of(operation: Operation) -> Key:
    """What must be equal where ranks meet."""
    elements = () if is_uneven(operation.op) else elements_of(operation.sizes)
    return operation.op, operation.dtypes, elements, operation.peer


def predict(history: Sequence[object]) -> object | None:
    """What comes next if the history goes on with its shortest period; None when it has none.

    >>> predict(["a", "b", "a", "b"])
    'a'
    """
    for period in range(1, len(history) // 2 + 1):
        tail = history[-2 * period :]
        if tail[:period] == tail[period:]:
            return history[-period]
    return None


def call_site(run: Run, operation: Operation) -> tuple[Frame, ...]:
    """The user's frames of an operation, innermost first, without the common entry."""
    inner = user_frame(operation.frames, run.wrappers)
    if inner is None:
        return ()
    position = operation.frames.index(inner)
    return operation.frames[position : position + 4]
