"""The black box: a file of fixed layout that a rank maps into memory and writes with every operation.

It survives SIGKILL, because the pages belong to the kernel. Layout: a header, a ring of records, then text (JSON lines)
that the records' small integers point into, then the splits of the newest all_to_all operations. `debug.record.hooks`
writes it, `debug.read.black_boxes` reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_ckpt.debug.incident.records import Heartbeat, Splits

MAGIC = b"TTNBOX01"
HEADER_BYTES = 512
TEXT_BYTES = 256 << 10
CAPACITY = 4096

# magic, rank, world size, pid, capacity, operations so far (as of the last tick), start
HEADER = struct.Struct("<8s4IQq")
COUNT_AT = 24
COUNT = struct.Struct("<Q")
# step, phase, time of the phase, last tick of the watching thread, stopped: from byte 128, so that they share a cache line
HEARTBEAT = struct.Struct("<qqqqq")
# number of ticks at which the process had come further, time of the last of these; zeros in boxes of releases before 0.2
PROGRESS = struct.Struct("<qq")
HEARTBEAT_AT, PROGRESS_AT, TEXT_USED_AT = 128, 168, 192
TEXT_USED = struct.Struct("<q")
# Then 16 bytes, equal for equal texts, so that a reader of thousands of boxes reads each text once; 0: not known
TEXT_DIGEST_AT, TEXT_END = 200, 216
# whether the C library writes the exit status into the box, and that status; zeros in boxes of older releases
EXIT = struct.Struct("<ii")
EXIT_AT, NO_STATUS = 216, -(1 << 31)
STATUS_AT = EXIT_AT + 4
# since it last came further: ns that the main thread ran, and waited for a processor; zeros in older boxes, and where not known
SCHEDULE = struct.Struct("<qq")
SCHEDULE_AT = 224
# bytes written to the splits so far; zeros in boxes of releases before 0.2, which end with the text
SPLITS_USED = struct.Struct("<q")
SPLITS_USED_AT = 240

# created, ended, elements, seq, site, peer, group, op, dtype, p2p, outcome, number (from 1, modulo 2**32)
RECORD = struct.Struct("<qqqiiihhhbbI")
# The same in fewer parts: created, ended, elements, seq, site, (peer, group, op), (dtype, p2p, outcome), number
BEGIN = struct.Struct("<qqqiiQII")
ENDED_AT, OUTCOME_AT, NUMBER_AT = 8, 43, 44
ENDED, NUMBER = struct.Struct("<q"), struct.Struct("<I")
# RUNNING with an end is RETURNED: so a call that returns writes one number, not two
RUNNING, RETURNED, RAISED = 0, 1, 2
RECORD_DTYPE = np.dtype(
    {
        "names": ["created", "ended", "elements", "seq", "site", "peer", "group", "op", "dtype", "p2p", "outcome", "number"],
        "formats": ["<i8", "<i8", "<i8", "<i4", "<i4", "<i4", "<i2", "<i2", "<i2", "i1", "i1", "<u4"],
        "itemsize": RECORD.size,
    }
)  # fmt: skip

# The splits of one all_to_all: bytes written before it, the number of its record, the number of members; then for each member
# the elements sent to it, and for each those expected of it. They fill two halves in turn, each from its beginning.
SPLITS = struct.Struct("<qII")
SPLITS_BYTES, SPLITS_HALF = 64 << 10, 32 << 10

PHASES = (
    "", "init", "data", "forward", "backward", "optimizer", "ckpt_stage", "ckpt_upload", "ckpt_commit",
    "forward_backward", "validation", "other",
)  # fmt: skip


def file_size(capacity: int) -> int:
    """Bytes of a box with room for `capacity` operations."""
    return splits_at(capacity) + SPLITS_BYTES


def splits_at(capacity: int) -> int:
    """Where the splits begin in a box with room for `capacity` operations."""
    return HEADER_BYTES + capacity * RECORD.size + TEXT_BYTES


def pack_splits(used: int, number: int, splits: Splits) -> tuple[int, bytes]:
    """The splits of the record `number` as bytes, and how many bytes are written before them; `used`: so far."""
    members = len(splits[0])
    size = SPLITS.size + 16 * members
    begin = used if used % SPLITS_HALF + size <= SPLITS_HALF else -(-used // SPLITS_HALF) * SPLITS_HALF
    return begin, SPLITS.pack(begin, number, members) + struct.pack(f"<{2 * members}q", *splits[0], *splits[1])


def unpack_splits(area: bytes, used: int) -> dict[int, Splits]:
    """The splits in a box's last SPLITS_BYTES by the numbers of their records. What is left of an earlier filling of a half
    does not go on where the newer splits before it end, and is left out."""
    found: dict[int, Splits] = {}
    for half in (0, SPLITS_HALF):
        at, expected = half, None
        while at + SPLITS.size <= min(half + SPLITS_HALF, len(area)):
            begin, number, members = SPLITS.unpack_from(area, at)
            end = at + SPLITS.size + 16 * members
            is_first = expected is None and begin % SPLITS_BYTES == half
            if not 0 <= begin < used or not members or end > half + SPLITS_HALF or not (is_first or begin == expected):
                break
            values = struct.unpack_from(f"<{2 * members}q", area, at + SPLITS.size)
            found[number] = values[:members], values[members:]
            at, expected = end, begin + end - at
    return found


def read_heartbeat(data: bytes, source: str) -> Heartbeat:
    """The heartbeat from the first HEADER_BYTES of a box."""
    step, phase, phase_ns, alive_ns, stopped = HEARTBEAT.unpack_from(data, HEARTBEAT_AT)
    name = PHASES[phase] if 0 <= phase < len(PHASES) else ""
    moves, moved_ns = PROGRESS.unpack_from(data, PROGRESS_AT)
    is_written, status = EXIT.unpack_from(data, EXIT_AT)
    ran_ns, queued_ns = SCHEDULE.unpack_from(data, SCHEDULE_AT)
    return Heartbeat(
        step=step, phase=name, phase_ns=phase_ns, alive_ns=alive_ns, source=source, is_stopped=bool(stopped),
        moves=moves, moved_ns=moved_ns, status=status if is_written and status != NO_STATUS else None,
        ran_ns=ran_ns, queued_ns=queued_ns, is_leaving=bool(stopped and is_written and status == NO_STATUS),
    )  # fmt: skip


MAX_MEMBERS = 1 << 20


def pack_members(members: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks in equal steps, as those of a mesh are, in three numbers: 16,384 spelled out would fill half of the text.

    >>> pack_members([1, 3, 5, 7])
    {'from': 1, 'to': 7, 'by': 2}
    """
    if len(members) < 3:
        return list(members)
    steps = range(members[0], members[-1] + 1, members[1] - members[0]) if members[1] > members[0] else range(0)
    if len(steps) != len(members) or any(a != b for a, b in zip(steps, members, strict=True)):
        return list(members)
    return {"from": steps.start, "to": members[-1], "by": steps.step}


def unpack_members(packed: Any, most: int = MAX_MEMBERS) -> tuple[int, ...]:
    """Inverse of `pack_members`; () for malformed input, and for more than `most` ranks: three numbers can mean a million."""
    if isinstance(packed, list):
        return tuple(rank for rank in packed[:most] if type(rank) is int and 0 <= rank < MAX_MEMBERS)
    if not isinstance(packed, dict) or not all(isinstance(packed.get(key), int) for key in ("from", "to", "by")):
        return ()
    if packed["by"] < 1 or not 0 <= packed["from"] <= packed["to"] < MAX_MEMBERS:
        return ()
    ranks = range(packed["from"], packed["to"] + 1, packed["by"])
    return tuple(ranks) if len(ranks) <= most else ()
