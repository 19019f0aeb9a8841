"""Flight Recorder dumps (pickle and JSON, versions 2.3 to 2.10) as columns.

Format: torch/csrc/distributed/c10d/FlightRecorder. What gloo leaves out (states, P2P, a usable pg_config) is left unknown
here, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
    table = np.zeros(len(entries), OPERATION)
    groups: dict[Any, tuple[int, Group]] = {}
    ops: dict[str, tuple[int, int, int, bool]] = {}
    rows = []
    for entry in entries:
        pair = entry.get("process_group", entry.get("pg_name", entry.get("pg_id", "0")))
        key = tuple(pair) if isinstance(pair, list) else pair
        if key not in groups:
            group = _group_of(pair, rank, configured)
            groups[key] = (interner.group(group), group)
        position, group = groups[key]
        name = entry.get("profiling_name", "?")
        if name not in ops:
            ops[name] = _operation_name(str(name), interner)
        op, p2p, peer_in_group, sizes_from_output = ops[name]
        seq = entry.get("p2p_seq_id", 0) if p2p else entry.get("collective_seq_id", entry.get("seq_id", 0))
        state = _STATES.get(entry.get("state", ""), SCHEDULED)
        shapes = entry.get("output_sizes" if sizes_from_output else "input_sizes") or ()
        dtypes = entry.get("input_dtypes") or ()
        frames = entry.get("frames") or ()
        rows.append(
            (
                position,
                min(seq, _INT32),
                op,
                p2p,
                state,
                bool(entry.get("retired", False)),
                interner.dtype(dtypes),
                interner.size(shapes),
                interner.stack(frames) if frames else 0,
                _peer(group, peer_in_group) if p2p else -1,
                min(entry.get("timeout_ms") or 0, _INT32),
                entry.get("time_created_ns") or 0,
                entry.get("time_discovered_started_ns") or 0,
                entry.get("time_discovered_completed_ns") or 0,
            )
        )
    if rows:
        table[:] = rows
    return table, [group for _, group in groups.values()]


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
