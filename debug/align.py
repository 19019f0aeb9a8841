"""Collectives lined up by (group, sequence number): who is where, and where ranks disagree. Pure, columnar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.records import COMPLETED, Array, Names, Run

# Ranks may pass different sizes to these, or name them differently on the two sides.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced", "allgatherv", "all_gatherv")
_EQUAL_NAMES = {"gather": "gather", "scatter": "scatter"}
MAX_WINDOW = 1 << 16
BLOCK = 256  # columns looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The collectives of one group as a matrix: a row per member, a column per sequence number from `first_seq`.

    `row` is the position in the rank's own operations (-1: not seen). `last` is each member's newest sequence number
    (-1: none seen), `done` whether that one returned, `is_silent` whether nothing at all is known of the member.
    """

    group: int
    members: tuple[int, ...]
    first_seq: int
    row: Array
    signature: Array
    last: Array
    done: Array
    is_silent: Array

    def seen_at(self, seq: int) -> dict[int, int]:
        """Row by rank of those who issued `seq`."""
        column = self.row[:, seq - self.first_seq]
        return {rank: int(row) for rank, row in zip(self.members, column, strict=True) if row >= 0}


def lanes(run: Run) -> list[Lane]:
    """One lane per group that two or more ranks belong to, largest groups first."""
    sizes = _elements(run.names)
    ops = _op_codes(run.names)
    found = [lane for group in range(len(run.groups)) if (lane := _lane(run, group, sizes, ops)) is not None]
    return sorted(found, key=lambda lane: -len(lane.members))


def _lane(run: Run, group: int, sizes: Array, ops: Array) -> Lane | None:
    if run.groups[group].name == "?":
        return None
    ends = {rank: ends for rank, record in run.ranks.items() if (ends := _ends(record.operations, group)) is not None}
    members = run.groups[group].members or _users(run, group, tuple(ends))
    members = tuple(rank for rank in members if rank in run.ranks)
    if len(members) < 2 or not ends:
        return None
    highest = max(last for _, last in ends.values())
    first = max(min(lowest for lowest, _ in ends.values()), highest - MAX_WINDOW + 1)
    row = np.full((len(members), highest - first + 1), -1, np.int32)
    signature = np.full(row.shape, -1, np.int32)
    last, done = np.full(len(members), -1, np.int64), np.ones(len(members), bool)
    known: dict[int, int] = {}
    for i, rank in enumerate(members):
        table = run.ranks[rank].operations
        rows, seqs = _rows_of(table, group)
        if len(rows):
            last[i] = seqs[-1]
            done[i] = bool(table["retired"][rows[-1]] or table["state"][rows[-1]] == COMPLETED)
            keep = seqs >= first
            row[i, seqs[keep] - first] = rows[keep]
            signature[i, seqs[keep] - first] = _signature(table[rows[keep]], sizes, ops, known)
    silent = np.array([not run.ranks[rank].dumps for rank in members])
    return Lane(
        group=group,
        members=members,
        first_seq=first,
        row=row,
        signature=signature,
        last=last,
        done=done,
        is_silent=silent,
    )


def _is_of(table: Array, group: int) -> Array:
    """Which operations are collectives of `group`."""
    of_group: Array = (table["group"] == group) & (table["p2p"] == 0) & (table["seq"] >= 0)
    return of_group


def _ends(table: Array, group: int) -> tuple[int, int] | None:
    """A rank's lowest and highest sequence number on `group`."""
    seqs = table["seq"][_is_of(table, group)]
    return (int(seqs.min()), int(seqs.max())) if len(seqs) else None


def _rows_of(table: Array, group: int) -> tuple[Array, Array]:
    """A rank's collectives on `group`: their rows and sequence numbers, in the order of the latter."""
    rows = np.flatnonzero(_is_of(table, group))
    order = np.argsort(table["seq"][rows], kind="stable")
    return rows[order].astype(np.int32), table["seq"][rows[order]]


def _users(run: Run, group: int, seen: tuple[int, ...]) -> tuple[int, ...]:
    """Members of a group that nobody recorded: the world for the default group, else those who used it."""
    if run.groups[group].description == "default_pg":
        return tuple(run.ranks)
    return seen


def _signature(table: Array, sizes: Array, ops: Array, known: dict[int, int]) -> Array:
    """What was issued as a small number, equal for operations that may meet; `known` grows by those not seen before."""
    code = ops[table["op"]]
    elements = np.where(code & 1, 0, sizes[table["sizes"]])
    wide = (code.astype(np.int64) << 48) | (table["dtypes"].astype(np.int64) << 32) | elements
    distinct, places = np.unique(wide, return_inverse=True)
    return np.array([known.setdefault(value, len(known)) for value in distinct.tolist()], np.int32)[places]


def _op_codes(names: Names) -> Array:
    """A number per op name; odd where ranks may pass different sizes."""
    return np.array([2 * i + int(is_uneven(op)) for i, op in enumerate(names.ops)], np.int32)


def is_uneven(op: str) -> bool:
    """Whether members may legally pass different sizes to `op`."""
    return any(op == word or (word in op and word not in ("gather", "scatter")) for word in UNEVEN)


def _elements(names: Names) -> Array:
    """A number per sizes text that is equal when the numbers of elements are: shapes may differ, their product not."""
    distinct: dict[tuple[int, ...], int] = {}
    return np.array([distinct.setdefault(elements_of(text), len(distinct)) for text in names.sizes], np.int64)


def elements_of(sizes: str) -> tuple[int, ...]:
    """
    >>> elements_of("64x32, 8")
    (2048, 8)
    """
    if not sizes:
        return ()
    return tuple(_product(shape) for shape in sizes.split(", "))


def _product(shape: str) -> int:
    total = 1
    for size in shape.split("x"):
        total *= int(size)
    return total


def first_disagreement(lane: Lane) -> int | None:
    """The lowest sequence number at which two members issued different operations."""
    for start in range(0, lane.signature.shape[1], BLOCK):
        block = lane.signature[:, start : start + BLOCK]
        seen = block >= 0
        largest = block.max(axis=0)  # not seen is -1: never the largest where somebody was
        smallest = np.where(seen, block, np.iinfo(np.int32).max).min(axis=0)
        columns = np.flatnonzero((seen.sum(axis=0) > 1) & (largest != smallest))
        if len(columns):
            return lane.first_seq + start + int(columns[0])
    return None
