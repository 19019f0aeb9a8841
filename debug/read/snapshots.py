"""Several snapshots of one rank become one record: the longest history, and the earliest knowledge of what was pending."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from titan_ckpt.debug.incident.records import COMPLETED, NO_OPERATIONS, Array

NO_FRAMES = 0


_NUMBER = re.compile(rb'"collective_seq_id": ?(\d{1,18})')


def newest_in_json(data: bytes) -> int:
    """The highest number of a collective in a dump in JSON; 0 if it has none.

    >>> newest_in_json(b'{"entries": [{"collective_seq_id": 7, "is_p2p": false}]}')
    7
    """
    return max(map(int, _NUMBER.findall(data)), default=0)


def merge_dumps(snapshots: Sequence[Array]) -> Array:
    """One table of operations out of Flight Recorder snapshots of the same process, oldest first.

    After a failure gloo marks an operation `retired` just as after success. So what an earlier snapshot saw pending counts
    as done only when its group went on afterwards.
    """
    known = sorted((s for s in snapshots if len(s)), key=lambda s: (int(s["created_ns"].max()), len(s)))
    if not known:
        return NO_OPERATIONS
    if len(known) == 1:
        return known[0]
    merged = known[-1].copy()
    for earlier in known[:-1]:
        _keep_pending(merged, earlier[(~earlier["retired"]) & (earlier["state"] != COMPLETED)])
    return merged


def _keep_pending(merged: Array, pending: Array) -> None:
    for entry in pending:
        same_group = (merged["group"] == entry["group"]) & (merged["p2p"] == entry["p2p"])
        if entry["p2p"]:
            same_group &= merged["peer"] == entry["peer"]
        went_on = (same_group & (merged["seq"] > entry["seq"])).any()
        if not went_on:
            merged["retired"][same_group & (merged["seq"] == entry["seq"])] = False


def add_box(dump: Array, box: Array, *, prefer_box: bool = False) -> Array:
    """The collectives of a dump with the box's P2P (which gloo's dumps lack); all of the box where there is no dump.

    What only one of the two has is added. `prefer_box`: where both have it take the box's, because some rank has only a box
    and the two name some operations differently.
    """
    if not len(dump):
        return box
    if not len(box):
        return dump
    if not prefer_box:
        dump = dump.copy()
        _finish_from_box(dump, box)
        _fill_from_box(dump, box)
    first, second = (box, dump) if prefer_box else (dump, box)
    extra = second[~np.isin(_keys(second), _keys(first)) & ((second["p2p"] != 0) | _is_newer(second, first))]
    if (dump["p2p"] != 0).any():  # NCCL's dumps have P2P, with numbers of their own
        extra = extra[extra["p2p"] == 0]
    both = np.concatenate([first, extra])
    return both[np.argsort(both["created_ns"], kind="stable")] if len(extra) else both


def _fill_from_box(dump: Array, box: Array) -> None:
    """The box's roots, and its call stacks for operations that the dump has without one: a recorder does not always ask torch for
    them."""
    without = np.flatnonzero((dump["frames"] == NO_FRAMES) | ((dump["p2p"] == 0) & (dump["peer"] < 0)))
    if not len(without):
        return
    ordered = box[np.argsort(_keys(box), kind="stable")]
    keys = _keys(dump)[without]
    found = ordered[np.searchsorted(_keys(ordered), keys).clip(max=len(box) - 1)]
    is_same = _keys(found) == keys
    rows, same = without[is_same], found[is_same]
    dump["frames"][rows] = np.where(dump["frames"][rows] == NO_FRAMES, same["frames"], dump["frames"][rows])
    dump["peer"][rows] = np.where(same["p2p"] == 0, same["peer"], dump["peer"][rows])


def _is_newer(table: Array, than: Array) -> Array:
    """Which collectives come after all of their group in `than`."""
    newest = {
        int(group): int(than["seq"][(than["group"] == group) & (than["p2p"] == 0)].max(initial=-1))
        for group in np.unique(table["group"])
    }
    return np.array(
        [int(seq) > newest[int(group)] for group, seq in zip(table["group"], table["seq"], strict=True)], bool
    )


def _keys(table: Array) -> Array:
    """One number per operation that is equal in a dump and in a box."""
    peer = np.where(table["p2p"] != 0, table["peer"], -1)  # a collective's is its root, which dumps do not hold
    kind = table["p2p"].astype(np.int64) * 131_072 + peer + 1
    keys: Array = (table["group"].astype(np.int64) << 52) ^ (kind << 32) ^ table["seq"]
    return keys


def _finish_from_box(dump: Array, box: Array) -> None:
    """The box knows whether a call returned; gloo's `retired` does not. Only each group's last collective matters."""
    collectives = box[box["p2p"] == 0]
    for group in np.unique(collectives["group"]):
        of_group = collectives[collectives["group"] == group]
        last = of_group[of_group["seq"].argmax()]
        if not last["retired"] and last["state"] != COMPLETED:
            dump["retired"][(dump["group"] == group) & (dump["seq"] == last["seq"]) & (dump["p2p"] == 0)] = False
