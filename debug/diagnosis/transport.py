"""All arrived, yet it does not end: the device or the network did not start or finish it; P2P halves that differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane, elements_of, first_disagreement
from titan_ckpt.debug.diagnosis.mismatches.splits import split_mismatch
from titan_ckpt.debug.diagnosis.waiting.device_order import has_lost_head, has_order, head_rows, is_behind
from titan_ckpt.debug.diagnosis.waiting.wait_graph import is_queued
from titan_ckpt.debug.incident.confidence import IN_FLIGHT, Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import DumpKind, EventKind, FlagKind, VerdictKind
from titan_ckpt.debug.incident.operation_table import operation_blocks
from titan_ckpt.debug.incident.records import (
    COMPLETED,
    RECV,
    SCHEDULED,
    SEND,
    STARTED,
    Array,
    Evidence,
    Operation,
    RankRecord,
    Run,
    Verdict,
)


def transport(run: Run, lanes: Sequence[Lane]) -> Iterator[Verdict]:
    """SCHEDULED_NOT_STARTED, STARTED_NOT_COMPLETED and P2P_SIZE_MISMATCH."""
    found = [verdict for lane in lanes for verdict in _not_finished(run, lane)]
    together = [{*verdict.culprits, *verdict.victims} for verdict in found]
    for verdict, ranks in zip(found, together, strict=True):
        is_alone = verdict.verdict == VerdictKind.STUCK_ON_CPU or all(ranks & others for others in together)
        yield verdict if is_alone else replace(verdict, confidence=verdict.confidence * IN_FLIGHT)
    yield from _p2p_sizes(run)


def _not_finished(run: Run, lane: Lane) -> Iterator[Verdict]:
    """The first collective that all members issued alike and some did not complete, where states are known (NCCL)."""
    parted = first_disagreement(run, lane)
    unfit = split_mismatch(run, lane, parted)
    parted = parted if unfit is None else unfit.seq
    alike = lane.row if parted is None else lane.row[:, : parted - lane.first_seq]
    everywhere = np.flatnonzero((alike >= 0).all(axis=0))
    if not len(everywhere):
        return
    if not all(_has_dump(run, rank) for rank in lane.members):
        return  # a black box knows that a call returned, not what the device did
    states = np.stack([run.ranks[r].operations["state"][lane.row[i, everywhere]] for i, r in enumerate(lane.members)])
    if not (states != SCHEDULED).any():
        return  # gloo never leaves `scheduled`
    unfinished = np.flatnonzero((states != COMPLETED).any(axis=0))
    if not len(unfinished):
        return
    column = int(unfinished[0])
    at = states[:, column]
    seq = lane.first_seq + int(everywhere[column])
    if (late := _came_too_late(run, lane, seq)) is not None:
        yield late
        return
    is_timed = any(bool((run.ranks[rank].operations["started_ns"] > 0).any()) for rank in lane.members)
    waiting = tuple(lane.members[i] for i in np.flatnonzero(at == SCHEDULED)) if is_timed else ()
    rows = lane.seen_at(seq)
    if any(is_queued(run, rank, rows[rank]) for rank in waiting) or _is_behind(run, rows):
        return  # the wait is for what keeps that operation from ending
    running = tuple(lane.members[i] for i in np.flatnonzero(at == STARTED if is_timed else at != COMPLETED))
    if waiting and len(waiting) < len(lane.members):
        yield _verdict(run, lane, seq, waiting, VerdictKind.SCHEDULED_NOT_STARTED, Basis.NOT_STARTED)
    elif running:
        is_few = len(running) <= len(lane.members) // 2
        basis = Basis.FEW_NOT_COMPLETED if is_few else Basis.MANY_NOT_COMPLETED
        yield _verdict(run, lane, seq, running if is_few else (), VerdictKind.STARTED_NOT_COMPLETED, basis)


def same_operation(run: Run, lanes: Sequence[Lane]) -> Verdict | None:
    """STARTED_NOT_COMPLETED without a culprit, where all members of a group issued the same newest collective and none has
    ended it: so it is no rank's program that does not come. None if that is not so."""
    for lane in lanes:
        is_everywhere = not lane.is_silent.any() and int(lane.last.min()) == int(lane.last.max()) >= 0
        seq = int(lane.last[0])
        if is_everywhere and not lane.done.any() and not _is_behind(run, lane.seen_at(seq)):
            late = _came_too_late(run, lane, seq)
            return late or _verdict(run, lane, seq, (), VerdictKind.STARTED_NOT_COMPLETED, Basis.MANY_NOT_COMPLETED)
    return None


def _is_behind(run: Run, rows: Mapping[int, int]) -> bool:
    """Whether the device of a rank has an operation, by rank the row of it, queued behind another one."""
    return any(is_behind(run.ranks[rank], row) or has_lost_head(run.ranks[rank]) for rank, row in rows.items())


_TIMED_OUT = re.compile(r"(?:Timed out waiting|wait timeout after|timed out after) (\d{1,9}) ?ms")


def _came_too_late(run: Run, lane: Lane, seq: int) -> Verdict | None:
    """STUCK_ON_CPU on the one that issued an operation when the others had given it up, after their timeout."""
    rows = lane.seen_at(seq)
    created = {rank: int(run.ranks[rank].operations["created_ns"][row]) for rank, row in rows.items()}
    if len(created) < 2 or min(created.values()) <= 0 or any(flag.flag == FlagKind.CLOCK_SKEW for flag in run.flags):
        return None
    late = max(created, key=lambda rank: created[rank])
    others = tuple(rank for rank in created if rank != late)
    after_s = (created[late] - max(created[rank] for rank in others)) / 1e9
    limit_s = max((_limit_s(run, rank, rows[rank]) for rank in others), default=0.0)
    if not limit_s or after_s < limit_s:
        return None
    operation = run.operation(late, rows[late])
    frame = user_frame(operation.frames, run.wrappers)
    return Verdict(
        verdict=VerdictKind.STUCK_ON_CPU, culprits=(late,), victims=others, group=str(operation.group), seq=seq, op=operation.op,
        confidence=Basis.CAME_TOO_LATE.confidence,
        headline=f"rank {late} came to {operation.op} #{seq} of group {operation.group}{f' at {frame.place}' if frame else ''} "
        f"{after_s:.0f} s after all others, who had given it up after {limit_s:.0f} s: it was busy before",
        evidence=(Evidence.at(frame, text=f"issued it {after_s:.0f} s after the others", rank=late, source="flight recorder"),),
        chain=tuple((rank, late) for rank in others),
        next_steps=(
            "look at what that rank does before that line: an evaluation, a save, a download, a retry",
            "if it may take so long: a longer timeout for that group, or let the others wait in a barrier with one of its own",
        ),
    )  # fmt: skip


def _limit_s(run: Run, rank: int, row: int) -> float:
    """After how long a rank gave an operation up, by its error or its dump; 0 if nothing says that it did."""
    texts = (
        event.text for event in run.ranks[rank].events if event.kind in (EventKind.COMM_TIMEOUT, EventKind.WATCHDOG)
    )
    found = next((match for text in texts if (match := _TIMED_OUT.search(text))), None)
    if found is not None:
        return int(found.group(1)) / 1e3
    entry = run.ranks[rank].operations[row]
    is_watched = entry["state"] != COMPLETED and has_order(run.ranks[rank])  # by NCCL's watchdog
    return int(entry["timeout_ms"]) / 1e3 if is_watched else 0.0


def _has_dump(run: Run, rank: int) -> bool:
    return any(dump.kind == DumpKind.FLIGHT_RECORDER and dump.num_operations for dump in run.ranks[rank].dumps)


_TEXT = {
    VerdictKind.SCHEDULED_NOT_STARTED: "put {what} on a stream, but the device never started it: something before it on that "
    "stream does not end",
    VerdictKind.STARTED_NOT_COMPLETED: "issued {what}, which never completed: the network or a device is at fault, not the "
    "program",
}


def _verdict(run: Run, lane: Lane, seq: int, culprits: tuple[int, ...], verdict: VerdictKind, basis: Basis) -> Verdict:
    rows = lane.seen_at(seq)
    ranks = culprits or lane.members
    operation = run.operation(ranks[0], rows[ranks[0]])
    who = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:8])) if culprits else "all ranks"
    victims = tuple(rank for rank in lane.members if rank not in culprits)
    return Verdict(
        verdict=verdict,
        culprits=culprits,
        victims=victims,
        group=str(operation.group),
        seq=seq,
        op=operation.op,
        confidence=basis.confidence,
        headline=f"{who} " + _TEXT[verdict].format(what=f"{operation.op} #{seq} of group {operation.group}"),
        evidence=(
            Evidence.at(
                user_frame(operation.frames, run.wrappers), text=f"{operation.op} #{seq} is `{operation.state}`",
                rank=ranks[0], source="flight recorder",
            ),
        ),
        chain=tuple((rank, culprits[0]) for rank in victims) if culprits else (),
        next_steps=(
            f"on the hosts of {rank_list(ranks)}: `dmesg -T | grep -i xid`, `nvidia-smi`, `ibstat`, cables and switch ports",
            "ask NCCL which rank it misses: `ncclras -v` on any of these hosts (NCCL 2.24 and later)",
            "run nccl-tests (`all_reduce_perf -b 8 -e 1G -f 2`) over the same hosts; start again with NCCL_DEBUG=INFO",
        ),
    )  # fmt: skip


def _p2p_sizes(run: Run) -> Iterator[Verdict]:
    """The n-th send of a pair against the n-th receive, from the end where both rings are whole."""
    ranks = list(run.ranks)
    sends = (
        (block, (block.table["p2p"] == SEND) & (block.table["peer"] >= 0)) for block in operation_blocks(run.ranks)
    )
    senders = (block.owner[is_send] for block, is_send in sends if is_send.any())
    for rank in sorted({ranks[owner] for owners in senders for owner in np.unique(owners).tolist()}):
        table = run.ranks[rank].operations
        for peer in np.unique(table["peer"][(table["p2p"] == SEND) & (table["peer"] >= 0)]).tolist():
            if peer not in run.ranks:
                continue
            receives = _pair(run.ranks[peer].operations, RECV, rank)
            found = _first_difference(run, rank, _pair(table, SEND, peer), peer, receives)
            if found is not None:
                yield _p2p_verdict(run, *found)
    yield from (_p2p_verdict(run, *_of_the_job(run, found)) for found in _sizes_at_heads(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """One side of a message: its rank, its operation, and whether that rank exchanged such a size with the other before."""

    rank: int
    operation: Operation
    is_known_size: bool


def _sizes_at_heads(run: Run) -> Iterator[tuple[_Half, _Half]]:
    """Two devices that are at a send and a receive of one pair, of different sizes, where a full ring has lost the numbers."""
    at = {rank: _first_pairs(record) for rank, record in run.ranks.items() if has_order(record)}
    for rank, mine in at.items():
        for (direction, peer), row in mine.items():
            theirs = at.get(peer, {}).get((RECV, rank)) if direction == SEND else None
            if theirs is None:
                continue
            sent, received = run.operation(rank, row), run.operation(peer, theirs)
            if (
                sent.seq < 0
                and sent.sizes
                and received.sizes
                and elements_of(sent.sizes) != elements_of(received.sizes)
            ):
                yield _half(run, rank, row), _half(run, peer, theirs)


def _of_the_job(run: Run, halves: tuple[_Half, _Half]) -> tuple[_Half, _Half]:
    """The halves, of which neither rank or both had exchanged such a size: known is then what other ranks exchange."""
    if halves[0].is_known_size != halves[1].is_known_size:
        return halves
    ranks = {half.rank for half in halves}
    tables = [record.operations for rank, record in run.ranks.items() if rank not in ranks]
    used = {run.names.sizes[code] for table in tables for code in np.unique(table["sizes"][table["p2p"] != 0]).tolist()}
    first, second = (replace(half, is_known_size=half.operation.sizes in used) for half in halves)
    return first, second


def _first_pairs(record: RankRecord) -> dict[tuple[int, int], int]:
    """The first pending send to each peer, and receive from it, that a rank's device is at."""
    found: dict[tuple[int, int], int] = {}
    for row in head_rows(record):
        one = record.operations[row]
        if one["p2p"]:
            found.setdefault((int(one["p2p"]), int(one["peer"])), row)
    return found


def _half(run: Run, rank: int, row: int) -> _Half:
    table, operation = run.ranks[rank].operations, run.operation(rank, row)
    before = table[:row]
    same = (
        (before["p2p"] == operation.p2p) & (before["peer"] == operation.peer) & (before["sizes"] == table["sizes"][row])
    )
    return _Half(rank=rank, operation=operation, is_known_size=bool(same.any()))


def _pair(table: Array, direction: int, peer: int) -> list[int]:
    return [int(row) for row in np.flatnonzero((table["p2p"] == direction) & (table["peer"] == peer))]


def _first_difference(
    run: Run, sender: int, sends: Sequence[int], receiver: int, receives: Sequence[int]
) -> tuple[_Half, _Half] | None:
    """The first send and receive of a pair whose sizes differ."""
    theirs, ours = run.ranks[receiver].operations, run.ranks[sender].operations
    by_seq = {(int(theirs["group"][row]), int(theirs["seq"][row])): row for row in receives}
    sent_sizes: set[str] = set()
    received_sizes: set[str] = set()
    for row in sends:
        other = by_seq.get((int(ours["group"][row]), int(ours["seq"][row])))
        if other is None or ours["seq"][row] < 0:
            continue
        sent, received = run.operation(sender, row), run.operation(receiver, other)
        if sent.sizes and received.sizes and elements_of(sent.sizes) != elements_of(received.sizes):
            return (
                _Half(rank=sender, operation=sent, is_known_size=sent.sizes in sent_sizes),
                _Half(rank=receiver, operation=received, is_known_size=received.sizes in received_sizes),
            )
        sent_sizes.add(sent.sizes)
        received_sizes.add(received.sizes)
    return None


def _p2p_verdict(run: Run, send: _Half, receive: _Half) -> Verdict:
    ranks, basis = (send.rank, receive.rank), Basis.P2P_SIZE
    culprits: tuple[int, ...] = tuple(sorted(ranks))
    if send.is_known_size != receive.is_known_size:
        culprits, basis = ((receive.rank if send.is_known_size else send.rank),), Basis.P2P_SIZE_NEW
    sent, received = send.operation, receive.operation
    return Verdict(
        verdict=VerdictKind.P2P_SIZE_MISMATCH,
        culprits=culprits,
        victims=tuple(rank for rank in ranks if rank not in culprits),
        group=str(sent.group),
        seq=sent.seq,
        op="send/recv",
        confidence=basis.confidence,
        headline=f"rank {send.rank} sent {sent.sizes} elements to rank {receive.rank}, which expects {received.sizes} "
        f"({f'message {sent.seq}' if sent.seq >= 0 else 'the first that is pending'} between them)",
        evidence=tuple(_spelled(run, half) for half in (send, receive)),
        chain=((receive.rank, send.rank),),
        next_steps=("compare the shapes at the two call sites", "exchange shapes first where they depend on the data"),
    )


def _spelled(run: Run, half: _Half) -> Evidence:
    operation = half.operation
    text = f"{operation.op}({operation.sizes}, {operation.dtypes})"
    return Evidence.at(user_frame(operation.frames, run.wrappers), text=text, rank=half.rank, source="black box")
