"""Flight Recorder dumps (pickle and JSON, versions 2.3 to 2.10) as columns.

Format: torch/csrc/distributed/c10d/FlightRecorder. What gloo leaves out (states, P2P, a usable pg_config) is left unknown
here, never guessed.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_ckpt.debug.interning import Interner
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
    configured = _configured_groups(raw.get("pg_config"))
    try:
        operations, used = _columns(entries, rank, configured, interner)
        first = int(entries[0].get("record_id", 0)) if entries else 0
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


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _configured_groups(raw: Any) -> dict[str, Group]:
    """pg_config by group name; members as a tuple. What is not understood is dropped."""
    groups: dict[str, Group] = {}
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if isinstance(value, dict):
            name = str(value.get("name") or key)[:200]
            members = _members(value.get("ranks"))
            groups[name] = Group(name=name, description=str(value.get("desc", ""))[:200], members=members)
    return groups


def _members(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, str):
        if not re.fullmatch(r"\[[\d,\s]*\]", ranks):
            return ()
        ranks = [int(digits) for digits in re.findall(r"\d{1,9}", ranks)]
    if not isinstance(ranks, list | tuple) or not all(isinstance(rank, int) for rank in ranks):
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


def _columns(
    entries: Sequence[Mapping[str, Any]], rank: int, configured: Mapping[str, Group], interner: Interner
) -> tuple[Array, list[Group]]:
    """The entries as columns, and the groups they use. One pass per column: this is where large jobs spend their time."""
    table = np.zeros(len(entries), OPERATION)
    if not entries:
        return table, []
    raw = _raw_columns(entries)
    groups: dict[Any, tuple[int, Group]] = {}
    ops: dict[Any, tuple[int, int, int, bool]] = {}
    for pair in set(map(_hashable, raw["process_group"])):
        group = _group_of(pair, rank, configured)
        groups[pair] = interner.group(group), group
    for name in set(raw["profiling_name"]):
        ops[name] = _operation_name(str(name), interner)
    names = [ops[name] for name in raw["profiling_name"]]
    pairs = [groups[_hashable(pair)] for pair in raw["process_group"]]
    sizes = raw["input_sizes"]
    if any(name[3] for name in ops.values()):
        outputs = raw["output_sizes"]
        sizes = tuple(out if name[3] else into for name, into, out in zip(names, sizes, outputs, strict=True))
    sequence = raw["collective_seq_id"]
    if any(name[1] for name in ops.values()):
        pair_sequence = raw["p2p_seq_id"]
        sequence = tuple(p if name[1] else c for name, c, p in zip(names, sequence, pair_sequence, strict=True))
        table["peer"] = [
            _peer(group, name[2]) if name[1] else -1 for name, (_, group) in zip(names, pairs, strict=True)
        ]
    else:
        table["peer"] = -1
    table["group"] = [position for position, _ in pairs]
    table["op"] = [name[0] for name in names]
    table["p2p"] = [name[1] for name in names]
    table["seq"] = np.minimum(np.array([seq or 0 for seq in sequence], np.int64), _INT32)
    table["state"] = [_STATES.get(state, SCHEDULED) for state in raw["state"]]
    table["retired"] = [bool(retired) for retired in raw["retired"]]
    dtypes = [tuple(names or ()) for names in raw["input_dtypes"]]
    table["dtypes"] = _positions(dtypes, dtypes, interner.dtype)
    shapes = [tuple(map(tuple, shapes or ())) for shapes in sizes]
    table["sizes"] = _positions(shapes, shapes, interner.size)
    table["frames"] = _positions([_lines(frames) for frames in raw["frames"]], raw["frames"], interner.stack)
    table["timeout_ms"] = np.minimum(np.array([timeout or 0 for timeout in raw["timeout_ms"]], np.int64), _INT32)
    for column, key in _TIMES.items():
        table[column] = [moment or 0 for moment in raw[key]]
    return table, [group for _, group in groups.values()]


def _positions(keys: Sequence[Any], values: Sequence[Any], add: Callable[[Any], int]) -> list[int]:
    """The interned position of each value; a dump has few distinct ones, so `add` sees each of them once."""
    known: dict[Any, int] = {(): 0}
    for key, value in zip(keys, values, strict=True):
        if key not in known:
            known[key] = add(value)
    return [known[key] for key in keys]


def _lines(frames: Sequence[Mapping[str, Any]] | None) -> tuple[Any, ...]:
    """What tells the call stacks of one process apart."""
    return (*[frame["line"] for frame in frames], frames[0]["filename"], frames[0]["name"]) if frames else ()


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


def _operation_name(name: str, interner: Interner) -> tuple[int, int, int, bool]:
    """(op, SEND|RECV|0, peer within the group or -1, whether the output's sizes are the ones ranks share)."""
    bare = name.partition(":")[2] or name
    match = _P2P.search(bare)
    if match:
        direction = SEND if match.group(1) == "send" else RECV
        return interner.op(match.group(1)), direction, int(match.group(3)), False
    bare = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}.get(
        bare, bare
    )
    return interner.op(bare), 0, -1, bare == "scatter"


def _peer(group: Group, peer_in_group: int) -> int:
    """The peer's global rank, where the group's members are known."""
    return group.members[peer_in_group] if 0 <= peer_in_group < len(group.members) else -1
