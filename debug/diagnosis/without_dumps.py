"""Verdicts without dumps: the ranks whose logs or stacks say that they waited are witnesses; who did not wait is suspect.

What most people have is logs. A timeout or a closed connection in a rank's log means that this rank was waiting; the call
in its traceback (or NCCL's watchdog line) says for what. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from signal import SIGKILL

from titan_ckpt.debug.diagnosis.awaited_rank import advice
from titan_ckpt.debug.diagnosis.busy_with import busy_by_log, has_recorder_talk
from titan_ckpt.debug.diagnosis.rank_state import (
    DEAD,
    FINISHED,
    FROZEN,
    GIL_HELD,
    IN_COLLECTIVE,
    IN_INIT,
    IN_P2P,
    IN_TEARDOWN,
    ON_CPU,
    Situation,
    has_other_death,
    is_absent,
    saw_peers_close,
    saw_timeouts,
    signal_of,
)
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankRecord, Run, Verdict

_WAITING = (IN_COLLECTIVE, IN_P2P, IN_INIT)
_SYMPTOMS = ("comm_timeout", "comm_closed", "watchdog", "comm_mismatch", "comm_error")


def by_witnesses(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """What the ranks' own words allow to say; nothing where all or none waited alike."""
    witnesses = [rank for rank, state in states.items() if state.kind in _WAITING]
    yield from sizes_in_logs(run)
    if not witnesses or any(state.kind == DEAD for state in states.values()):
        return
    unseen = {rank for rank in states if is_absent(run.ranks[rank])}
    others = [rank for rank, state in states.items() if state.kind not in _WAITING and rank not in unseen]
    is_closed = bool(saw_peers_close(run)) and not saw_timeouts(run)
    suspects = [
        rank for rank in others if _is_suspect(run, rank, states[rank], has_unseen=bool(unseen), is_closed=is_closed)
    ]
    if suspects and len(suspects) <= max(1, len(states) // 2):
        yield from (_suspect(run, rank, witnesses, states) for rank in suspects)
    elif not suspects and not any(0 < len(group.members) < run.world_size for group in run.groups):
        yield from _deviant(run, witnesses, states)


def sizes_in_logs(run: Run) -> Iterator[Verdict]:
    """gloo aborts an innocent rank when more data come than it asked for; its last words give the sizes."""
    for record in run.ranks.values():
        event = _event(record, ("comm_mismatch",))
        if event is not None:
            yield Verdict(
                verdict="SIZE_MISMATCH", victims=(record.rank,), confidence=0.75, step=run.step_of(record.rank),
                headline=f"rank {record.rank} received more or less data than its call expects: ranks disagree about a size or a "
                "dtype (the logs do not say which of its peers is wrong; this rank is only where it showed)",
                evidence=(_said(event),),
                next_steps=("turn the recorder on, or set TORCH_FR_BUFFER_SIZE=2000 and dump: dumps name the rank",),
            )  # fmt: skip
            return


def _suspect(run: Run, rank: int, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Verdict:
    """A rank that did not wait while the others did."""
    record, state = run.ranks[rank], states[rank]
    name, subtype, says = "STUCK_ON_CPU", state.detail, "was busy elsewhere while the others waited for it"
    if state.kind == FINISHED:
        name, subtype, says = "SKIPPED_COLLECTIVE", "finished_early", "ended normally while the others waited for it"
    elif state.kind == IN_TEARDOWN:
        name, says = "TEARDOWN_STUCK", "is shutting down while the others wait for it"
    elif state.kind == FROZEN or (
        _needed_sigkill(record) and not any(_needed_sigkill(run.ranks[w]) for w in witnesses)
    ):
        name, subtype, says = "RANK_FROZEN", "", "is frozen: it neither waited nor spoke, and did not react to SIGTERM"
    elif state.kind != ON_CPU and saw_peers_close(run) and not saw_timeouts(run) and not has_other_death(run, rank):
        name, says = "RANK_DIED", "is gone: its peers' connections to it were closed, and its log just ends"
        says += (
            f"; it ended first, with exit code {record.exit.code}" if record.exit and _ended_first(run, record) else ""
        )
    elif state.kind != ON_CPU and _fell_silent(run, rank, witnesses):
        name, says = "RANK_FROZEN", "is frozen: the others' monitors went on logging, its log just ends"
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
        step=run.step_of(rank),
        confidence=0.75 if where else 0.6,
        headline=f"rank {rank} {says}{where}",
        evidence=(*state.evidence, *first.evidence[:2]),
        chain=tuple((witness, rank) for witness in witnesses),
        next_steps=(*advice(name, subtype), "with the recorder on, or with dumps, this would be certain"),
    )


def _is_suspect(run: Run, rank: int, state: Situation, *, has_unseen: bool, is_closed: bool) -> bool:
    """Whether something speaks against a rank that did not say that it waited. That its log is without an error does not,
    where it went on after its peers' connections closed, or where another rank is not known at all."""
    record = run.ranks[rank]
    if state.kind in (ON_CPU, FROZEN, GIL_HELD, FINISHED, IN_TEARDOWN):
        return True
    if record.log is None or (has_unseen and not busy_by_log(record)):
        return False
    if _ended_first(run, record):
        return True
    return not (is_closed and _went_on_logging(run, record))


def _ended_first(run: Run, record: RankRecord) -> bool:
    """Whether a rank ended by itself, with an error code, before all others (whose log tells of no peer's end, as theirs do)."""
    ended = record.exit
    if ended is None or ended.code <= 0 or ended.was_told or signal_of(ended.code):
        return False
    times = [other.exit.time_s for other in run.ranks.values() if other.exit and other.exit.time_s is not None]
    return ended.is_first or (ended.time_s is not None and ended.time_s == min(times))


def _went_on_logging(run: Run, record: RankRecord) -> bool:
    """Whether a rank logged something after the first connection of another one was closed."""
    events = (event for other in run.ranks.values() if other.log for event in other.log.events)
    closed = min((event.time_s for event in events if event.kind == "comm_closed" and event.time_s), default=None)
    last = record.log.last_time_s if record.log else None
    return closed is not None and last is not None and (last > closed or has_recorder_talk(record))


def _fell_silent(run: Run, rank: int, witnesses: Sequence[int]) -> bool:
    """Whether the recorders of all others wrote to their logs what this rank's did not."""
    return not has_recorder_talk(run.ranks[rank]) and all(has_recorder_talk(run.ranks[other]) for other in witnesses)


def _needed_sigkill(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == SIGKILL


def _deviant(run: Run, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """All waited, but not in the same call: a small minority took another way. In send and recv ranks differ by right."""
    calls = {rank: _waited_in(run.ranks[rank], states[rank]) for rank in witnesses}
    counts = Counter(call for call in calls.values() if call).most_common()
    if len(counts) != 2 or 2 * counts[1][1] > counts[0][1] or any(states[rank].kind == IN_P2P for rank in witnesses):
        return
    if any("send" in call or "recv" in call for call, _ in counts):
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
        step=run.step_of(culprits[0]),
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
