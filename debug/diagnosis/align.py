"""Aligns collectives by (group, sequence number): each rank's position, and where ranks disagree. Pure, columnar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from titan_ckpt.debug.incident.operation_table import Distinct, OperationBlock, Pairs, operation_blocks, pairs_of
from titan_ckpt.debug.incident.records import COMPLETED, Array, Names, Run, Verdict

# Ranks may pass different sizes to these, or name them differently on the two sides.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced", "allgatherv", "all_gatherv")
SIZED_BY_RANK = ("all_gather", "reduce_scatter")  # lists of tensors: each rank may give or take another size
MAX_WINDOW = 1 << 16
BLOCK = 256  # columns processed together

# What an operation's code holds: its kind, its dtype, its root and its number of elements; of all but the kind 0 is "not known".
_OP_AT, _DTYPE_AT, _ROOT_AT = 48, 32, 25
_DTYPE, _ROOT, _ELEMENTS = (1 << 16) - 1, (1 << 7) - 1, (1 << 25) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The collectives of one group as a matrix: a row per member, a column per sequence number from `first_seq`.

    `row` is the position in the rank's own operations (-1: not seen). `last` is each member's newest sequence number
    (-1: none seen), `done` whether that one returned, `pending` its lowest number that has not returned (-1: none), `is_silent`
    whether nothing is known about the member, at least in this group. `codes` are what the signatures stand for.
    """

    group: int
    members: tuple[int, ...]
    first_seq: int
    row: Array
    signature: Array
    codes: Array
    last: Array
    done: Array
    pending: Array
    is_silent: Array

    @property
    def last_issued(self) -> int:
        """The newest number under which any member issued an operation."""
        columns = np.flatnonzero((self.row >= 0).any(axis=0))
        return self.first_seq + int(columns[-1]) if len(columns) else self.first_seq

    def seen_at(self, seq: int) -> dict[int, int]:
        """Row by rank of those who issued `seq`."""
        column = self.row[:, seq - self.first_seq]
        return {rank: int(row) for rank, row in zip(self.members, column, strict=True) if row >= 0}


def lanes(run: Run) -> list[Lane]:
    """One lane per group that two or more ranks belong to, largest groups first."""
    coder = _Coder(run.names)
    uses = _survey(run, coder)
    plans = _plans(run, uses)
    rows, signatures = _matrices(run, uses, plans, coder)
    found = [_lane(run, plan, rows, signatures, coder.known.values) for plan in plans]
    return sorted(found, key=lambda lane: -len(lane.members))


class _Coder:
    """Encodes issued operations as small numbers, equal for operations that may match."""

    def __init__(self, names: Names) -> None:
        self._sizes, self._ops = _elements(names), _op_codes(names)
        self.known = Distinct()

    def wide(self, table: Array) -> Array:
        """Encode each issued operation as one large number."""
        code = self._ops[table["op"]]
        elements = np.where(code & 1, 0, self._sizes[table["sizes"]])
        root = np.where((table["p2p"] == 0) & (table["peer"] >= 0), 1 + table["peer"] % _ROOT, 0).astype(np.int64)
        dtype = table["dtypes"].astype(np.int64)
        wide: Array = (code.astype(np.int64) << _OP_AT) | (dtype << _DTYPE_AT) | (root << _ROOT_AT) | elements
        return wide


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """Each rank's use of each group, in block order: index of the rank, lowest and highest sequence number, whether the newest
    operation returned, the lowest number that did not. `longest` is the largest number of operations of any rank."""

    group: Array
    owner: Array
    lowest: Array
    highest: Array
    is_done: Array
    pending: Array
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where a group's matrix starts in the cells of all groups (`base`), and which uses fill which of its rows."""

    group: int
    members: tuple[int, ...]
    first: int
    width: int
    base: int
    uses: Array
    places: Array
    last: Array
    done: Array
    pending: Array


def _collectives(run: Run) -> Iterator[tuple[OperationBlock, Pairs]]:
    """All collectives of groups that have a name."""
    is_named = np.array([group.name != "?" for group in run.groups], bool)
    for block in operation_blocks(run.ranks):
        table = block.table
        if len(table):
            yield block, pairs_of(block, is_named[table["group"]])


def _survey(run: Run, coder: _Coder) -> _Uses:
    columns: list[tuple[Array, ...]] = []
    longest = 0
    for block, pairs in _collectives(run):
        table = block.table
        coder.known.add(coder.wide(table)[np.sort(pairs.places)])
        newest = table[pairs.last]
        is_done = newest["retired"] | (newest["state"] == COMPLETED)
        columns.append(
            (pairs.group, pairs.owner, table["seq"][pairs.first], newest["seq"], is_done, _pending(block, pairs))
        )
        longest = max(longest, int(block.lengths.max()) - 1)
    group, owner, lowest, highest, is_done, pending = (
        [np.concatenate(parts) for parts in zip(*columns, strict=True)] if columns else [np.zeros(0, np.int64)] * 6
    )
    return _Uses(
        group=group, owner=owner, lowest=lowest, highest=highest, is_done=is_done, pending=pending, longest=longest
    )


def _pending(block: OperationBlock, pairs: Pairs) -> Array:
    """The lowest number of each pair that has not returned, -1 if all have."""
    if not len(pairs.starts):
        return np.zeros(0, np.int64)
    none = np.iinfo(np.int32).max
    table = block.table
    is_open = ~table["retired"] & (table["state"] != COMPLETED)
    numbers = np.where(is_open, table["seq"], none)[pairs.places]
    lowest: Array = np.minimum.reduceat(numbers, pairs.starts)
    return np.where(lowest == none, -1, lowest)


def _plans(run: Run, uses: _Uses) -> list[_Plan]:
    order = np.argsort(uses.group, kind="stable")
    begins = np.flatnonzero(np.diff(uses.group[order], prepend=-1))
    ranks = np.fromiter(run.ranks, np.int64, len(run.ranks))
    plans: list[_Plan] = []
    base = 0
    for of_group in np.split(order, begins[1:]) if len(order) else ():
        plan = _plan(run, uses, of_group, ranks, base)
        if plan is not None:
            plans.append(plan)
            base += len(plan.members) * plan.width
    return plans


def _plan(run: Run, uses: _Uses, of_group: Array, ranks: Array, base: int) -> _Plan | None:
    group = int(uses.group[of_group[0]])
    users = ranks[uses.owner[of_group]]
    members = run.groups[group].members or _users(run, group, users)
    members = tuple(rank for rank in members if rank in run.ranks)
    if len(members) < 2:
        return None
    places = _places(np.array(members), users)
    is_member = places >= 0
    of_members, places = of_group[is_member], places[is_member]
    highest = int(uses.highest[of_group].max())
    first = max(int(uses.lowest[of_group].min()), highest - MAX_WINDOW + 1)
    last, done = np.full(len(members), -1, np.int64), np.ones(len(members), bool)
    last[places], done[places] = uses.highest[of_members], uses.is_done[of_members]
    pending = np.full(len(members), -1, np.int64)
    pending[places] = uses.pending[of_members]
    return _Plan(
        group=group, members=members, first=first, width=highest - first + 1, base=base,
        uses=of_members, places=places, last=last, done=done, pending=pending,
    )  # fmt: skip


def _places(members: Array, ranks: Array) -> Array:
    """Each rank's index among the members; -1 for non-members."""
    order = np.argsort(members, kind="stable")
    found = order[np.minimum(np.searchsorted(members, ranks, sorter=order), len(members) - 1)]
    return np.where(members[found] == ranks, found, -1)


def _users(run: Run, group: int, seen: Array) -> tuple[int, ...]:
    """Members of a group without recorded members: the world for the default group, else the ranks that used it."""
    return tuple(run.ranks) if run.groups[group].description == "default_pg" else tuple(seen.tolist())


def _matrices(run: Run, uses: _Uses, plans: Sequence[_Plan], coder: _Coder) -> tuple[Array, Array]:
    """The rows and signatures of all lanes, one matrix after another, in the narrowest types that hold them."""
    offset = np.zeros(len(uses.group), np.int64)
    first = np.full(len(uses.group), 1 << 31, np.int64)  # default for uses outside every lane
    for plan in plans:
        first[plan.uses] = plan.first
        offset[plan.uses] = plan.base + plan.places * plan.width - plan.first
    num_cells = sum(len(plan.members) * plan.width for plan in plans)
    rows = np.full(num_cells, -1, _narrowest(uses.longest))
    signatures = np.full(num_cells, -1, _narrowest(len(coder.known)))
    at = 0
    for block, pairs in _collectives(run):
        use = np.repeat(np.arange(at, at + len(pairs.counts)), pairs.counts)
        at += len(pairs.counts)
        is_kept = block.table["seq"][pairs.places] >= first[use]
        places, use = pairs.places[is_kept], use[is_kept]
        cells = offset[use] + block.table["seq"][places]
        rows[cells] = block.row[places]
        signatures[cells] = coder.known.numbers(coder.wide(block.table)[places])
    return rows, signatures


def _narrowest(highest: int) -> type[np.signedinteger[Any]]:
    return next(kind for kind in (np.int8, np.int16, np.int32) if highest <= np.iinfo(kind).max)


def _lane(run: Run, plan: _Plan, rows: Array, signatures: Array, codes: Array) -> Lane:
    shape = len(plan.members), plan.width
    cells = slice(plan.base, plan.base + shape[0] * shape[1])
    return Lane(
        group=plan.group,
        members=plan.members,
        first_seq=plan.first,
        row=rows[cells].reshape(shape),
        signature=signatures[cells].reshape(shape),
        codes=codes,
        last=plan.last,
        done=plan.done,
        pending=plan.pending,
        is_silent=_silent(run, plan),
    )


def _silent(run: Run, plan: _Plan) -> Array:
    """Which members left no dump, or one without what the others completed together with them: a black box alone lacks what C++
    issued."""
    is_without: Array = np.array([not run.ranks[rank].dumps for rank in plan.members])
    have_met = bool((plan.done & (plan.last >= 0)).any() or (plan.pending > plan.first).any())
    return is_without | (plan.last < 0) if have_met else is_without


def _op_codes(names: Names) -> Array:
    """A number per op name; odd where ranks may pass different sizes."""
    return np.array([2 * i + int(is_uneven(op)) for i, op in enumerate(names.ops)], np.int32)


def is_uneven(op: str) -> bool:
    """Whether members may legally pass different sizes to `op`."""
    return any(op == word or (word in op and word not in ("gather", "scatter")) for word in UNEVEN)


def _elements(names: Names) -> Array:
    """A number per sizes text, equal when the element counts are equal, even if the shapes differ."""
    distinct: dict[tuple[int, ...], int] = {(): 0}
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


def can_match(codes: Sequence[int]) -> bool:
    """Whether operations of these codes may be parts of one: of one kind, and equal in all that is known of several."""
    if len({code >> _OP_AT for code in codes}) > 1:
        return False
    return all(len({code >> at & mask for code in codes} - {0}) <= 1 for at, mask in _PARTS)


_PARTS = ((_DTYPE_AT, _DTYPE), (_ROOT_AT, _ROOT), (0, _ELEMENTS))


def first_disagreement(run: Run, lane: Lane, *, with_met: bool = False) -> int | None:
    """The lowest sequence number at which two members issued operations that cannot match.

    Not one that all completed, unless `with_met`, and not sizes that each rank chooses: where they differed before and all
    completed it.
    """
    known: dict[tuple[int, ...], bool] = {}
    varying: set[int] = set()
    for start in range(0, lane.signature.shape[1], BLOCK):
        columns = start + _different(lane.signature[:, start : start + BLOCK])
        columns = columns[[_disagree(lane, column, known) for column in columns.tolist()]] if len(columns) else columns
        met = were_met(run, lane, columns)
        for column, is_met in zip(columns.tolist(), met.tolist(), strict=True):
            kinds = {code >> _OP_AT for code in lane.codes[lane.signature[lane.row[:, column] >= 0, column]].tolist()}
            is_free = len(kinds) == 1 and run.names.ops[min(kinds) >> 1] in SIZED_BY_RANK
            if is_met and is_free:
                varying |= kinds
            if not (is_free and kinds <= varying) and (with_met or not is_met):
                return lane.first_seq + int(column)
    return None


def _different(block: Array) -> Array:
    """The columns in which two members' signatures differ."""
    seen = block >= 0
    largest = block.max(axis=0)  # -1 is "not seen": never the largest of several
    smallest = np.where(seen, block, np.iinfo(block.dtype).max).min(axis=0)
    return np.flatnonzero((seen.sum(axis=0) > 1) & (largest != smallest))


def _disagree(lane: Lane, column: int, known: dict[tuple[int, ...], bool]) -> bool:
    """Whether two operations of a column cannot match."""
    signatures = tuple(np.unique(lane.signature[:, column][lane.signature[:, column] >= 0]).tolist())
    if signatures not in known:
        known[signatures] = not can_match(lane.codes[list(signatures)].tolist())
    return known[signatures]


def with_odd_marked(run: Run, lane: Lane, top: Verdict) -> Lane:
    """The lane with equal signatures of operations that match, as a screen shows them, and one of its own for each that does not.

    They are compared with what most members issued; from the verdict's operation on, most of those that it does not blame.
    Operations that all completed matched, whatever each passed.
    """
    columns = np.concatenate([
        start + _different(lane.signature[:, start : start + BLOCK]) for start in range(0, lane.signature.shape[1], BLOCK)
    ] or [np.zeros(0, np.int64)])  # fmt: skip
    if not len(columns):
        return lane
    blamed = np.isin(lane.members, top.culprits or top.suspects)
    is_told = str(run.groups[lane.group]) == top.group and top.seq is not None and bool(blamed.any())
    told = top.seq - lane.first_seq if is_told and top.seq is not None else lane.signature.shape[1]
    signature = lane.signature.astype(np.int32)
    for column, is_met in zip(columns.tolist(), were_met(run, lane, columns).tolist(), strict=True):
        given = lane.signature[:, column]
        judges = given[~blamed] if column >= told and (given[~blamed] >= 0).any() else given
        values, counts = np.unique(judges[judges >= 0], return_counts=True)
        usual = int(values[counts.argmax()])
        odd = [] if is_met and column != told else [v for v in np.unique(given[given >= 0]).tolist()
               if not can_match([int(lane.codes[usual]), int(lane.codes[v])])]  # fmt: skip
        is_odd = np.isin(given, odd)
        signature[:, column] = np.where(given < 0, -1, usual)
        signature[is_odd, column] = len(lane.codes) + np.arange(int(is_odd.sum()))
    return replace(lane, signature=signature)


def were_met(run: Run, lane: Lane, columns: Array) -> Array:
    """Of which columns all members completed an operation of one kind: then it was no mismatch, whatever each passed (a root
    has inputs where others have none, gathered tensors differ in size)."""
    if not len(columns):
        return columns.astype(bool)
    rows = lane.row[:, columns]
    kinds = lane.codes[lane.signature[:, columns]] >> _OP_AT
    met: Array = (rows >= 0).all(axis=0) & (kinds == kinds[0]).all(axis=0)
    for place in np.flatnonzero(lane.last >= 0).tolist() if met.any() else ():
        table = run.ranks[lane.members[place]].operations
        is_past = lane.first_seq + columns < lane.last[place]  # gloo's `retired` alone also follows a failure
        met &= (table["state"][rows[place]] == COMPLETED) | (table["retired"][rows[place]] & is_past)
    return met
