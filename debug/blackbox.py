"""The black box: a file of fixed layout that a rank maps into memory and writes with every operation.

It survives SIGKILL, because the pages belong to the kernel. Layout: a header, a ring of records, then text (JSON lines)
that the records' small integers point into. This module reads and lays out; `titan_ckpt.debug.hooks` writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_ckpt.debug.interning import Interner
from titan_ckpt.debug.records import COMPLETED, OPERATION, SCHEDULED, Array, Group, Heartbeat

MAGIC = b"TTNBOX01"
HEADER_BYTES = 512
TEXT_BYTES = 256 << 10
CAPACITY = 4096

# magic, rank, world size, pid, capacity, (unused), start
HEADER = struct.Struct("<8s4IQq")
# step, phase, time of the phase, last tick of the watching thread, stopped: from byte 128, so that they share a cache line
HEARTBEAT = struct.Struct("<qqqqq")
HEARTBEAT_AT, TEXT_USED_AT = 128, 192
TEXT_USED = struct.Struct("<q")

# created, ended, elements, seq, site, peer, group, op, dtype, p2p, outcome, number (from 1, modulo 2**32)
RECORD = struct.Struct("<qqqiiihhhbbI")
ENDED_AT, OUTCOME_AT = 8, 43
ENDED = struct.Struct("<q")
RUNNING, RETURNED, RAISED = 0, 1, 2
RECORD_DTYPE = np.dtype(
    {
        "names": ["created", "ended", "elements", "seq", "site", "peer", "group", "op", "dtype", "p2p", "outcome", "number"],
        "formats": ["<i8", "<i8", "<i8", "<i4", "<i4", "<i4", "<i2", "<i2", "<i2", "i1", "i1", "<u4"],
        "itemsize": RECORD.size,
    }
)  # fmt: skip

PHASES = (
    "", "init", "data", "forward", "backward", "optimizer", "ckpt_stage", "ckpt_upload", "ckpt_commit",
    "forward_backward", "validation", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A black box that was read."""

    rank: int
    world_size: int
    pid: int
    count: int
    capacity: int
    operations: Array
    groups: tuple[Group, ...]
    heartbeat: Heartbeat


def file_size(capacity: int) -> int:
    """Bytes of a box with room for `capacity` operations."""
    return HEADER_BYTES + capacity * RECORD.size + TEXT_BYTES


def read_heartbeat(data: bytes, source: str) -> Heartbeat:
    """The heartbeat from the first HEADER_BYTES of a box."""
    step, phase, phase_ns, alive_ns, stopped = HEARTBEAT.unpack_from(data, HEARTBEAT_AT)
    name = PHASES[phase] if 0 <= phase < len(PHASES) else ""
    return Heartbeat(
        step=step, phase=name, phase_ns=phase_ns, alive_ns=alive_ns, source=source, is_stopped=bool(stopped)
    )


def parse_box(data: bytes, source: str, interner: Interner) -> Box:
    """Read a box. ValueError when it is none or is damaged."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise ValueError("is no black box (wrong magic)")
    _, rank, world_size, pid, capacity, _, _ = HEADER.unpack_from(data)
    ring_end = HEADER_BYTES + capacity * RECORD.size
    if not 0 < capacity <= 1 << 24 or len(data) < ring_end or world_size > 1 << 24 or rank > 1 << 24:
        raise ValueError(f"is cut off: a ring of {capacity} records needs {ring_end} bytes, there are {len(data)}")
    (used,) = TEXT_USED.unpack_from(data, TEXT_USED_AT)
    tables = _tables(data[ring_end : ring_end + max(0, min(used, TEXT_BYTES))])
    records = np.frombuffer(data, RECORD_DTYPE, capacity, HEADER_BYTES)
    used_records = records[records["number"] > 0]
    count = int(used_records["number"].max(initial=0))
    records = used_records[np.argsort(used_records["number"], kind="stable")]
    groups = {key: _group(value) for key, value in tables["group"].items()}
    return Box(
        rank=rank,
        world_size=world_size,
        pid=pid,
        count=count,
        capacity=capacity,
        operations=_operations(records, tables, groups, interner),
        groups=tuple(groups.values()),
        heartbeat=read_heartbeat(data, source),
    )


def _tables(text: bytes) -> dict[str, dict[int, Any]]:
    tables: dict[str, dict[int, Any]] = {"group": {}, "op": {}, "dtype": {}, "site": {}}
    for line in text.split(b"\n"):
        try:
            kind, key, value = json.loads(line)
            tables[kind][int(key)] = value
        except (ValueError, TypeError, KeyError):
            continue  # a half-written last line, or damage: the records that need it show "not known"
    return tables


def _group(value: Any) -> Group:
    name, description, members = (*value, "", [])[:3] if isinstance(value, list) else ("?", "", [])
    ranks = tuple(rank for rank in members if isinstance(rank, int)) if isinstance(members, list) else ()
    return Group(name=str(name)[:200], description=str(description)[:200], members=ranks)


def _operations(
    records: Array, tables: Mapping[str, Mapping[int, Any]], groups: Mapping[int, Group], interner: Interner
) -> Array:
    unknown = interner.group(Group(name="?"))
    table = np.zeros(len(records), OPERATION)
    table["group"] = _translate(
        records["group"], {key: interner.group(group) for key, group in groups.items()}, unknown
    )
    table["op"] = _translate(records["op"], {k: interner.op(str(v)) for k, v in tables["op"].items()}, 0)
    table["dtypes"] = _translate(records["dtype"], {k: interner.dtype([str(v)]) for k, v in tables["dtype"].items()}, 0)
    table["frames"] = _translate(records["site"], {k: _site(v, interner) for k, v in tables["site"].items()}, 0)
    elements = {int(n): interner.size([[int(n)]]) if n >= 0 else 0 for n in np.unique(records["elements"])}
    table["sizes"] = _translate(records["elements"], elements, 0)
    for name, source in (("seq", "seq"), ("p2p", "p2p"), ("peer", "peer"), ("created_ns", "created")):
        table[name] = records[source]
    returned = records["outcome"] == RETURNED
    table["completed_ns"] = np.where(returned, records["ended"], 0)
    table["state"] = np.where(returned, COMPLETED, SCHEDULED)
    table["retired"] = returned
    return table


def _site(value: Any, interner: Interner) -> int:
    """A call stack [[file, line, function], ...], most recent call first."""
    if not isinstance(value, list):
        return 0
    frames = [
        {"filename": str(f[0]), "line": int(f[1]), "name": str(f[2])}
        for f in value
        if isinstance(f, list) and len(f) == 3 and isinstance(f[1], int)
    ]
    return interner.stack(frames) if frames else 0


def _translate(column: Array, table: Mapping[int, int], unknown: int) -> Array:
    """Each value of `column` looked up in `table`."""
    values, places = np.unique(column, return_inverse=True)
    return np.array([table.get(int(value), unknown) for value in values], np.int64)[places]
