"""Ranks that are in the same situation, together: a report of 1,024 ranks shows the few that differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.records import RankRecord, Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import pending

FEW_RANKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Ranks in one situation, whose last operation is the same; the first stands for all. `mark`: culprit, suspect or ""."""

    ranks: tuple[int, ...]
    situation: Situation
    mark: str

    @property
    def label(self) -> str:
        """`rank 3`, or `ranks 0, 1, 2` and how many more."""
        more = len(self.ranks) - 8
        return rank_list(self.ranks) if more <= 0 else f"rank {self.ranks[0]} and {len(self.ranks) - 1:,} like it"


def mark_of(top: Verdict, rank: int) -> str:
    """What the verdict says of a rank: `culprit`, `suspect` or ""."""
    return "culprit" if rank in top.culprits else "suspect" if rank in top.suspects else ""


def alike(run: Run, top: Verdict, states: Mapping[int, Situation]) -> list[Alike]:
    """All ranks, culprits first, then suspects, then the largest parties; of a small job each rank by itself."""
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, record in run.ranks.items():
        state = states[rank]
        key = (mark_of(top, rank), state.kind, state.where, *_last(record))
        found.setdefault((rank,) if len(run.ranks) <= FEW_RANKS else key, []).append(rank)
    parties = [
        Alike(ranks=tuple(ranks), situation=states[ranks[0]], mark=mark_of(top, ranks[0])) for ranks in found.values()
    ]
    order = ("culprit", "suspect", "")
    return sorted(parties, key=lambda party: (order.index(party.mark), -len(party.ranks), party.ranks))


def last_row(record: RankRecord) -> int:
    """The row of the operation that the rank waits in, else of the one that it issued last; -1 if it issued none."""
    waiting = np.flatnonzero(pending(record.operations))
    return int(waiting[0]) if len(waiting) else len(record.operations) - 1


def _last(record: RankRecord) -> tuple[object, ...]:
    row = last_row(record)
    return tuple(record.operations[["group", "seq", "op", "retired", "state"]][row].item()) if row >= 0 else ()
