"""Which steps of the first tier are still to be copied to the second, and the file that says so to other programs.

`unmirrored.txt` has a line for each. It is written before the step's COMMIT and taken back when the copy is committed, so `prune`
and jobs without a mirror know it however the job ended.
"""

from __future__ import annotations

from collections.abc import Collection

from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo
from titan_ckpt.format.names import UNMIRRORED
from titan_ckpt.store.base import Store
from titan_ckpt.upkeep.deletion import find_unmirrored
from titan_ckpt.upkeep.ownership import list_tier

_HEAD = "# Not yet copied to the second tier; retention and prune keep these steps. Remove a line to let its step go."


def left_over(source: Store, target: Store, noted: frozenset[int], *, own: frozenset[int] = frozenset()) -> set[int]:
    """Steps of `source` that `target` lacks, or has of an earlier save, and was to get.

    Those of `noted`, the steps in `unmirrored.txt`, and those newer than the newest that `target` has: the job may have died
    before it copied them. Into an empty target go those from the first in the list on; without a list the newest before the job's
    `own`, not the whole history of the run. A noted step that was never committed is none.
    """
    infos = list_tier(source)
    there, here = _committed(list_tier(target)), _committed(infos)
    newest = max(there) if there else min(noted, default=max(here.keys() - own, default=0)) - 1
    missing = {step for step, attempt in here.items() if there.get(step) != attempt}
    unborn = {info.step for info in infos if info.state == CheckpointState.PARTIAL}
    unseen = noted - here.keys() - there.keys() - unborn
    return {step for step in missing if step > newest or step in there} | (noted & missing) | unseen


def _committed(infos: list[CheckpointInfo]) -> dict[int, str]:
    """The attempt of each committed step of a tier; empty for one that the store refuses to read."""
    known = (info for info in infos if info.state in (CheckpointState.COMMITTED, CheckpointState.UNREADABLE))
    return {info.step: info.commit.attempt if info.commit else "" for info in known}


def mark_unmirrored(source: Store, *, step: int, is_due: bool, others: Collection[int], adds: bool) -> None:
    """Add a step to the list of those to be copied, or take it off. Without any there is no such file.

    `others` that are due are written again if it `adds` them, or if there is no file: a store may not show it for a moment.
    """
    noted = find_unmirrored(source)
    known = {*(noted or ())} | ({*others} if adds or noted is None else set())
    steps = known - {step} | ({step} if is_due else set())
    if not steps:
        source.delete([UNMIRRORED])
    elif noted is None or steps != {*noted}:
        source.write(UNMIRRORED, ["\n".join([_HEAD, *map(str, sorted(steps)), ""]).encode()])
