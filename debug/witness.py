"""Verdicts without dumps: the ranks whose logs or stacks say that they waited are witnesses; who did not wait is suspect.

What most people have is logs. A timeout or a closed connection in a rank's log means that this rank was waiting; the call
in its traceback (or NCCL's watchdog line) says for what. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from signal import SIGKILL

from titan_ckpt.debug.busy import busy_by_log
from titan_ckpt.debug.causes import advice, step_of
from titan_ckpt.debug.records import Evidence, LogEvent, RankRecord, Run, Verdict
from titan_ckpt.debug.situation import (
    DEAD,
    FROZEN,
    IN_COLLECTIVE,
    IN_INIT,
    IN_P2P,
    ON_CPU,
    Situation,
    signal_of,
)

_WAITING = (IN_COLLECTIVE, IN_P2P, IN_INIT)
_SYMPTOMS = ("comm_timeout", "comm_closed", "watchdog", "comm_mismatch", "comm_error")


def by_witnesses(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """What the ranks' own words allow to say; nothing where all or none waited alike."""
    witnesses = [rank for rank, state in states.items() if state.kind in _WAITING]
    yield from _sizes(run)
    if not witnesses or any(state.kind == DEAD for state in states.values()):
        return
    suspects = [rank for rank in states if rank not in witnesses]
    if suspects and len(suspects) <= max(1, len(states) // 2):
        yield from (_suspect(run, rank, witnesses, states) for rank in suspects)
    elif not suspects:
        yield from _deviant(run, witnesses, states)


def _sizes(run: Run) -> Iterator[Verdict]:
    """gloo aborts an innocent rank when more data come than it asked for; its last words give the sizes."""
    for record in run.ranks.values():
        event = _event(record, ("comm_mismatch",))
        if event is not None:
            yield Verdict(
                verdict="SIZE_MISMATCH", victims=(record.rank,), confidence=0.75, step=step_of(run, record.rank),
                headline=f"rank {record.rank} received more or less data than its call expects: ranks disagree about a size "
                "(the logs do not say which of its peers is wrong; this rank is only where it showed)",
                evidence=(_said(event),),
                next_steps=("turn the recorder on, or set TORCH_FR_BUFFER_SIZE=2000 and dump: dumps name the rank",),
            )  # fmt: skip
            return


def _suspect(run: Run, rank: int, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Verdict:
    """A rank that did not wait while the others did."""
    record, state = run.ranks[rank], states[rank]
    name, subtype, says = "STUCK_ON_CPU", state.detail, "was busy elsewhere while the others waited for it"
    if state.kind == FROZEN or _needed_sigkill(record):
        name, subtype, says = "RANK_FROZEN", "", "is frozen: it neither waited nor spoke, and did not react to SIGTERM"
    elif not subtype:
        subtype = busy_by_log(record)
    where = f" at {state.frame.file}:{state.frame.line}" if state.frame and state.kind == ON_CPU else ""
    first = states[witnesses[0]]
    return Verdict(
        verdict=name,
        subtype=subtype,
        culprits=(rank,),
        victims=tuple(witnesses),
        op=_waited_in(run.ranks[witnesses[0]], first),
        step=step_of(run, rank),
        confidence=0.75 if where else 0.6,
        headline=f"rank {rank} {says}{where}",
        evidence=(*state.evidence, *first.evidence[:2]),
        chain=tuple((witness, rank) for witness in witnesses),
        next_steps=(*advice(name, subtype), "with the recorder on, or with dumps, this would be certain"),
    )


def _needed_sigkill(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == SIGKILL


def _deviant(run: Run, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """All waited, but not in the same call: the minority took another way."""
    calls = {rank: _waited_in(run.ranks[rank], states[rank]) for rank in witnesses}
    counts = Counter(call for call in calls.values() if call).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return
    common = counts[0][0]
    culprits = tuple(rank for rank, call in calls.items() if call and call != common)
    first, other = states[culprits[0]], states[next(rank for rank, call in calls.items() if call == common)]
    frame = first.frame
    yield Verdict(
        verdict="SKIPPED_COLLECTIVE",
        culprits=culprits,
        victims=tuple(rank for rank in witnesses if rank not in culprits),
        op=common,
        step=step_of(run, culprits[0]),
        confidence=0.65,
        headline=f"rank {culprits[0]} waited in {calls[culprits[0]]}"
        + (f" at {frame.file}:{frame.line}" if frame else "")
        + f" while the others waited in {common}: it skipped one, or took them in another order",
        evidence=(*first.evidence[:1], *other.evidence[:1]),
        chain=tuple((rank, culprits[0]) for rank in witnesses if rank not in culprits),
        next_steps=(
            "look for a branch before that line that depends on the rank or on rank-local data",
            "with the recorder on, or with dumps, this would be certain",
        ),
    )


def _waited_in(record: RankRecord, state: Situation) -> str:
    """The operation a witness waited in, from its stack, its traceback or the watchdog's line."""
    if state.kind in _WAITING and state.call not in ("", "wait"):
        return state.call
    event = _event(record, _SYMPTOMS, needs="call") or _event(record, ("watchdog",), needs="op")
    if event is None:
        return ""
    return event.values.get("call") or f"{event.values['op'].lower()} #{event.values.get('seq', '?')}"


def _event(record: RankRecord, kinds: Sequence[str], needs: str = "") -> LogEvent | None:
    events = record.log.events if record.log else ()
    return next((event for event in events if event.kind in kinds and (not needs or needs in event.values)), None)


def _said(event: LogEvent) -> Evidence:
    return Evidence(text=event.text[:200], rank=event.rank, source=f"{event.source}:{event.line}")
