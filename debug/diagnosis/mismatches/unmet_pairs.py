"""A send and a recv of one pair that both ranks stand in, and that do not meet: gloo compares tags, which none records. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from titan_ckpt.debug.diagnosis.waiting.wait_graph import pending_p2p
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import RECV, SEND, Evidence, Operation, Run, Situation, Verdict


def unmet_pairs(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """P2P_MISSING_PEER without a culprit, on the first such pair."""
    for rank in run.ranks:
        row = _stands_in(run, states, rank)
        if row is None or run.ranks[rank].operations["p2p"][row] != SEND:
            continue
        sent = run.operation(rank, row)
        other = _stands_in(run, states, sent.peer) if sent.peer in run.ranks else None
        received = run.operation(sent.peer, other) if other is not None else None
        if received is not None and _are_halves(rank, sent, received):
            yield _verdict(run, rank, sent, received)
            return


def _stands_in(run: Run, states: Mapping[int, Situation], rank: int) -> int | None:
    """The row of the pending send or recv that is the newest operation of a rank which waits in one."""
    rows = pending_p2p(run, rank) if states[rank].kind == RankState.IN_P2P else []
    created = run.ranks[rank].operations["created_ns"]
    return rows[-1] if rows and int(np.argmax(created)) == rows[-1] else None


def _are_halves(rank: int, sent: Operation, received: Operation) -> bool:
    is_pair = received.p2p == RECV and received.peer == rank
    return is_pair and (sent.group, sent.seq, sent.sizes) == (received.group, received.seq, received.sizes)


def _verdict(run: Run, rank: int, sent: Operation, received: Operation) -> Verdict:
    peer = sent.peer
    evidence = tuple(
        Evidence.at(
            user_frame(op.frames, run.wrappers), text=f"waits in {op.op} #{op.seq}", rank=at, source="black box"
        )
        for at, op in ((rank, sent), (peer, received))
    )
    return Verdict(
        verdict=VerdictKind.P2P_MISSING_PEER,
        culprits=(),
        suspects=(rank, peer),
        group=str(sent.group),
        seq=sent.seq,
        op="send/recv",
        confidence=Basis.UNMET.confidence,
        headline=f"rank {rank}'s {sent.op} #{sent.seq} to rank {peer} and rank {peer}'s {received.op} from it are both issued, "
        "alike in size, and do not meet: they pass different tags, or their connection is stuck",
        evidence=evidence,
        next_steps=(
            "compare the tags (tag=...) that the two lines pass",
            "if they are equal: look at the network between the two hosts",
        ),
    )


def everybody_in_p2p(states: Mapping[int, Situation]) -> Verdict:
    """All ranks are in a send or recv whose peers are not recorded (gloo does not)."""
    ranks = tuple(states)
    are_two = len(ranks) == 2  # of more, some may wait behind the circle
    return Verdict(
        verdict=VerdictKind.P2P_CYCLE,
        culprits=ranks if are_two else (),
        suspects=() if are_two else ranks,
        confidence=Basis.ALL_IN_P2P.confidence,
        headline="every rank waits in a send or recv at the same time: a P2P cycle",
        evidence=tuple(item for rank in ranks[:4] for item in states[rank].evidence[:1]),
        next_steps=(
            "reverse the order on every second rank, or use batch_isend_irecv",
            "with our recorder's black boxes the pairs would be known",
        ),
    )
