"""Sends and receives as NCCL's dumps hold them, made comparable between two ranks. Pure.

NCCL numbers P2P per group and process, a whole batch by one number, and keeps the state of a batch in an entry of its own,
`coalesced`; the sends and receives in it stay `scheduled` for ever (ProcessGroupNCCL::endCoalescing).
"""

from __future__ import annotations

import numpy as np

from titan_ckpt.debug.incident.records import Array

UNKNOWN_NUMBER = -1


def settle_pairs(table: Array, number: Array, is_batch: Array, *, is_whole: bool) -> Array:
    """The table with batches' states given to their members, batches themselves left out, and each send or receive numbered
    within its pair from 1 (where the ring is whole; else the number is unknown). `number` is the dump's own."""
    for row in np.flatnonzero(is_batch):
        batch = table[row]
        inside = (table["p2p"] != 0) & (table["group"] == batch["group"]) & (number == number[row])
        for column in ("state", "retired", "started_ns", "completed_ns"):
            table[column][inside] = batch[column]
    rows = np.flatnonzero(table["p2p"] != 0)
    table["seq"][rows] = _ordinals(table[rows]) if is_whole else UNKNOWN_NUMBER
    return table[~is_batch]


def _ordinals(pairs: Array) -> Array:
    """1, 2, 3 ... within each (group, direction, peer), in the order of the table."""
    key = (pairs["group"].astype(np.int64) << 34) | (pairs["peer"].astype(np.int64) + 1 << 2) | pairs["p2p"]
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    counts = np.diff(np.append(starts, len(order)))
    ordinals = np.empty(len(order), np.int64)
    ordinals[order] = np.arange(len(order)) - np.repeat(starts, counts) + 1
    return ordinals
