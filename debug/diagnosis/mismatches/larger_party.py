"""When the larger of the parties that met in one group is not the one that is right. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from titan_ckpt.debug.diagnosis.mismatches.meeting import Meeting, Side, call_site, history, key_of
from titan_ckpt.debug.diagnosis.waiting.rhythm import left_rhythm
from titan_ckpt.debug.incident.records import Operation

LEAST_SIBLINGS = 2  # operations of other groups
_MOST_RANKS = 2048
_BEFORE = 2  # operations before the meeting at which other groups did the same
_LEAST_ALIKE = 3  # earlier operations from one line


def majority_of_few(meeting: Meeting, sides: Sequence[Side]) -> tuple[int, ...] | None:
    """The larger party, if it is one in its group alone: most of the job's ranks kept the order that they had repeated, and these
    did not; or most ranks of its own and of the other groups of its kind did what the smaller party did."""
    larger, smaller = sides[0], [rank for side in sides[1:] for rank in side.ranks]
    ranks = meeting.run.ranks
    if not len(meeting.lane.members) < len(ranks) <= _MOST_RANKS:
        return None
    left = {rank for rank, record in ranks.items() if left_rhythm(record) is not None}
    if left and 2 * len(left) < len(ranks) and left >= set(larger.ranks) and left.isdisjoint(smaller):
        return larger.ranks
    if len(sides) != 2 or not left.isdisjoint(smaller) or not _were_alike(meeting):
        return None
    found = Counter(key_of(operation) for operation in siblings(meeting, meeting.seq))
    own, other = found[sides[1].key] + len(smaller), found[larger.key] + len(larger.ranks)
    is_usual = found[sides[1].key] >= LEAST_SIBLINGS and own > other and 2 * found[sides[1].key] > found.total()
    return larger.ranks if is_usual else None


def both_may_be_wrong(meeting: Meeting, sides: Sequence[Side]) -> bool:
    """Whether, from one line, the larger party passed what it never did before, and the smaller one what both always did."""
    larger, smaller = sides[0], sides[1]
    sites = {call_site(meeting.run, side.operation)[:1] for side in sides}
    if len(sides) != 2 or len(sites) != 1 or () in sites or larger.operation.op != smaller.operation.op:
        return False
    [site] = sites
    pasts = [[key for key, at in history(meeting, side.ranks[0]) if at[:1] == site] for side in (larger, smaller)]
    return all(len(past) >= _LEAST_ALIKE and set(past) == {smaller.key} for past in pasts)


def siblings(meeting: Meeting, seq: int) -> Iterator[Operation]:
    """The operations of a number in other groups of the same description."""
    run, mine = meeting.run, meeting.run.groups[meeting.lane.group]
    groups = [i for i, group in enumerate(run.groups) if group != mine and group.description == mine.description != ""]
    for rank, record in run.ranks.items() if groups else ():
        table = record.operations
        is_there = np.isin(table["group"], groups) & (table["seq"] == seq) & (table["p2p"] == 0)
        yield from (run.operation(rank, row) for row in np.flatnonzero(is_there).tolist())


def _were_alike(meeting: Meeting) -> bool:
    """Whether the groups of that kind did the same just before: stages of a pipeline number theirs apart."""
    lane = meeting.lane
    numbers = range(max(lane.first_seq, meeting.seq - _BEFORE), meeting.seq)
    for seq in numbers:
        rows = lane.seen_at(seq)
        keys = {key_of(meeting.run.operation(rank, row)) for rank, row in rows.items()}
        others = {key_of(operation) for operation in siblings(meeting, seq)}
        if len(keys) != 1 or not others or others != keys:
            return False
    return len(numbers) > 0
