"""The operations of many ranks as one table, some ranks at a time: so a job of 16,384 ranks costs no call per rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titan_ckpt.debug.incident.records import NO_OPERATIONS, OPERATION, Array, RankRecord

MOST_OPERATIONS = 1 << 16
_SEQ_BITS = 31


@dataclass(frozen=True, kw_only=True)
class OperationBlock:
    """Some ranks' operations, one rank's after another's. `first` is the first rank's place among all ranks of the run."""

    table: Array
    first: int
    lengths: Array

    @cached_property
    def owner(self) -> Array:
        """Of each operation its rank's place among all ranks of the run, ascending."""
        return np.repeat(np.arange(self.first, self.first + len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def row(self) -> Array:
        """Of each operation its place in its rank's own table."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.table), dtype=np.int32) - np.repeat(starts.astype(np.int32), self.lengths)

    @cached_property
    def collectives(self) -> Array:
        """Which operations are collectives with a sequence number."""
        wanted: Array = (self.table["p2p"] == 0) & (self.table["seq"] >= 0)
        return wanted

    @cached_property
    def pairs(self) -> Pairs:
        """All collectives by group and rank."""
        return _pairs(self, self.collectives)


class BlockedRanks(dict[int, RankRecord]):
    """Ranks whose operations lie one after another in a few tables. Blocks of these need no copy, so they are kept, with
    what was computed from them."""

    def __init__(self, ranks: Mapping[int, RankRecord], kept: Sequence[OperationBlock]) -> None:
        super().__init__(ranks)
        self.blocks = tuple(kept)


LEAST_SHARING = 8  # ranks per table


def with_blocks(ranks: Mapping[int, RankRecord], homes: Sequence[tuple[Array, int] | None]) -> Mapping[int, RankRecord]:
    """The ranks as `BlockedRanks` if their operations fill whole tables in the ranks' order, else unchanged.

    `homes`: the table that a rank's operations are a slice of and the offset of that slice; None if it is of no table."""
    starts: list[int] = []
    tables: list[Array] = []
    lengths = [len(record.operations) for record in ranks.values()]
    at = 0
    for place, (home, length) in enumerate(zip(homes, lengths, strict=True)):
        if home is None and not length:
            continue
        if home is not None and home[1] == 0 and (not tables or at == len(tables[-1])):
            starts.append(place if tables else 0)
            tables.append(home[0])
            at = 0
        elif home is None or not tables or home[0] is not tables[-1] or home[1] != at:
            return ranks
        at += length
    if not tables or len(tables) * LEAST_SHARING > len(ranks) or at != len(tables[-1]):
        return ranks
    counts = np.array(lengths)
    ends = [*starts[1:], len(lengths)]
    return BlockedRanks(
        ranks,
        [OperationBlock(table=t, first=i, lengths=counts[i:j]) for t, i, j in zip(tables, starts, ends, strict=True)],
    )


def operation_blocks(ranks: Mapping[int, RankRecord]) -> Iterator[OperationBlock]:
    """All operations of a run, in blocks of about MOST_OPERATIONS; `owner` counts the ranks in the mapping's order."""
    if isinstance(ranks, BlockedRanks):
        yield from ranks.blocks
        return
    tables: list[Array] = []
    size = first = 0
    for place, record in enumerate(ranks.values()):
        tables.append(record.operations)
        size += len(record.operations)
        if size >= MOST_OPERATIONS or place == len(ranks) - 1:
            yield _block(tables, first)
            tables, size, first = [], 0, place + 1


def _block(tables: list[Array], first: int) -> OperationBlock:
    filled = [table.data for table in tables if table is not NO_OPERATIONS]
    table = tables[0] if len(tables) == 1 else np.frombuffer(b"".join(filled), OPERATION)
    lengths = np.fromiter(map(len, tables), np.int64, len(tables))
    return OperationBlock(table=table, first=first, lengths=lengths)


def column(ranks: Mapping[int, RankRecord], name: str, members: Sequence[int], rows: Array) -> Array:
    """Column `name` of some operations of each member, a line per member; `rows`: their places in the member's own table."""
    if not isinstance(ranks, BlockedRanks):
        return np.stack([ranks[rank].operations[name][rows[i]] for i, rank in enumerate(members)])
    lengths = np.concatenate([block.lengths for block in ranks.blocks])
    places = dict(zip(ranks, (np.cumsum(lengths) - lengths).tolist(), strict=True))
    starts = np.fromiter((places[rank] for rank in members), np.int64, len(members))
    values: Array = np.concatenate([block.table[name] for block in ranks.blocks])
    return values[starts[:, None] + rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What each rank of a block did on each of its groups. `places` lists the block's operations pair by pair, each pair's
    by sequence number; pair i has those from `starts[i]` on, `counts[i]` of them."""

    places: Array
    starts: Array
    counts: Array
    group: Array
    owner: Array

    @property
    def first(self) -> Array:
        """The place of each pair's operation of the lowest sequence number."""
        return self.places[self.starts]

    @property
    def last(self) -> Array:
        """The place of each pair's operation of the highest sequence number; the newest where several have it."""
        last: Array = self.places[self.starts + self.counts - 1]
        return last


def pairs_of(block: OperationBlock, wanted: Array) -> Pairs:
    """The collectives of a block that `wanted` is true of, by group and rank."""
    wanted = wanted & block.collectives
    return block.pairs if wanted.sum() == block.collectives.sum() else _pairs(block, wanted)


def _pairs(block: OperationBlock, wanted: Array) -> Pairs:
    places = np.flatnonzero(wanted)
    group, seq = block.table["group"][places].astype(np.int64), block.table["seq"][places]
    owner = block.owner[places]
    places_in_order = _order(group, owner, seq)
    group, owner, places = group[places_in_order], owner[places_in_order], places[places_in_order]
    begins = np.flatnonzero((np.diff(group, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0))
    counts = np.diff(begins, append=len(places))
    return Pairs(places=places, starts=begins, counts=counts, group=group[begins], owner=owner[begins])


def _order(group: Array, owner: Array, seq: Array) -> Array:
    """By group, then owner, then sequence number. One key is several times as fast as three, where one can hold them."""
    if not len(group):
        return np.zeros(0, np.int64)
    owners = int(owner[-1] - owner[0]) + 1
    if int(group.max()) * owners >= 1 << (63 - _SEQ_BITS):
        several: Array = np.lexsort((seq, owner, group))
        return several
    key = ((group * owners + (owner - owner[0])) << _SEQ_BITS) | seq
    order: Array = np.argsort(key, kind="stable")
    return order


class Distinct:
    """Different values, numbered in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, column: Array) -> None:
        """Number the values that are new."""
        new = [value for value in np.unique(column).tolist() if value not in self._numbers]
        for _, value in sorted((int((column == value).argmax()), value) for value in new):
            self._numbers[value] = len(self._numbers)

    @property
    def values(self) -> Array:
        """The value of each number."""
        return np.array(list(self._numbers), np.int64)

    def numbers(self, column: Array) -> Array:
        """The number of each value; all of them were added."""
        values = self.values
        order = np.argsort(values)
        return order[np.searchsorted(values, column, sorter=order)]
