"""Flight Recorder dumps (pickle and JSON) as columns.

Format: torch/csrc/distributed/c10d (ProcessGroupNCCL's TraceUtils.h, later FlightRecorder.hpp and FlightRecorderDetail.hpp). The
keys were compared with the sources that write versions 2.2, 2.3, 2.4, 2.7 and 2.10; of others only `seq_id`, `pg_name` and a bare
`pg_id` are tried as well. What gloo leaves out (states, P2P, a usable pg_config) stays unknown; nothing is guessed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from titan_ckpt.debug.incident.kinds import OperationState
from titan_ckpt.debug.incident.records import (
    COMPLETED,
    MAX_RANK,
    OPERATION,
    RECV,
    SCHEDULED,
    SEND,
    STARTED,
    Array,
    Group,
)
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.read.plain_pickle import looks_like_pickle, plain_loads
from titan_ckpt.parsing.json_values import parse_json

MAX_ENTRIES = 2_000_000
FREE_ENTRIES, BYTES_PER_ENTRY = 1000, 48
_STATES: Mapping[str, int] = {name: code for code, name in enumerate(OperationState)}
_NO_STATE = -1
_P2P = re.compile(r"\b(?:batch_)?(send|recv)\s*(\d+)\s*(?:->|<-)\s*(\d+)")
_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDump:
    """One dump: its operations as columns, and the groups that it describes."""

    version: str
    operations: Array
    first_record_id: int
    groups: Mapping[str, Group]
    has_usable_groups: bool
    is_whole: bool


def parse_dump(data: bytes, rank: int, interner: Interner) -> ParsedDump:
    """Read one dump of `rank`. ValueError (or UnsafeContentError) when it is not a dump or is damaged."""
    raw = plain_loads(data) if looks_like_pickle(data[:2]) else parse_json(data, "the dump")
    if not isinstance(raw, dict) or not isinstance(raw.get("entries", []), list | tuple):
        raise ValueError("holds no Flight Recorder dump (a mapping with `entries`)")
    entries: Sequence[Any] = raw.get("entries", [])
    if "entries" not in raw and "pg_config" not in raw and "version" not in raw:
        raise ValueError("holds no Flight Recorder dump (neither `entries` nor `version`)")
    most = min(MAX_ENTRIES, FREE_ENTRIES + len(data) // BYTES_PER_ENTRY)
    if len(entries) > most:
        raise ValueError(f"{len(entries)} entries; {len(data)} bytes hold no more than {most}")
    _check_size((raw.get("pg_config"), raw.get("version")), MAX_GROUP_PARTS)
    configured = _configured_groups(raw.get("pg_config"), interner)
    try:
        operations, used = _columns(entries, rank, configured, interner)
        first = int(entries[0].get("record_id", 0)) if entries else 0
        is_whole = first == 0 and _are_consecutive(entries)
        if (operations["p2p"] != 0).any():
            number = _numbers([entry.get("p2p_seq_id") for entry in entries])
            operations = _settle_pairs(operations, number, _batches(entries), is_whole=is_whole)
    except (TypeError, KeyError, AttributeError, OverflowError, IndexError, RecursionError) as error:
        raise ValueError(f"an entry is not as a dump's should be: {type(error).__name__}: {error}") from error
    return ParsedDump(
        version=str(raw.get("version", "?"))[:40],
        operations=operations,
        first_record_id=first,
        groups=configured,
        has_usable_groups=all(group.members for group in used),
        is_whole=is_whole,
    )


def _are_consecutive(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no entry is left out, as in a dump of pending operations only (`onlyactive`, TORCH_INCLUDE_ONLY_ACTIVE)."""
    return not entries or int(entries[-1].get("record_id", len(entries) - 1)) == len(entries) - 1


def _batches(entries: Sequence[Mapping[str, Any]]) -> Array:
    """Which entries stand for a whole batch of sends and receives."""
    return np.array(
        [bool(e.get("is_p2p")) and str(e.get("profiling_name")).endswith(":coalesced") for e in entries], bool
    )


def _configured_groups(raw: Any, interner: Interner) -> dict[str, Group]:
    """pg_config by group name; members as a tuple. Malformed entries are dropped."""
    groups: dict[str, Group] = {}
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if isinstance(value, dict):
            name = str(value.get("name") or key)[:200]
            members = interner.members(value.get("ranks"), _members)
            groups[name] = Group(name=name, description=str(value.get("desc", ""))[:200], members=members)
    return groups


_DIGITS = re.compile(r"[0-9]{1,9}")


def _members(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, str):
        if not re.fullmatch(r"[\[(]?[\d,\s]*[\])]?", ranks):
            return ()
        ranks = [int(digits) for digits in re.findall(r"\d{1,9}", ranks)]
    elif isinstance(ranks, list | tuple) and all(isinstance(rank, str) and _DIGITS.fullmatch(rank) for rank in ranks):
        ranks = [int(rank) for rank in ranks]
    if not isinstance(ranks, list | tuple) or not all(
        isinstance(rank, int) and 0 <= rank <= MAX_RANK for rank in ranks
    ):
        return ()
    return tuple(sorted(set(ranks)))


def _group_of(pair: Any, rank: int, configured: Mapping[str, Group]) -> Group:
    """The group of an entry's `process_group`, with its members if pg_config is usable."""
    name, description = (str(part)[:200] for part in (pair if isinstance(pair, list | tuple) else (pair, "")))
    known = configured.get(name)
    if known is None and description == "default_pg" and len(configured) == 1:
        known = next((group for group in configured.values() if not group.name), None)  # gloo keys it by ""
    members = known.members if known and rank in known.members else ()
    return Group(name=name, description=description, members=members)


_MOVING = (
    "collective_seq_id",
    "p2p_seq_id",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
_LASTING = (
    "process_group", "profiling_name", "state", "retired", "input_dtypes", "input_sizes", "output_sizes", "frames",
    "timeout_ms",
)  # fmt: skip
_PICK_MOVING, _PICK_LASTING = operator.itemgetter(*_MOVING), operator.itemgetter(*_LASTING)
_TIMES = {"created_ns": 2, "started_ns": 3, "completed_ns": 4}  # places in _MOVING
_OLD_NAMES = {"process_group": ("pg_name", "pg_id"), "collective_seq_id": ("seq_id",)}
_DEFAULTS = {"process_group": "0", "profiling_name": "?", "state": "", "retired": False}
_Lasting: TypeAlias = tuple[Any, str, str, Any, Any, Any, Any, Any, int | None]


def _columns(
    entries: Sequence[Mapping[str, Any]], rank: int, configured: Mapping[str, Group], interner: Interner
) -> tuple[Array, list[Group]]:
    """The entries as columns, and the groups they use. This is where large jobs spend their time: so what an entry has in
    common with those of other steps (all but numbers and times) is looked at once for all of them."""
    if not entries:
        return np.zeros(0, OPERATION), []
    try:
        moving, lasting = list(map(_PICK_MOVING, entries)), list(map(_PICK_LASTING, entries))
    except KeyError:  # older and JSON dumps lack some, or name them otherwise
        moving = [tuple(_field(entry, key) for key in _MOVING) for entry in entries]
        lasting = [tuple(_field(entry, key) for key in _LASTING) for entry in entries]
    which, distinct = _alike(lasting)
    words = _Words(rank=rank, configured=configured, interner=interner)
    rows = np.array([_row(one, words) for one in distinct], OPERATION)
    table = rows.take(which)
    numbers = list(zip(*moving, strict=True))
    sequence = _numbers(numbers[0])
    if rows["p2p"].any():
        sequence = np.where(table["p2p"] != 0, _numbers(numbers[1]), sequence)
    table["seq"] = np.minimum(sequence, _INT32)
    for name, place in _TIMES.items():
        table[name] = _numbers(numbers[place])
    _settle_states(table, np.array([_backend(str(one[1])) for one in distinct])[which])
    return table, [group for _, group in words.groups.values()]


def _settle_states(table: Array, backend: Array) -> None:
    """States by the times where a dump names none, and `retired` only of what its device ended.

    A backend that records states (NCCL, or any with one that is more than scheduled) retires also what timed out or was aborted
    (ProcessGroupNCCL: a work with an exception counts as completed), and then it was not.
    """
    unknown = table["state"] == _NO_STATE
    by_times = np.where(table["completed_ns"] > 0, COMPLETED, np.where(table["started_ns"] > 0, STARTED, SCHEDULED))
    table["state"] = np.where(unknown, by_times, table["state"])
    for name in np.unique(backend).tolist():
        of_backend = backend == name
        if name in _RECORD_STATES or bool((table["state"][of_backend] != SCHEDULED).any()):
            table["retired"][of_backend] &= table["state"][of_backend] == COMPLETED


def _field(entry: Mapping[str, Any], key: str) -> Any:
    for name in (key, *_OLD_NAMES.get(key, ())):
        if name in entry:
            return entry[name]
    return _DEFAULTS.get(key)


def _numbers(values: Sequence[int | None]) -> Array:
    try:
        return np.fromiter(values, np.int64, len(values))  # not np.array, which would look into lists
    except TypeError:  # a None
        return np.fromiter([value or 0 for value in values], np.int64, len(values))


MAX_ALIKE = 64
MAX_PARTS = 1 << 14  # of one entry
MAX_COMPARED = 1 << 28  # parts of entries that one dump may take to tell its entries apart
MAX_GROUP_PARTS = 1 << 22


def _alike(rows: Sequence[_Lasting]) -> tuple[list[int], list[_Lasting]]:
    """Of each row its number among the different ones. A training loop repeats itself: what followed the one before last
    time is tried first. torch stores each distinct frame once, so that equal call stacks are compared without looking in."""
    if not rows:
        return [], []
    which: list[int] = []
    distinct: list[_Lasting] = []
    places: dict[Any, list[int]] = {}
    following = [_find(rows[0], distinct, places)[0]]
    number, compared = 0, 0
    for row in rows:
        guess = following[number]
        if distinct[guess] != row:
            guess, cost = _find(row, distinct, places)
            following[number] = guess
            compared += cost
            if compared > MAX_COMPARED:
                raise ValueError("entries that take too long to tell apart")
            if guess == len(following):
                following.append(0)
        number = guess
        which.append(guess)
    return which, distinct


def _find(row: _Lasting, distinct: list[_Lasting], places: dict[Any, list[int]]) -> tuple[int, int]:
    """The number of a row, adding it, and what that cost in compared parts.

    Only those of the same operation with the same third frame (mostly the caller's) are compared with it.
    """
    parts = _check_size(row, MAX_PARTS)
    frames = row[7]
    near = frames[2] if frames and len(frames) > 2 else None
    alike = places.setdefault((str(row[1])[:200], id(near)), [])
    for number in alike:
        if distinct[number] == row:
            return number, parts * len(alike)
    if len(alike) < MAX_ALIKE:
        alike.append(len(distinct))
    distinct.append(row)
    return len(distinct) - 1, parts * len(alike)


def _check_size(value: Sequence[Any], most: int) -> int:
    """How many parts nested lists have. ValueError for more than `most`: a memo makes few bytes into so many that comparing or
    printing them would not end."""
    left = most
    inside: list[Any] = [value]
    while inside:
        parts = inside.pop()
        left -= len(parts)
        if left < 0:
            raise ValueError(f"a value has more than {most} parts, lists within lists counted each time")
        inside += [
            part if type(part) is not dict else tuple(part.values())
            for part in parts
            if type(part) is list or type(part) is tuple or type(part) is dict
        ]
    return most - left


@dataclass(slots=True, kw_only=True)
class _Words:
    """The names in one dump's entries, each looked up once."""

    rank: int
    configured: Mapping[str, Group]
    interner: Interner
    groups: dict[Any, tuple[int, Group]] = field(default_factory=dict)
    kinds: dict[str, _Kind] = field(default_factory=dict)

    def group(self, pair: Any) -> tuple[int, Group]:
        """The position and the group of an entry's `process_group`."""
        key = tuple(pair) if type(pair) is list else pair
        if key not in self.groups:
            group = _group_of(pair, self.rank, self.configured)
            self.groups[key] = self.interner.group(group), group
        return self.groups[key]

    def kind(self, name: str) -> _Kind:
        """The operation that `profiling_name` names."""
        if name not in self.kinds:
            self.kinds[name] = _operation_name(name, self.interner)
        return self.kinds[name]


def _row(one: _Lasting, words: _Words) -> tuple[int, ...]:
    """An entry without its numbers and times, as a row of OPERATION."""
    pair, name, state, retired, dtypes, sizes, output_sizes, frames, timeout_ms = one
    position, group = words.group(pair)
    kind, interner = words.kind(str(name)), words.interner
    sizes = output_sizes if kind.has_output_sizes else sizes
    code = _STATES.get(str(state).rpartition(".")[2].lower(), _NO_STATE)
    return (
        position, 0, kind.op, kind.p2p, code, bool(retired),
        interner.dtype(dtypes) if dtypes else 0, interner.size(sizes) if sizes else 0,
        interner.stack(frames) if frames else 0, _peer(group, kind.peer) if kind.p2p else -1,
        min(timeout_ms or 0, _INT32), 0, 0, 0,
    )  # fmt: skip


_RECORD_STATES = ("nccl", "xccl", "rccl", "ncclx", "hccl")


def _backend(name: str) -> str:
    """The backend that an operation's name begins with; "" where it names none."""
    return name.partition(":")[0] if ":" in name else ""


class _Kind(NamedTuple):
    """An operation parsed from its name: `p2p` is 0, SEND or RECV, `peer` its position in the group; `has_output_sizes`: the
    output is what all ranks size alike."""

    op: int
    p2p: int = 0
    peer: int = -1
    has_output_sizes: bool = False


def _operation_name(name: str, interner: Interner) -> _Kind:
    bare = name.partition(":")[2] or name
    match = _P2P.search(bare)
    if match:
        direction = SEND if match.group(1) == "send" else RECV
        return _Kind(op=interner.op(match.group(1)), p2p=direction, peer=int(match.group(3)))
    bare = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}.get(
        bare, bare
    )
    return _Kind(op=interner.op(bare), has_output_sizes=bare == "scatter")


def _peer(group: Group, peer_in_group: int) -> int:
    """The peer's global rank, where the group's members are known."""
    return group.members[peer_in_group] if 0 <= peer_in_group < len(group.members) else -1


# ------------------------------------------------------------------------------------------------- sends and receives
# NCCL numbers P2P per group and process, a whole batch by one number, and keeps the state of a batch in an entry of its own,
# `coalesced`; the sends and receives in it stay `scheduled` for ever (ProcessGroupNCCL::endCoalescing). Renumbered per pair
# they can be compared between two ranks.

UNKNOWN_NUMBER = -1


def _settle_pairs(table: Array, number: Array, is_batch: Array, *, is_whole: bool) -> Array:
    """The table with batches' states given to their members, batches themselves left out, and each send or receive numbered
    within its pair from 1 (where the ring is whole; else the number is unknown). `number` is the dump's own."""
    rows, batches = np.flatnonzero(table["p2p"] != 0), np.flatnonzero(is_batch)
    keys = np.stack([table["group"].astype(np.int64), number], axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    batch_of = np.full(len(table), -1)
    batch_of[which[batches]] = batches  # the last of several
    inside = rows[batch_of[which[rows]] >= 0]
    for column in ("state", "retired", "started_ns", "completed_ns"):
        table[column][inside] = table[column][batch_of[which[inside]]]
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
