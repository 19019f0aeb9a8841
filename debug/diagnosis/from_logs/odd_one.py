"""Which rank differs, where gloo aborted one that received more data than its call expects. That one only noticed: who passed
the wrong size is whoever left the way that all others took. Pure.

Three facts of logs speak for it. A rank that has logged one step more than all others may be past an operation that they wait in,
and have left one out; or it is in none of their groups, and counts its own steps: it is a suspect. A rank whose count of steps
differs from all others' from the first one on does at another step what depends on it. And where all others are in the backward
pass at one line, in operations that DDP issues itself (their sizes follow from the model, on all ranks alike), the rank that
expected another size is not in there with them. (FSDP's passes do not show that: which layers a rank gathers may depend on its
data.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import when_aborted
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankLog, Run, Verdict

LEAST_RANKS = 3  # of two nobody can say which differs
LEAST_STEPS = 2


def odd_one(run: Run, noticed: LogEvent) -> Iterator[Verdict]:
    """SKIPPED_COLLECTIVE on the one that may be a step ahead, or is outside of the backward pass that all others are in."""
    logs = {rank: record.log for rank, record in run.ranks.items() if record.log is not None}
    raised = {rank: event for rank, log in logs.items() if (event := _raised(log)) is not None}
    if len(run.ranks) < LEAST_RANKS or len(logs) < len(run.ranks):
        return
    if (ahead := _ahead(logs, raised)) is not None:
        step = max(logs[ahead].step_times)
        text = (
            f"logged step {step}, which no other rank reached: it may have left out an operation that the others wait in, if it "
            "takes part in them"
        )
        yield replace(_verdict(run, ahead, text, raised.get(ahead), noticed), confidence=Basis.FURTHER_STEP.confidence)
    elif (odd := _miscounting(logs)) is not None and _is_alone(raised, odd):
        text = f"counted its steps from {min(logs[odd].step_times)}, unlike all others, and left their way"
        yield _verdict(run, odd, text, raised[odd], noticed)
    elif set(raised) == set(run.ranks) - {noticed.rank} and _are_together(raised):
        where = next(iter(raised.values()))
        text = (
            "expected another size than all others passed, who are in the backward pass at "
            f"{where.frame.place if where.frame else 'one line'}: it left that pass, or did not enter it"
        )
        yield _verdict(run, noticed.rank, text, None, noticed)


def _ahead(logs: Mapping[int, RankLog], raised: Mapping[int, LogEvent]) -> int | None:
    """The one rank that has logged one step more than all others, of whom another one than the aborted lived to write its log."""
    steps = {rank: sorted(log.step_times) for rank, log in logs.items()}
    if not all(steps.values()) or len({found[0] for found in steps.values()}) > 1:
        return None
    newest = max(found[-1] for found in steps.values())
    first = [rank for rank, found in steps.items() if found[-1] == newest]
    others = [rank for rank in steps if rank not in first]
    is_clear = len(first) == 1 and all(steps[rank] == steps[first[0]][:-1] for rank in others)
    return first[0] if is_clear and any(rank in raised for rank in others) else None


def _miscounting(logs: Mapping[int, RankLog]) -> int | None:
    """The one rank whose steps differ from all others' by the same number from the first to the last."""
    counts: dict[tuple[int, int, int], list[int]] = {}
    for rank, log in logs.items():
        if len(log.step_times) < LEAST_STEPS:
            return None
        counts.setdefault((min(log.step_times), max(log.step_times), len(log.step_times)), []).append(rank)
    if len(counts) != 2:
        return None
    (odd, few), (usual, many) = sorted(counts.items(), key=lambda item: len(item[1]))
    shift = odd[0] - usual[0]
    if shift != odd[1] - usual[1] or odd[2] != usual[2] or len(few) != 1 or len(many) < LEAST_STEPS:
        return None
    return few[0] if _is_together(logs[few[0]].step_times, logs[many[0]].step_times, shift) else None


def _is_together(odd: Mapping[int, float], usual: Mapping[int, float], shift: int) -> bool:
    """Whether two ranks logged steps at the same times that they number otherwise. (Else one is behind, and its log cut off.)"""
    apart_s = sum(abs(odd[step + shift] - time_s) for step, time_s in usual.items() if step + shift in odd)
    same = [abs(odd[step] - time_s) for step, time_s in usual.items() if step in odd]
    return not same or apart_s / len(usual) < sum(same) / len(same) / 2


def _is_alone(raised: Mapping[int, LogEvent], rank: int) -> bool:
    """Whether a rank is where no other is that lived to tell."""
    places = {other: event.frame.place for other, event in raised.items() if event.frame is not None}
    return (
        rank in places
        and len(places) > 1
        and all(places[rank] != place for other, place in places.items() if other != rank)
    )


def _raised(log: RankLog) -> LogEvent | None:
    """The error of a peer's that ended a rank, with its traceback."""
    return next((event for event in log.events if event.kind.is_communication and "type" in event.values), None)


def _are_together(raised: Mapping[int, LogEvent]) -> bool:
    """Whether these ranks are in the backward pass at the same line, below it in no call of Python."""
    places = {event.frame.place if event.frame else "" for event in raised.values()}
    return (
        len(places) == 1
        and "" not in places
        and all(event.values.get("below") == "backward" for event in raised.values())
    )


def _verdict(run: Run, rank: int, text: str, own: LogEvent | None, noticed: LogEvent) -> Verdict:
    victims = tuple(other for other in run.ranks if other != rank)
    where = f" at {own.frame.place}" if own is not None and own.frame is not None else ""
    return Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE, culprits=(rank,), victims=victims, step=run.step_of(rank),
        confidence=Basis.ODD_ONE.confidence,
        headline=f"{rank_list((rank,))} {text}{f'; it was{where}' if where else ''}",
        evidence=(
            *(
                Evidence.at(event.frame, text=event.text[:200], rank=event.rank, source=f"{event.source}:{event.line}")
                for event in (own, noticed) if event is not None
            ),
            *when_aborted(run.ranks[noticed.rank]),
        ),
        chain=tuple((other, rank) for other in victims),
        next_steps=(
            "look for a branch before that line that depends on the rank or on rank-local data (a skipped batch, an extra pass)",
            "with the recorder on, or with dumps, this would be certain",
        ),
    )  # fmt: skip
