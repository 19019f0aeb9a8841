"""Which rank differs, where gloo aborted one that received more data than its call expects. That one only noticed: who passed
the wrong size is whoever left the way that all others took. Pure.

Two facts of logs show it. A rank that has logged a step which no other logged is past an operation that the others wait in: it
left one out. And where all others are in the backward pass at one line, in operations that DDP issues itself (their sizes follow
from the model, on all ranks alike), the rank that expected another size is not in there with them. (FSDP's passes do not show
that: which layers a rank gathers may depend on its data.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankLog, Run, Verdict

LEAST_RANKS = 3  # of two nobody can say which differs


def odd_one(run: Run, noticed: LogEvent) -> Iterator[Verdict]:
    """SKIPPED_COLLECTIVE on the one that is a step ahead, or outside of the backward pass that all others are in."""
    logs = {rank: record.log for rank, record in run.ranks.items() if record.log is not None}
    raised = {rank: event for rank, log in logs.items() if (event := _raised(log)) is not None}
    if len(run.ranks) < LEAST_RANKS or len(logs) < len(run.ranks):
        return
    if (ahead := _ahead(logs, raised)) is not None:
        step = max(logs[ahead].step_times)
        text = f"logged step {step}, which no other rank reached: it left out an operation that the others wait in"
        yield _verdict(run, ahead, text, raised.get(ahead), noticed)
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
    is_clear = len(first) == 1 and len({steps[rank][-1] for rank in others}) == 1
    return first[0] if is_clear and any(rank in raised for rank in others) else None


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
        evidence=tuple(
            Evidence.at(event.frame, text=event.text[:200], rank=event.rank, source=f"{event.source}:{event.line}")
            for event in (own, noticed) if event is not None
        ),
        chain=tuple((other, rank) for other in victims),
        next_steps=(
            "look for a branch before that line that depends on the rank or on rank-local data (a skipped batch, an extra pass)",
            "with the recorder on, or with dumps, this would be certain",
        ),
    )  # fmt: skip
