"""Flight Recorder dumps (pickle and JSON, versions 2.3 to 2.10) as columns.

Format: torch/csrc/distributed/c10d/FlightRecorder. What gloo leaves out (states, P2P, a usable pg_config) is left unknown
here, never guessed.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from titan_ckpt.debug.evidence import MAX_RANK
from titan_ckpt.debug.interning import Interner
from titan_ckpt.debug.pairs import settle_pairs
from titan_ckpt.debug.records import COMPLETED, OPERATION, RECV, SCHEDULED, SEND, STARTED, Array, Group
from titan_ckpt.debug.safe_pickle import looks_like_pickle, plain_loads

MAX_ENTRIES = 2_000_000
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_P2P = re.compile(r"\b(?:batch_)?(send|recv)\s*(\d+)\s*(?:->|<-)\s*(\d+)")
_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDump:
    """One dump: its operations as columns, and what it says of the groups."""

    version: str
    operations: Array
    first_record_id: int
    groups: Mapping[str, Group]
    has_usable_groups: bool
    is_whole: bool


def parse_dump(data: bytes, rank: int, interner: Interner) -> ParsedDump:
    """Read one dump of `rank`. ValueError (or UnsafeContentError) when it is not a dump or is damaged."""
    raw = plain_loads(data) if looks_like_pickle(data[:2]) else _parse_json(data)
    if not isinstance(raw, dict) or not isinstance(raw.get("entries", []), list | tuple):
        raise ValueError("holds no Flight Recorder dump (a mapping with `entries`)")
    entries: Sequence[Any] = raw.get("entries", [])
    if "entries" not in raw and "pg_config" not in raw and "version" not in raw:
        raise ValueError("holds no Flight Recorder dump (neither `entries` nor `version`)")
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries)} entries; no ring is larger than {MAX_ENTRIES}")
    configured = _configured_groups(raw.get("pg_config"), interner)
    try:
        operations, used = _columns(entries, rank, configured, interner)
        first = int(entries[0].get("record_id", 0)) if entries else 0
        if (operations["p2p"] != 0).any():
            number = _numbers([entry.get("p2p_seq_id") for entry in entries])
            operations = settle_pairs(operations, number, _batches(entries), is_whole=first == 0)
    except (TypeError, KeyError, AttributeError, OverflowError, IndexError) as error:
        raise ValueError(f"an entry is not as a dump's should be: {type(error).__name__}: {error}") from error
    return ParsedDump(
        version=str(raw.get("version", "?"))[:40],
        operations=operations,
        first_record_id=first,
        groups=configured,
        has_usable_groups=all(group.members for group in used),
        is_whole=first == 0,
    )


def _batches(entries: Sequence[Mapping[str, Any]]) -> Array:
    """Which entries stand for a whole batch of sends and receives."""
    return np.array(
        [bool(e.get("is_p2p")) and str(e.get("profiling_name")).endswith(":coalesced") for e in entries], bool
    )


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _configured_groups(raw: Any, interner: Interner) -> dict[str, Group]:
    """pg_config by group name; members as a tuple. What is not understood is dropped."""
    groups: dict[str, Group] = {}
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if isinstance(value, dict):
            name = str(value.get("name") or key)[:200]
            members = interner.members(value.get("ranks"), _members)
            groups[name] = Group(name=name, description=str(value.get("desc", ""))[:200], members=members)
    return groups


def _members(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, str):
        if not re.fullmatch(r"\[[\d,\s]*\]", ranks):
            return ()
        ranks = [int(digits) for digits in re.findall(r"\d{1,9}", ranks)]
    if not isinstance(ranks, list | tuple) or not all(
        isinstance(rank, int) and 0 <= rank <= MAX_RANK for rank in ranks
    ):
        return ()
    return tuple(sorted(set(ranks)))


def _group_of(pair: Any, rank: int, configured: Mapping[str, Group]) -> Group:
    """The group of an entry's `process_group`, with its members where pg_config can be believed."""
    name, description = (str(part)[:200] for part in (pair if isinstance(pair, list | tuple) else (pair, "")))
    known = configured.get(name)
    if known is None and description == "default_pg" and len(configured) == 1:
        known = next((group for group in configured.values() if not group.name), None)  # gloo keys it by ""
    members = known.members if known and rank in known.members else ()
    return Group(name=name, description=description, members=members)


class _Seen(dict[Any, Any]):
    """What `make` says of a key, asked once per distinct key: a dump repeats few values thousands of times."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._make(key)
        return value

    def of(self, keys: Iterable[Any]) -> list[Any]:
        """One value per key, by C code where the keys are known."""
        return list(map(self.__getitem__, keys))


def _columns(
    entries: Sequence[Mapping[str, Any]], rank: int, configured: Mapping[str, Group], interner: Interner
) -> tuple[Array, list[Group]]:
    """The entries as columns, and the groups they use. One pass per column: this is where large jobs spend their time."""
    table = np.zeros(len(entries), OPERATION)
    if not entries:
        return table, []
    raw = _raw_columns(entries)
    groups = _Seen(lambda pair: _group_of(pair, rank, configured))
    positions = _Seen(lambda pair: interner.group(groups[pair]))
    pairs = list(map(_hashable, raw["process_group"]))
    table["group"] = positions.of(pairs)
    kinds = _Seen(lambda name: _operation_name(str(name), interner))
    names = kinds.of(raw["profiling_name"])
    table["op"] = [kind[0] for kind in names]
    table["peer"] = -1
    sizes: Sequence[Any] = raw["input_sizes"]
    sequence: Sequence[Any] = raw["collective_seq_id"]
    if any(kind.has_output_sizes for kind in kinds.values()):
        sizes = [
            out if kind.has_output_sizes else into
            for kind, into, out in zip(names, sizes, raw["output_sizes"], strict=True)
        ]
    if any(kind.p2p for kind in kinds.values()):
        table["p2p"] = [kind.p2p for kind in names]
        table["peer"] = [
            _peer(groups[pair], kind.peer) if kind.p2p else -1 for kind, pair in zip(names, pairs, strict=True)
        ]
        sequence = [
            of_pair if kind.p2p else of_group
            for kind, of_group, of_pair in zip(names, sequence, raw["p2p_seq_id"], strict=True)
        ]
    table["seq"] = np.minimum(_numbers(sequence), _INT32)
    table["timeout_ms"] = np.minimum(_numbers(raw["timeout_ms"]), _INT32)
    table["state"] = _Seen(lambda state: _STATES.get(state, SCHEDULED)).of(raw["state"])
    table["retired"] = list(map(bool, raw["retired"]))
    table["dtypes"] = _Seen(_or_none(interner.dtype)).of([tuple(names or ()) for names in raw["input_dtypes"]])
    table["sizes"] = _Seen(_or_none(interner.size)).of(list(map(_shapes, sizes)))
    table["frames"] = _stacks(raw["frames"], interner)
    for column, key in _TIMES.items():
        table[column] = _numbers(raw[key])
    return table, list(groups.values())


def _numbers(values: Sequence[int | None]) -> Array:
    return np.array([value or 0 for value in values], np.int64)


def _shapes(shapes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    return (tuple(shapes[0]),) if shapes and len(shapes) == 1 else tuple(map(tuple, shapes or ()))


def _or_none(add: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda key: add(key) if key else 0


_Frames: TypeAlias = Sequence[Mapping[str, Any]]
MAX_ALIKE = 64


def _stacks(column: Sequence[_Frames | None], interner: Interner) -> list[int]:
    """Positions of the call stacks. torch stores each distinct frame once, so equal stacks hold the same objects and are
    compared without looking into them; only those with the same third frame (mostly the caller's) are compared at all."""
    known: dict[int, list[tuple[_Frames, int]]] = {}
    return [_stack(frames, known, interner) if frames else 0 for frames in column]


def _stack(frames: _Frames, known: dict[int, list[tuple[_Frames, int]]], interner: Interner) -> int:
    alike = known.setdefault(id(frames[2] if len(frames) > 2 else frames[0]), [])
    for other, position in alike:
        if other == frames:
            return position
    position = interner.stack(frames)
    if len(alike) < MAX_ALIKE:
        alike.append((frames, position))
    return position


_TIMES = {
    "created_ns": "time_created_ns",
    "started_ns": "time_discovered_started_ns",
    "completed_ns": "time_discovered_completed_ns",
}
_KEYS = (
    "process_group", "profiling_name", "collective_seq_id", "p2p_seq_id", "state", "retired", "input_dtypes",
    "input_sizes", "output_sizes", "frames", "timeout_ms", *_TIMES.values(),
)  # fmt: skip
_PICK = operator.itemgetter(*_KEYS)
_OLD_NAMES = {"process_group": ("pg_name", "pg_id"), "collective_seq_id": ("seq_id",)}
_DEFAULTS = {"process_group": "0", "profiling_name": "?", "state": "", "retired": False}


def _raw_columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Each field of all entries. Older and JSON dumps lack some, or name them otherwise."""
    try:
        rows = list(map(_PICK, entries))
    except KeyError:
        rows = [tuple(_field(entry, key) for key in _KEYS) for entry in entries]
    return dict(zip(_KEYS, zip(*rows, strict=True), strict=True))


def _field(entry: Mapping[str, Any], key: str) -> Any:
    for name in (key, *_OLD_NAMES.get(key, ())):
        if name in entry:
            return entry[name]
    return _DEFAULTS.get(key)


def _hashable(pair: Any) -> Any:
    return tuple(pair) if type(pair) is list else pair


class _Kind(NamedTuple):
    """What an operation's name says: p2p is 0, SEND or RECV; peer its place in the group; whose sizes all ranks share."""

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
