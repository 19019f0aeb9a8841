"""A rank whose differing operation is the one for which others wait on another of its groups: it passed the wrong group. Pure."""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.diagnosis.mismatches.meeting import call_site
from titan_ckpt.debug.incident.records import Operation, Run
from titan_ckpt.debug.incident.waits import pending


def meant_for(run: Run, rank: int, deviant: Operation) -> Operation | None:
    """The operation of another rank, on another group of `rank`, that waits for what `rank` issued as `deviant`, from one line.

    None if there is none, or if `rank` has come to that number of the other group too.
    """
    place = call_site(run, deviant)[:1]
    for other, record in run.ranks.items():
        rows = np.flatnonzero(pending(record.operations) & (record.operations["p2p"] == 0)) if other != rank else ()
        for row in rows:
            waited = run.operation(other, int(row))
            is_alike = (waited.op, waited.sizes, waited.dtypes) == (deviant.op, deviant.sizes, deviant.dtypes)
            if not is_alike or waited.group == deviant.group or rank not in waited.group.members or not place:
                continue
            if call_site(run, waited)[:1] == place and not _has_come(run, rank, waited):
                return waited
    return None


def _has_come(run: Run, rank: int, waited: Operation) -> bool:
    table = run.ranks[rank].operations
    is_there = (table["group"] == run.groups.index(waited.group)) & (table["seq"] >= waited.seq) & (table["p2p"] == 0)
    return bool(is_there.any())
