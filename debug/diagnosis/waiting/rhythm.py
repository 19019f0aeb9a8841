"""Where a rank left the order of operations that it had repeated: collectives of all groups, sends and receives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from titan_ckpt.debug.diagnosis.mismatches.meeting import predict
from titan_ckpt.debug.incident.records import COMPLETED, Array, RankRecord

HISTORY = 256  # operations that are looked at


class Departure(StrEnum):
    """What a rank did in place of the operation that its order led to."""

    SKIPPED = "skipped"  # it went on with what follows
    EXTRA = "extra"  # it did something before it
    SWAPPED = "swapped"  # it did what follows first


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """`row`: the operation that was out of order; `expected`: the one a period before that the order led to once more."""

    row: int
    expected: int
    what: Departure


def left_rhythm(record: RankRecord) -> Break | None:
    """The last place at which a rank left its order, where the evidence shows in which way."""
    table = record.operations[-HISTORY:]
    found = _left_at(_path(table))
    if found is None:
        return None
    first, (place, period, what) = len(record.operations) - len(table), found
    return Break(row=first + place, expected=first + place - period, what=what)


def keeps_rhythm(table: Array) -> bool | None:
    """Whether the last of a rank's operations is the one that its order leads to; None where it has none."""
    return _follows(_path(table[-HISTORY:]))


def left_order(table: Array, row: int) -> bool:
    """Whether an operation, a send or recv, is another one than the earlier ones lead to, alone or among all."""
    before, has_lost = table[: row + 1], _lost_its_beginning(table)
    if has_lost and not _holds_a_step(before):
        return False
    pairs = before[before["p2p"] != 0]
    kept = keeps_rhythm(pairs)
    if kept is None:  # too few to show a whole step
        keys = list(zip(pairs["p2p"].tolist(), pairs["peer"].tolist(), strict=True))
        expected = predict(keys[:-1])
        kept = expected is None or expected == keys[-1] or has_lost
    return not kept or keeps_rhythm(before) is False


def _lost_its_beginning(table: Array) -> bool:
    """Whether a ring has lost the first operations: it may begin within a step, and a pipeline fills and drains in other orders
    than it runs."""
    numbers = table["seq"][table["p2p"] == 0] if (table["p2p"] == 0).any() else table["seq"]
    return len(numbers) > 0 and int(numbers.min()) > 1


def _holds_a_step(table: Array) -> bool:
    """Whether a collective of the program comes twice: between the two lies a whole step."""
    collectives = table[table["p2p"] == 0]
    keys = np.stack([collectives[name].astype(np.int64) for name in ("group", "op", "frames")])
    return bool(np.unique(keys, axis=1, return_counts=True)[1].max(initial=0) > 1)


WORKED = 3  # times


def worked_before(table: Array, row: int) -> bool:
    """Whether a rank came through the same send or recv several times before."""
    alike = (table["state"] == COMPLETED) | table["retired"]
    for column in ("group", "p2p", "peer", "frames"):
        alike &= table[column] == table[row][column]
    return int(alike[:row].sum()) >= WORKED


@lru_cache(256)
def _follows(path: tuple[int, ...]) -> bool | None:
    """Whether a path ends as the period leads to that explains two thirds of what precedes; that it does not is only said of one
    that was seen three times.

    >>> _follows((1, 1, 2, 1, 1, 2, 1, 1, 2)), _follows((1, 1, 2) * 3 + (1, 2)), _follows((1, 1, 2, 1, 1, 2, 2))
    (True, False, None)
    """
    place = len(path) - 1
    best: tuple[int, int] | None = None
    for period in range(1, place // 2 + 1):
        run = 0
        while run + period < place and path[place - 1 - run] == path[place - 1 - run - period]:
            run += 1
        if run >= period and 3 * (run + period) >= 2 * place:
            best = max(best or (0, 0), (run + period, -period))
    if best is None or path[place] == path[place + best[1]]:
        return None if best is None else True
    is_known = path[place] in path[place + best[1] : place]  # a new one may begin another part of the program
    return False if is_known and best[0] >= -3 * best[1] else None


def _path(table: Array) -> tuple[int, ...]:
    """The kinds of operations, numbered as they come."""
    columns = [table[name] for name in ("group", "op", "p2p", "peer", "frames")]
    _, keys = np.unique(np.stack([column.astype(np.int64) for column in columns]), axis=1, return_inverse=True)
    names: dict[int, int] = {}
    return tuple(names.setdefault(key, len(names)) for key in keys.tolist())


@lru_cache(256)
def _left_at(path: tuple[int, ...]) -> tuple[int, int, Departure] | None:
    """The place, the period and the way in which a path leaves its order. Most ranks of a job have one path, if each numbers its
    operations as they come."""
    found = broken_at(path)
    if found is None or not _has_all(path, *found):
        return None
    what = _departure(path, *found)
    return None if what is None else (*found, what)


def broken_at(path: Sequence[int]) -> tuple[int, int] | None:
    """The last place at which a path leaves the period that explains two thirds of what precedes, and this period.

    >>> broken_at([1, 2, 3, 1, 2, 3, 1, 3])
    (7, 3)
    >>> broken_at([1, 1, 1, 2, 1, 1, 1, 2, 1])
    """
    runs: list[int] = []  # by period less 1, for how many places in a row it has held
    found: tuple[int, int] | None = None
    for place, key in enumerate(path):
        holds = [period for period, run in enumerate(runs, 1) if run >= period and 3 * (run + period) >= 2 * place]
        period = max(holds, key=lambda one: (runs[one - 1] + one, -one), default=0)
        if period and found is not None and place - runs[period - 1] - period < found[0]:
            found = None  # a longer period explains that place
        if period and path[place - period] != key:
            found = place, period
        runs = [run + 1 if path[place - one] == key else 0 for one, run in enumerate([*runs, 0][:place], 1)]
    return found


def _has_all(path: Sequence[int], place: int, period: int) -> bool:
    """Whether a period holds every kind of operation that follows, but a new one: else it is part of a longer one."""
    block = set(path[place - period : place])
    return set(path[place + 1 :]) <= block | {path[place]} and (len(path) > place + 1 or path[place] in block)


def _departure(path: Sequence[int], place: int, period: int) -> Departure | None:
    expected, following = path[place - period], path[place - period + 1]
    then = path[place + 1] if place + 1 < len(path) else None
    if path[place] == following and following != expected:
        return Departure.SWAPPED if then == expected else Departure.SKIPPED
    return Departure.EXTRA if then == expected else None
