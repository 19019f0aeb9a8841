"""Operations that two ranks issued in different orders on different groups. Pure."""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.records import Run


def overtakes(run: Run, root: int, edge: Edge) -> tuple[int, int] | None:
    """Rows (of the waiter, of `root`) of an operation that the waiter issued only after the one that it awaits `root` in, and
    that `root` issued without that one: then the two took their groups in different orders. None if there is none.

    Ranks of a mesh use different groups of one description; operations of equal number on these are equal.
    """
    first, second = run.ranks[edge.waiter].operations, run.ranks[root].operations
    awaited = np.flatnonzero((first["group"] == edge.group) & (first["seq"] == edge.seq) & (first["p2p"] == 0))
    if not len(awaited):
        return None
    later = np.arange(len(first)) > awaited[-1]
    for row in np.flatnonzero(later & (first["p2p"] == 0)).tolist():
        group = _counterpart(run, int(first["group"][row]), root)
        found = np.flatnonzero((second["group"] == group) & (second["seq"] == first["seq"][row]) & (second["p2p"] == 0))
        if group >= 0 and group != edge.group and len(found):
            return row, int(found[-1])
    return None


def _counterpart(run: Run, group: int, rank: int) -> int:
    """The group of `rank` that plays the part of `group`: itself, or that of the same description; -1 if there is none."""
    mine = run.groups[group]
    if rank in mine.members:
        return group
    alike = [
        place
        for place, other in enumerate(run.groups)
        if other.description == mine.description and mine.description and rank in other.members
    ]
    return alike[0] if len(alike) == 1 else -1
