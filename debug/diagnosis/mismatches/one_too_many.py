"""Ranks that wait in an operation which most members of its group, by now ended in order, did not issue. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.from_logs.elsewhere import event_of, said
from titan_ckpt.debug.diagnosis.rank_death import ended_well
from titan_ckpt.debug.diagnosis.waiting.wait_graph import can_wait
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Operation, Run, Situation, Verdict

_STEPS = (
    "look for the branch that issues this operation on that rank only (`if rank == 0`, a handle that nobody waits for)",
    "give every rank the same number of batches (drop the last, or pad), or use join",
)
_LEFT_ALONE = (EventKind.COMM_CLOSED, EventKind.COMM_TIMEOUT, EventKind.COMM_ERROR)


def one_too_many(run: Run, lanes: Sequence[Lane], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """SKIPPED_COLLECTIVE (extra_collective) on the few that issued more than the many that ended in order with equal counts."""
    for lane in lanes:
        ended = [place for place, rank in enumerate(lane.members) if states[rank].kind == RankState.FINISHED]
        counts = {int(lane.last[place]) for place in ended}
        few = [place for place in range(len(lane.members)) if place not in ended]
        if not few or len(few) >= len(ended) or len(counts) != 1 or lane.is_silent.any():
            continue
        end = max(counts)
        if all(_waits_beyond(lane, place, end, states) for place in few):
            yield _verdict(
                run, lane, [lane.members[place] for place in few], [lane.members[place] for place in ended], end
            )


def outlasted(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """The same where the operations of those that ended in order are not recorded: they had issued equal numbers, since each
    needs all, and the few failed in a call for want of them."""
    ended = [rank for rank, state in states.items() if state.kind == RankState.FINISHED and ended_well(run.ranks[rank])]
    few = [rank for rank in states if rank not in ended]
    left = [event for rank in few if (event := event_of(run.ranks[rank], _LEFT_ALONE, needs="type")) is not None]
    if not few or len(few) >= len(ended) or len(left) < len(few) or any(event.frame is None for event in left):
        return
    frame = left[0].frame
    yield Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.EXTRA_COLLECTIVE, culprits=tuple(few), victims=tuple(ended),
        confidence=Basis.OUTLASTED.confidence, step=run.step_of(few[0]),
        headline=f"{rank_list(few)} waited in a call{f' at {frame.place}' if frame else ''} to which the other {len(ended)} "
        "ranks, which ended normally, did not come",
        evidence=(*map(said, left[:4]), Evidence(text="ended normally", rank=ended[0])),
        chain=tuple((rank, ended[0]) for rank in few), next_steps=_STEPS,
    )  # fmt: skip


def _waits_beyond(lane: Lane, place: int, end: int, states: Mapping[int, Situation]) -> bool:
    return int(lane.last[place]) > end >= 0 and not lane.done[place] and can_wait(states[lane.members[place]])


def _verdict(run: Run, lane: Lane, few: Sequence[int], many: Sequence[int], end: int) -> Verdict:
    waited = run.operation(few[0], lane.seen_at(end + 1)[few[0]])
    parted = _first_parted(run, lane, few[0], many[0], end)
    extra, usual = parted or (waited, None)
    frame = user_frame(extra.frames, run.wrappers)
    from_where = f", from #{extra.seq} on{f' at {frame.place}' if frame else ''}" if parted else ""
    told = [
        Evidence.at(user_frame(waited.frames, run.wrappers), text=_waits(waited), rank=few[0], source="flight recorder")
    ]
    if usual is not None:
        told[:0] = [_issued(run, few[0], extra), _issued(run, many[0], usual)]
    return Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE,
        subtype=Subtype.EXTRA_COLLECTIVE,
        culprits=tuple(few),
        victims=tuple(many),
        group=str(waited.group),
        seq=extra.seq,
        op=extra.op,
        confidence=Basis.CLEAR_MAJORITY.confidence,
        headline=f"{rank_list(few)} issued one {extra.op} more of group {waited.group} than the other {len(many)} ranks, which "
        f"ended normally after #{end}{from_where}",
        evidence=(*told, Evidence(text="ended normally", rank=many[0])),
        chain=tuple((rank, many[0]) for rank in few),
        next_steps=_STEPS,
    )  # fmt: skip


def _first_parted(run: Run, lane: Lane, rank: int, other: int, end: int) -> tuple[Operation, Operation] | None:
    """The first operations of one number that two ranks issued from different lines, where both lines are known."""
    for seq in range(lane.first_seq, end + 1):
        rows = lane.seen_at(seq)
        if rank not in rows or other not in rows:
            continue
        mine, theirs = run.operation(rank, rows[rank]), run.operation(other, rows[other])
        here, there = user_frame(mine.frames, run.wrappers), user_frame(theirs.frames, run.wrappers)
        if here is not None and there is not None and (here.file, here.line) != (there.file, there.line):
            return mine, theirs
    return None


def _waits(operation: Operation) -> str:
    return f"waits in {operation.op} #{operation.seq}"


def _issued(run: Run, rank: int, operation: Operation) -> Evidence:
    frame = user_frame(operation.frames, run.wrappers)
    return Evidence.at(frame, text=f"issued {operation.op} as #{operation.seq}", rank=rank, source="flight recorder")
