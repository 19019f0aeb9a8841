"""What a rank waits in where its device runs operations in the order of their issue, as with NCCL: the first that is not done.

Each collective of torch waits for what was issued before it on the current stream (ProcessGroupNCCL::syncStream), so what was
issued after a pending operation is queued behind it, in whatever group. A dump without timing, torch's default, shows both as
`scheduled`. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from titan_ckpt.debug.incident.kinds import DumpKind, FlagKind, RankState
from titan_ckpt.debug.incident.records import COMPLETED, SEND, STARTED, Array, RankRecord, Run, Situation
from titan_ckpt.debug.incident.waits import pending


def has_order(record: RankRecord) -> bool:
    """Whether a rank's operations are those of a device: NCCL's dump and nothing else. (gloo's leave all operations `scheduled`,
    and a black box knows that a call returned, not what the device did.)"""
    kinds = {dump.kind for dump in record.dumps if dump.num_operations}
    return kinds == {DumpKind.FLIGHT_RECORDER}


def head_rows(record: RankRecord) -> tuple[int, ...]:
    """The rows that a device is at: the first pending collective, or the pending sends and receives before it, of which those
    that have started if that is known. () where nothing is pending."""
    table = record.operations
    rows = np.flatnonzero(pending(table))
    if not len(rows):
        return ()
    if table["p2p"][rows[0]] == 0:
        return (int(rows[0]),)
    later = np.flatnonzero(table["p2p"][rows] == 0)
    pairs = rows[: later[0]] if len(later) else rows
    started = pairs[table["state"][pairs] == STARTED]
    return tuple((started if len(started) else pairs).tolist())


def has_lost_head(record: RankRecord) -> bool:
    """Whether all that a full ring still holds is pending: what its device is at may have been overwritten."""
    is_cut = any(dump.first_record_id > 0 for dump in record.dumps)
    return is_cut and has_order(record) and bool(pending(record.operations)[:1].any())


def has_timed_out(run: Run) -> bool:
    """Whether NCCL gave an operation up: its watchdog has retired one that did not complete, or one is pending for longer than
    its timeout."""
    tables = [one.operations for one in run.ranks.values() if has_order(one) and one.operations["state"].any()]
    has_one_clock = not any(flag.flag == FlagKind.CLOCK_SKEW for flag in run.flags)
    newest_ns = max((int(table["created_ns"].max()) for table in tables if has_one_clock), default=0)
    return any(map(partial(_has_given_up, newest_ns=newest_ns), tables))


def _has_given_up(table: Array, newest_ns: int) -> bool:
    ends_ns = table["created_ns"] + table["timeout_ms"].astype(np.int64) * 1_000_000
    is_late = pending(table) & (table["timeout_ms"] > 0) & (table["created_ns"] > 0) & (ends_ns < newest_ns)
    return bool(((table["retired"] & (table["state"] != COMPLETED)) | is_late).any())


def is_behind(record: RankRecord, row: int) -> bool:
    """Whether an operation is queued behind another one of its rank's device."""
    return has_order(record) and bool(pending(record.operations)[row]) and row not in head_rows(record)


def waits_on_device(run: Run, record: RankRecord) -> bool:
    """Whether a rank's device is in an operation that does not end: then the rank waits, whatever it has not issued."""
    return has_order(record) and bool(head_rows(record)) and any(_states_of_device(run))


def ran_ahead(run: Run, rank: int, state: Situation) -> bool:
    """Whether a rank's main thread is past what its device waits in, such as in its loader."""
    return state.kind == RankState.ON_CPU and waits_on_device(run, run.ranks[rank])


def is_met(run: Run, rank: int) -> bool:
    """Whether the devices of all members of a group have come to the collective that a rank's device is at: then it waits for no
    rank there, and what is queued behind it does not hold it up."""
    record = run.ranks[rank]
    rows = head_rows(record) if waits_on_device(run, record) else ()
    if not rows or record.operations["p2p"][rows[0]]:
        return False
    [part] = heads(run, rank)
    members = run.groups[part[0]].members
    return bool(members) and all(member in run.ranks and part in heads(run, member) for member in members)


def _states_of_device(run: Run) -> Iterator[bool]:
    """Of each rank with a device's operations, whether any of them has another state than `scheduled`."""
    return (bool(record.operations["state"].any()) for record in run.ranks.values() if has_order(record))


def mixed_ranks(run: Run) -> list[int]:
    """Ranks with pending operations of several groups, or sends and receives beside collectives; [] if no dump is NCCL's."""
    found = []
    for rank, record in run.ranks.items():
        rows = record.operations[pending(record.operations)] if has_order(record) else record.operations[:0]
        if len(rows) > 1 and bool(((rows["group"] != rows["group"][0]) | (rows["p2p"] != rows["p2p"][0])).any()):
            found.append(rank)
    return found if any(_states_of_device(run)) else []


Part = tuple[int, int, int, int]  # group, number, and of a message its sender and receiver, else -1


def part_of(rank: int, group: int, seq: int, direction: int, peer: int) -> Part:
    """What an operation of a rank is: equal for all ranks that take part. `direction`: SEND, RECV, or 0 of a collective."""
    if not direction:
        return group, seq, -1, -1
    return group, seq, *((rank, peer) if direction == SEND else (peer, rank))


def _parts(rank: int, table: Array, rows: Iterable[int]) -> Iterator[Part]:
    for row in rows:
        yield part_of(rank, *(int(table[name][row]) for name in ("group", "seq", "p2p", "peer")))


def heads(run: Run, rank: int) -> set[Part]:
    """What a rank's device is at."""
    record = run.ranks[rank]
    return set(_parts(rank, record.operations, head_rows(record)))


def ranks_behind(run: Run, mixed: Iterable[int], most: int) -> dict[Part, list[int]]:
    """Of each operation the ranks, `most` of them, that have it queued behind another one."""
    found: defaultdict[Part, list[int]] = defaultdict(list)
    for rank in mixed:
        record = run.ranks[rank]
        at = head_rows(record)
        later = [row for row in np.flatnonzero(pending(record.operations)).tolist() if row not in at]
        for part in _parts(rank, record.operations, later):
            if len(found[part]) < most:
                found[part].append(rank)
    return found
