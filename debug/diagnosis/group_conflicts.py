"""Ranks that disagree about who belongs to a process group."""

from __future__ import annotations

from collections.abc import Iterator

from titan_ckpt.debug.incident.contradictions import conflicts, rank_list
from titan_ckpt.debug.incident.records import Evidence, Run, Verdict


def group_conflicts(run: Run) -> Iterator[Verdict]:
    """PG_CONFIG_CONFLICT: the ranks wait for each other in groups of one name and different members."""
    for conflict in conflicts(run):
        used = {members: ranks for members, ranks in conflict.users.items() if ranks}
        if len(used) < 2:
            continue
        ordered = sorted(used, key=lambda members: (-len(used[members]), members))
        most, others = used[ordered[0]], [used[members] for members in ordered[1:]]
        is_tie = len(most) == len(others[0])
        culprits = tuple(sorted({rank for ranks in others for rank in ranks} | set(most if is_tie else ())))
        yield Verdict(
            verdict="PG_CONFIG_CONFLICT", culprits=culprits, victims=() if is_tie else most, group=conflict.name,
            step=run.step_of(culprits[0]), confidence=0.7 if is_tie else 0.9,
            headline=f"ranks disagree about who belongs to group {conflict.name}: "
            + "; ".join(
                f"{rank_list(used[members])} say{'s' * (len(used[members]) == 1)} {rank_list(members)}" for members in ordered[:3]
            ),
            evidence=tuple(
                Evidence(text=f"group {conflict.name} has the members {rank_list(members)}", rank=used[members][0], source="dump")
                for members in ordered[:4]
            ),
            chain=() if is_tie else tuple((rank, culprits[0]) for rank in most),
            next_steps=(
                "make every rank call new_group (or init_device_mesh) with the same ranks and in the same order",
                "look for a group that is made under a condition which differs between ranks",
            ),
        )  # fmt: skip
