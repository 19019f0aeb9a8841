"""Ranks that meet in one all_to_all, where one sends another number of elements than its peer expects. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane, were_met
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Run, Splits, Verdict

MOST_SHOWN = 16
ADVICE = (
    "what a rank sends to a peer must be as much as that peer expects of it: exchange the counts by an all_to_all first",
    "compare how both ranks compute input_split_sizes and output_split_sizes at these lines",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Two members of which one sends more or fewer elements than the other expects."""

    sender: int
    receiver: int
    sent: int
    expected: int

    @property
    def ranks(self) -> tuple[int, int]:
        return self.sender, self.receiver


def split_mismatch(run: Run, lane: Lane, before: int | None) -> Verdict | None:
    """The verdict on the first all_to_all of a lane whose splits do not fit, if it is earlier than `before` and not all completed
    it."""
    numbers = {seq for rank in lane.members for group, seq in run.ranks[rank].splits if group == lane.group}
    for seq in sorted(numbers):
        if not lane.first_seq <= seq < (lane.first_seq + lane.row.shape[1] if before is None else before):
            continue
        found = _splits_at(run, lane, seq)
        misfits = _misfits(run.groups[lane.group].members, found)
        if misfits and not were_met(run, lane, np.array([seq - lane.first_seq])).all():
            return _verdict(run, lane, seq, found, misfits)
    return None


def _splits_at(run: Run, lane: Lane, seq: int) -> dict[int, Splits]:
    """The splits of each member of which they are known."""
    key, members = (lane.group, seq), run.groups[lane.group].members
    known = {rank: run.ranks[rank].splits.get(key) for rank in lane.members}
    return {rank: splits for rank, splits in known.items() if splits and len(splits[0]) == len(members)}


def _misfits(members: Sequence[int], found: dict[int, Splits]) -> list[Misfit]:
    places = [place for place, rank in enumerate(members) if rank in found]
    if len(places) < 2:
        return []
    sent = np.array([found[members[place]][0] for place in places])[:, places]
    expected = np.array([found[members[place]][1] for place in places])[:, places].T
    return [
        Misfit(
            sender=members[places[i]], receiver=members[places[j]], sent=int(sent[i, j]), expected=int(expected[i, j])
        )
        for i, j in np.argwhere(sent != expected).tolist()
    ]


def _blame(
    run: Run, lane: Lane, seq: int, found: dict[int, Splits], misfits: Sequence[Misfit]
) -> tuple[int, Basis] | None:
    """The rank whose splits are wrong: part of every misfit, and the only such rank, the only one that most others differ from,
    or the only one that did otherwise at that line before. None if the evidence does not show it."""
    in_all = set(misfits[0].ranks).intersection(*(one.ranks for one in misfits))
    if len(in_all) == 1:
        return in_all.pop(), Basis.CLEAR_MAJORITY
    (usual, count), *_ = Counter(found.values()).most_common(1)
    odd = [rank for rank in in_all if found[rank] != usual]
    if len(odd) == 1 and count > 1:
        return odd[0], Basis.CLEAR_MAJORITY if 2 * count > len(lane.members) else Basis.PLURALITY
    changed = [rank for rank in in_all if _has_changed(run, lane, rank, seq)]
    return (changed[0], Basis.BROKE_HISTORY) if len(changed) == 1 else None


def _has_changed(run: Run, lane: Lane, rank: int, seq: int) -> bool:
    """Whether its splits were others the last time that it issued an all_to_all from that line."""
    splits, rows = run.ranks[rank].splits, lane.row[lane.members.index(rank)]

    def line(number: int) -> object:
        return user_frame(run.operation(rank, int(rows[number - lane.first_seq])).frames, run.wrappers)

    earlier = [n for group, n in splits if group == lane.group and lane.first_seq <= n < seq]
    alike = [n for n in earlier if line(n) == line(seq)]
    return bool(alike) and splits[lane.group, max(alike)] != splits[lane.group, seq]


def _verdict(run: Run, lane: Lane, seq: int, found: dict[int, Splits], misfits: Sequence[Misfit]) -> Verdict:
    blamed = _blame(run, lane, seq, found, misfits)
    involved = tuple(sorted({rank for one in misfits for rank in one.ranks}))
    culprits = involved if blamed is None else (blamed[0],)
    victims = tuple(rank for rank in lane.members if rank not in culprits)
    rows = lane.seen_at(seq)
    name = run.operation(culprits[0], rows[culprits[0]]).op
    shown = dict.fromkeys((*culprits, *misfits[0].ranks))
    return Verdict(
        verdict=VerdictKind.SIZE_MISMATCH,
        culprits=culprits,
        victims=victims,
        group=str(run.groups[lane.group]),
        seq=seq,
        op=name,
        confidence=(Basis.TIE if blamed is None else blamed[1]).confidence,
        headline=_headline(
            f"{name} #{seq} of group {run.groups[lane.group]}", None if blamed is None else blamed[0], misfits
        ),
        evidence=tuple(_splits_of(run, lane, rank, rows[rank], found[rank]) for rank in list(shown)[:8]),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=ADVICE,
    )


def _headline(operation: str, blamed: int | None, misfits: Sequence[Misfit]) -> str:
    first = misfits[0]
    others = {1: "", 2: " (and one more such pair)"}.get(len(misfits), f" (and {len(misfits) - 1} more such pairs)")
    if blamed == first.receiver:
        return (
            f"rank {blamed} expects {first.expected} elements of rank {first.sender} in {operation}, "
            f"which sends {first.sent}{others}"
        )
    unclear = "" if blamed is not None else "; the evidence does not show which of them is wrong"
    return (
        f"rank {first.sender} sends {first.sent} elements to rank {first.receiver} in {operation}, "
        f"which expects {first.expected}{others}{unclear}"
    )


def _splits_of(run: Run, lane: Lane, rank: int, row: int, splits: Splits) -> Evidence:
    operation, members = run.operation(rank, row), run.groups[lane.group].members
    frame = user_frame(operation.frames, run.wrappers)
    text = f"{splits_text(splits)} (elements to and from {rank_list(members)})"
    return Evidence.at(frame, text=text, rank=rank, source="black box")


def splits_text(splits: Splits) -> str:
    """
    >>> splits_text(((1, 2), (3, 4)))
    'sends [1, 2], expects [3, 4]'
    """
    sent, expected = (_listed(part) for part in splits)
    return f"sends {sent}, expects {expected}"


def _listed(numbers: Sequence[int]) -> str:
    """
    >>> _listed(range(20))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 4 more]'
    """
    rest = f", and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else ""
    return f"[{', '.join(map(str, numbers[:MOST_SHOWN]))}{rest}]"
