"""All arrived, yet it does not end: the device or the network did not start or finish it; P2P halves that differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane, elements_of
from titan_ckpt.debug.incident.frames import user_frame
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
    Run,
    Verdict,
)


def transport(run: Run, lanes: Sequence[Lane]) -> Iterator[Verdict]:
    """SCHEDULED_NOT_STARTED, STARTED_NOT_COMPLETED and P2P_SIZE_MISMATCH."""
    for lane in lanes:
        yield from _not_finished(run, lane)
    yield from _p2p_sizes(run)


def _not_finished(run: Run, lane: Lane) -> Iterator[Verdict]:
    """The first collective that all members issued alike and some did not complete, where states are known (NCCL)."""
    everywhere = np.flatnonzero((lane.row >= 0).all(axis=0))
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
    waiting = tuple(lane.members[i] for i in np.flatnonzero(at == SCHEDULED))
    running = tuple(lane.members[i] for i in np.flatnonzero(at == STARTED))
    if waiting and len(waiting) < len(lane.members):
        yield _verdict(run, lane, seq, "SCHEDULED_NOT_STARTED", waiting, 0.8, _NOT_STARTED)
    elif running:
        few = len(running) <= len(lane.members) // 2
        yield _verdict(
            run, lane, seq, "STARTED_NOT_COMPLETED", running if few else (), 0.7 if few else 0.6, _NOT_COMPLETED
        )


def _has_dump(run: Run, rank: int) -> bool:
    return any(dump.kind == "flight_recorder" and dump.num_operations for dump in run.ranks[rank].dumps)


_NOT_STARTED = (
    "put {op} #{seq} of group {group} on a stream, but the device never started it: something before it on that stream "
    "does not end"
)
_NOT_COMPLETED = (
    "started {op} #{seq} of group {group}, which never completed: the network or a device is at fault, not the program"
)


def _verdict(
    run: Run, lane: Lane, seq: int, name: str, culprits: tuple[int, ...], confidence: float, says: str
) -> Verdict:
    rows = lane.seen_at(seq)
    ranks = culprits or lane.members
    operation = run.operation(ranks[0], rows[ranks[0]])
    frame = user_frame(operation.frames, run.wrappers)
    who = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:8])) if culprits else "all ranks"
    return Verdict(
        verdict=name, culprits=culprits, victims=tuple(r for r in lane.members if r not in culprits),
        group=str(operation.group), seq=seq, op=operation.op, confidence=confidence,
        headline=f"{who} " + says.format(op=operation.op, seq=seq, group=operation.group),
        evidence=(
            Evidence(
                text=f"{operation.op} #{seq} is `{operation.state}`", rank=ranks[0], source="flight recorder",
                file=frame.file if frame else "", line=frame.line if frame else 0,
            ),
        ),
        chain=tuple((r, culprits[0]) for r in lane.members if r not in culprits) if culprits else (),
        next_steps=(
            "check the links and devices of these ranks (dmesg for Xid, ibstat, nvidia-smi)",
            "run nccl-tests over the same hosts",
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
                yield _p2p_verdict(run, rank, peer, *found)


def _pair(table: Array, direction: int, peer: int) -> list[int]:
    return [int(row) for row in np.flatnonzero((table["p2p"] == direction) & (table["peer"] == peer))]


def _first_difference(
    run: Run, sender: int, sends: Sequence[int], receiver: int, receives: Sequence[int]
) -> tuple[Operation, Operation, bool, bool] | None:
    theirs, ours = run.ranks[receiver].operations, run.ranks[sender].operations
    by_seq = {(int(theirs["group"][row]), int(theirs["seq"][row])): row for row in receives}
    sent_history: list[str] = []
    received_history: list[str] = []
    for row in sends:
        other = by_seq.get((int(ours["group"][row]), int(ours["seq"][row])))
        if other is None or ours["seq"][row] < 0:
            continue
        sent, received = run.operation(sender, row), run.operation(receiver, other)
        if sent.sizes and received.sizes and elements_of(sent.sizes) != elements_of(received.sizes):
            return sent, received, sent.sizes in sent_history, received.sizes in received_history
        sent_history.append(sent.sizes)
        received_history.append(received.sizes)
    return None


def _p2p_verdict(
    run: Run, sender: int, receiver: int, sent: Operation, received: Operation, sent_before: bool, received_before: bool
) -> Verdict:
    culprits: tuple[int, ...] = tuple(sorted((sender, receiver)))
    confidence = 0.7
    if sent_before != received_before:
        culprits, confidence = ((receiver,) if sent_before else (sender,)), 0.9
    frames = [
        (sender, user_frame(sent.frames, run.wrappers), sent),
        (receiver, user_frame(received.frames, run.wrappers), received),
    ]
    return Verdict(
        verdict="P2P_SIZE_MISMATCH", culprits=culprits, victims=tuple(r for r in (sender, receiver) if r not in culprits),
        group=str(sent.group), seq=sent.seq, op="send/recv", confidence=confidence,
        headline=f"rank {sender} sent {sent.sizes} elements to rank {receiver}, which expects {received.sizes} "
        f"(message {sent.seq} between them)",
        evidence=tuple(
            Evidence(
                text=f"{op.op}({op.sizes}, {op.dtypes})", rank=rank, source="black box",
                file=frame.file if frame else "", line=frame.line if frame else 0,
            )
            for rank, frame, op in frames
        ),
        chain=((receiver, sender),),
        next_steps=("compare the shapes at the two call sites", "exchange shapes first where they depend on the data"),
    )  # fmt: skip
