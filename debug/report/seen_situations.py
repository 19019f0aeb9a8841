"""What the reports and screens say each rank was doing, so that it agrees with the verdict and its waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import Wait, waited_at_the_end, waits

WAIT = "wait"  # the method of a send, a recv or a collective: the stack does not tell which
_BY_STACK = (RankState.ON_CPU, RankState.IN_TORCH)
_HALTED: Mapping[VerdictKind, RankState] = {
    VerdictKind.RANK_DIED: RankState.DEAD,
    VerdictKind.RANK_FROZEN: RankState.FROZEN,
}


def seen_situations(
    run: Run, states: Mapping[int, Situation], top: Verdict, waiters: Iterable[int]
) -> dict[int, Situation]:
    """`states`, in which a rank that waits for others waits.

    Without a stack the recorder shows it: an operation has not ended, of a rank of the verdict any, of others the last one.
    It also shows what a stack in `wait` waits for. Any other stack is overruled by the verdict alone: on a GPU the main thread
    of a rank that waits is often elsewhere, in `.item()` or `backward()`. `waiters`: the ranks of which the verdict says that
    they wait; those with the same operation pending wait too. A rank at fault keeps what its stack shows, and one that the
    verdict calls dead or frozen is that.
    """
    named, at_fault = set(waiters), frozenset(top.culprits or top.suspects)
    found = dict(states)
    for wait in waits(run):
        frame = user_frame(wait.operation.frames, run.wrappers)
        for rank in _who_wait(run, states, wait, at_fault, named):
            state = states[rank]
            kind = RankState.IN_P2P if wait.operation.p2p else RankState.IN_COLLECTIVE
            found[rank] = Situation(
                rank=rank, kind=kind, frame=state.frame or frame, call=wait.operation.op,
                evidence=state.evidence, confidence=state.confidence,
            )  # fmt: skip
    if top.verdict in _HALTED:
        found |= {rank: replace(found[rank], kind=_HALTED[top.verdict]) for rank in top.culprits if rank in found}
    return found


def _who_wait(
    run: Run, states: Mapping[int, Situation], wait: Wait, blamed: frozenset[int], named: set[int]
) -> Iterator[int]:
    is_told = not named.isdisjoint(wait.ranks)
    for rank in wait.ranks:
        kind = states[rank].kind
        if kind == RankState.UNKNOWN:
            if rank in named or rank in blamed or waited_at_the_end(run.ranks[rank]):
                yield rank
        elif (kind in _BY_STACK and is_told and rank not in blamed) or (
            kind == RankState.IN_COLLECTIVE and wait.operation.p2p and states[rank].call == WAIT
        ):
            yield rank
