"""Who reads what that several ranks hold: each part is read by one of its holders, equal bytes by each. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from titan_ckpt.sharding.placement import Box

SMALLEST_BATCH_BYTES, BATCH_BYTES = 64 << 10, 8 << 20
BATCHES_PER_RANK = 4
"""A job's batches hold `BATCH_BYTES`, fewer if that would leave ranks without their share."""
PART = np.dtype([("file", np.int32), ("offset", np.int64), ("box", np.uint64), ("size", np.int64)])
Parts = npt.NDArray[np.void]
"""A row for each part that a rank needs: the file of its chunk and the offset there, a digest of its name and box, its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Parts that `reader` reads and sends to the other `holders` (ascending ranks, with the reader).

    `number` orders the batches of the job. `items` are the parts, as indices into this rank's own.
    """

    number: int
    reader: int
    holders: tuple[int, ...]
    items: list[int]


@dataclass(slots=True)
class _Group:
    """Parts of one file with the same holders, before they have a reader."""

    holders: tuple[int, ...]
    file: int
    size: int = 0
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """For each part its index on each holder."""


def part_row(file: int, offset: int, fqn: str, box: Box, size: int) -> tuple[int, int, int, int]:
    """One part as a row of PART; the same on every rank that needs it."""
    return file, offset, xxhash.xxh3_64_intdigest(repr((fqn, box.offsets, box.sizes)).encode()), size


def assign(parts: Sequence[Parts]) -> list[list[Batch]]:
    """The batches of each rank, in the order in which all ranks take them; parts that one rank alone needs are in none.

    `parts[rank]` are what that rank needs. A reader is the holder with the fewest bytes so far, the largest batches first; small
    neighbours in a file stay in one batch. No rank waits for another in a circle: the order is the same everywhere.

    >>> found = [(0, "a", 9 << 20), (10 << 20, "b", 5), (11 << 20, "c", 9)]
    >>> rows = [part_row(0, at, name, Box((0,), (size,)), size) for at, name, size in found]
    >>> both = np.array(rows, dtype=PART)
    >>> [(batch.reader, batch.items) for batch in assign([both, both])[1]]
    [(0, [0]), (1, [1, 2])]
    """
    groups, alone = _groups(parts)
    load = alone
    readers: dict[int, int] = {}
    for n in sorted(range(len(groups)), key=lambda n: -groups[n].size):
        reader = min(groups[n].holders, key=lambda rank: (load[rank], rank))
        readers[n] = reader
        load[reader] += groups[n].size
    taken = [0] * len(parts)
    turns = []
    for n in range(len(groups)):
        turns.append((taken[readers[n]], readers[n], n))
        taken[readers[n]] += 1
    batches: list[list[Batch]] = [[] for _ in parts]
    for number, (_, reader, n) in enumerate(sorted(turns)):
        group = groups[n]
        items = np.stack(group.rows).T.tolist()
        for rank, own in zip(group.holders, items, strict=True):
            batches[rank].append(Batch(number=number, reader=reader, holders=group.holders, items=own))
    return batches


def _groups(parts: Sequence[Parts]) -> tuple[list[_Group], list[int]]:
    """The parts with several holders in order of file and offset, and the bytes that each rank alone needs."""
    rows = np.concatenate(parts)
    ranks = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
    indices = np.concatenate([np.arange(len(own)) for own in parts])
    order = np.lexsort((ranks, rows["box"], rows["offset"], rows["file"]))
    rows, ranks, indices = rows[order], ranks[order], indices[order]
    is_new = np.ones(len(rows), dtype=bool)
    for name in ("file", "offset", "box"):
        is_new[1:] &= rows[name][1:] == rows[name][:-1]
    is_new[1:] = ~is_new[1:]
    starts = np.flatnonzero(is_new)
    ends = np.append(starts, len(rows))[1:]  # none without rows: a state of values alone
    single = starts[ends - starts == 1]
    alone = np.bincount(ranks[single], weights=rows["size"][single], minlength=len(parts)).astype(np.int64).tolist()
    several = int(rows["size"][starts[ends - starts > 1]].sum())
    most = min(BATCH_BYTES, max(SMALLEST_BATCH_BYTES, several // (BATCHES_PER_RANK * len(parts))))
    groups: list[_Group] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start > 1:
            _put(groups, tuple(ranks[start:end].tolist()), rows[start], indices[start:end], most)
    return groups, alone


def _put(
    groups: list[_Group], holders: tuple[int, ...], row: np.void, indices: npt.NDArray[np.int64], most: int
) -> None:
    """Add a part to the last group, which may hold `most` bytes, or begin another one."""
    size = int(row["size"])
    last = groups[-1] if groups else None
    if last is None or last.holders != holders or last.file != row["file"] or last.size + size > most:
        last = _Group(holders, int(row["file"]))
        groups.append(last)
    last.size += size
    last.rows.append(indices)
