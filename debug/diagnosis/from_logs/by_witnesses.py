"""Verdicts without dumps: ranks whose logs or stacks show that they waited are witnesses; the others are suspects.

What most people have is logs. A timeout or a closed connection in a rank's log means that this rank was waiting; the call
in its traceback (or NCCL's watchdog line) gives the reason. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from signal import SIGKILL

from titan_ckpt.debug.diagnosis.advice import advice
from titan_ckpt.debug.diagnosis.from_logs.elsewhere import SYMPTOMS, deviant, event_of, in_subgroup, said, waited_in
from titan_ckpt.debug.diagnosis.from_logs.lost_rank import ended_first, heeded_sigterm, loss_of
from titan_ckpt.debug.diagnosis.from_logs.named_ranks import present_ranks
from titan_ckpt.debug.diagnosis.from_logs.odd_one import odd_one
from titan_ckpt.debug.diagnosis.from_logs.reported import faults
from titan_ckpt.debug.diagnosis.from_logs.watchdogs import wait_in_parts
from titan_ckpt.debug.diagnosis.rank_death import (
    HARMLESS_XIDS,
    XIDS_OF_PROGRAMS,
    is_absent,
    is_interrupt,
    logged_on,
    signal_of,
)
from titan_ckpt.debug.diagnosis.rank_state import has_other_death, saw_peers_close, saw_timeouts
from titan_ckpt.debug.diagnosis.standstill import LEAST_STANDSTILL_S, TIMES_LONGEST_GAP
from titan_ckpt.debug.incident.busy_with import busy_by_log, has_recorder_talk
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import when_aborted
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankRecord, Run, Situation, Verdict

_OWN = (EventKind.EXCEPTION, EventKind.OOM)
# Of several ranks that a launcher cut off all may have waited but one, and of those that left a group unnamed none may be in it:
# they are suspects.
EQUALLY = 0.7


def by_witnesses(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Verdicts from logs and stacks; none if all ranks or no rank waited."""
    witnesses = [rank for rank, state in states.items() if state.kind.is_waiting]
    yield from sizes_in_logs(run, states)
    yield from _raised_before(run, witnesses)
    if not witnesses or any(state.kind == RankState.DEAD for state in states.values()) or _mismatch(run) is not None:
        return  # of a mismatch that gloo noticed all are victims: the silence of one tells nothing
    unseen = {rank for rank in states if is_absent(run.ranks[rank])}
    others = [rank for rank, state in states.items() if not state.kind.is_waiting and rank not in unseen]
    is_closed = bool(saw_peers_close(run)) and not saw_timeouts(run)
    present = present_ranks(run)
    suspects = [
        rank
        for rank in others
        if rank not in present and _is_suspect(run, rank, states[rank], has_unseen=bool(unseen), is_closed=is_closed)
    ]
    collectors = _collectors(run)
    suspects = [rank for rank in suspects if rank not in collectors] or suspects
    cut_off = [rank for rank in suspects if _was_cut_off(run.ranks[rank], states[rank])]
    if len(cut_off) < len(suspects):
        suspects = [rank for rank in suspects if rank not in cut_off]
    if suspects and len(suspects) <= max(1, len(states) // 2):
        is_unmoved = run.launcher is not None and run.launcher.num_unmoved == len(suspects) == len(states) - len(
            witnesses
        )
        told = _told_loss(run, len(suspects))
        found = [*_together([_suspect(run, rank, witnesses, states, told, is_unmoved=is_unmoved) for rank in suspects])]
        is_open = len(cut_off) > 1 and set(cut_off) == set(suspects)
        is_open |= len(suspects) > 1 and wait_in_parts(run, witnesses)
        are_apart = len({(frame.file, frame.line) for rank in witnesses if (frame := states[rank].frame)}) > 1
        are_apart &= any(in_subgroup(run.ranks[rank]) for rank in witnesses)
        is_open |= all(_erred_alone(run.ranks[rank]) for rank in witnesses)
        is_open |= any(_may_wait(verdict, are_apart=are_apart) for verdict in found)
        yield from (replace(one, confidence=one.confidence * EQUALLY) if is_open else one for one in found)
    elif not suspects and not any(0 < len(group.members) < run.world_size for group in run.groups):
        yield from deviant(run, witnesses, states)


_COLLECTOR = re.compile(
    r"reached monitoredBarrier, but received errors while waiting for send/recv from rank (\d{1,6})"
)


def _collectors(run: Run) -> set[int]:
    """The ranks that monitoredBarrier counts the others on (rank 0 of a group): its errors name them on all other ranks."""
    texts = (event.text for record in run.ranks.values() for event in record.events)
    return {int(match[1]) for text in texts if (match := _COLLECTOR.search(text))}


def _raised_before(run: Run, witnesses: Sequence[int]) -> Iterator[Verdict]:
    """Ranks that waited, unlike the others, while they handled an exception of their own: a `finally` with a barrier in it."""
    raised = {
        rank: event for rank in witnesses if (event := event_of(run.ranks[rank], _OWN, needs="handled")) is not None
    }
    others = tuple(rank for rank in witnesses if rank not in raised)
    if not raised or len(raised) > len(others):
        return
    event = next(iter(raised.values()))
    yield Verdict(
        verdict=VerdictKind.RANK_DIED, subtype=Subtype.PYTHON_EXCEPTION, culprits=tuple(raised), victims=others,
        step=run.step_of(event.rank), confidence=Basis.RAISED_BEFORE.confidence,
        headline=f"{rank_list(tuple(raised))} raised {event.values.get('type', 'an exception')}"
        + (f" at {event.frame.place}" if event.frame else "")
        + ", and handled it in a call that waits for the others, which were elsewhere",
        evidence=tuple(said(found) for found in list(raised.values())[:4]),
        chain=tuple((rank, event.rank) for rank in others),
        next_steps=(
            "fix the exception at that line; the other ranks are only its victims",
            "call no collective in `except` or `finally`: the other ranks do not come there",
        ),
        file=event.frame.file if event.frame else "", line=event.frame.line if event.frame else 0,
    )  # fmt: skip


def _may_wait(verdict: Verdict, *, are_apart: bool) -> bool:
    """Whether it accuses for silence alone, and one that is silent may wait for another in a group of their own: several are, or
    those that waited did so at several lines, one of which names a group (`are_apart`)."""
    is_silent = verdict.verdict == VerdictKind.STUCK_ON_CPU and verdict.confidence <= Basis.WITNESSES.confidence
    is_silent &= verdict.subtype == Subtype.NONE
    return is_silent and (are_apart or len(verdict.culprits) > 1)


def _erred_alone(record: RankRecord) -> bool:
    """Whether nothing but an error of a communication library, which is of no wait, shows that a rank did not go on."""
    kinds = {event.kind for event in record.events}
    is_of_wait = kinds & {EventKind.COMM_TIMEOUT, EventKind.COMM_CLOSED, EventKind.WATCHDOG} or record.stacks
    return EventKind.COMM_ERROR in kinds and not is_of_wait and not len(record.operations)


def _together(found: Sequence[Verdict]) -> Iterator[Verdict]:
    """Ranks of which the same is known, and of none the line, in one verdict: they were lost together, as with their host."""
    alike: dict[object, list[Verdict]] = {}
    for number, verdict in enumerate(found):
        has_line = verdict.confidence > Basis.WITNESSES.confidence
        alike.setdefault(number if has_line else (verdict.verdict, verdict.subtype), []).append(verdict)
    for verdicts in alike.values():
        culprits = tuple(rank for verdict in verdicts for rank in verdict.culprits)
        what = verdicts[0].headline.partition(f"rank {culprits[0]} ")[2]
        headline = verdicts[0].headline if len(verdicts) == 1 else f"{rank_list(culprits)}: each {what}"
        evidence = tuple(dict.fromkeys(item for verdict in verdicts[:4] for item in verdict.evidence[:3]))
        is_half = verdicts[0].subtype == Subtype.FINISHED_EARLY and len(culprits) >= len(verdicts[0].victims)
        confidence = Basis.ENDED_AS_MANY.confidence if is_half else verdicts[0].confidence  # either party may be wrong
        is_silence = verdicts[0].verdict == VerdictKind.RANK_DIED and verdicts[0].subtype == Subtype.NONE
        if is_silence and len(verdicts) > 1 and not _is_block(culprits):
            headline += "; one alone may have gone first, and the others of that"
            confidence = Basis.GONE_TOGETHER.confidence
        yield verdicts[0] if len(verdicts) == 1 else replace(
            verdicts[0], culprits=culprits, headline=headline, evidence=evidence, confidence=confidence,
            chain=tuple(pair for verdict in verdicts for pair in verdict.chain)[:64],
        )  # fmt: skip


_LEAST_BLOCK = 4


def _is_block(ranks: Sequence[int]) -> bool:
    """Whether ranks are as those of one host: one after the other, from a multiple of their number on."""
    return len(ranks) >= _LEAST_BLOCK and not ranks[0] % len(ranks) and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]


def sizes_in_logs(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """gloo aborts an innocent rank when more data arrives than it asked for; its last log lines give the sizes."""
    event = _mismatch(run)
    if event is None:
        return
    named = [*odd_one(run, event)] or [*elsewhere(run, states)]
    if named:
        yield from named
        return
    yield Verdict(
        verdict=VerdictKind.SIZE_MISMATCH,
        victims=(event.rank,),
        confidence=Basis.SIZE_IN_LOG.confidence,
        step=run.step_of(event.rank),
        headline=f"rank {event.rank} received {_sizes(event)} its call expects: ranks disagree about a size, a dtype or "
        "a call (the logs do not show which peer is wrong; this rank is only the one that noticed)",
        evidence=(said(event), *when_aborted(run.ranks[event.rank]), *_places_of_others(run, event.rank)),
        next_steps=(
            f"compare what rank {event.rank} and the others call at those lines: a branch or a size that differs",
            "turn the recorder on, or set TORCH_FR_BUFFER_SIZE=2000 and dump: dumps name the rank",
        ),
    )


def _mismatch(run: Run) -> LogEvent | None:
    """The error by which gloo ended a rank that received more data than its call expects."""
    noticed = (event_of(record, (EventKind.COMM_MISMATCH,)) for record in run.ranks.values())
    return next((event for event in noticed if event is not None and "own" not in event.values), None)


def elsewhere(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """A small minority that waited in another call than most, where it is known of every rank, so of the aborted one, too."""
    if all(state.kind.is_waiting and (state.frame or state.call) for state in states.values()):
        yield from (
            found for found in deviant(run, tuple(states), states) if found.confidence >= Basis.OTHER_WAIT.confidence
        )


_BYTES = re.compile(r"op\.nbytes\. (?P<got>\d{1,18}) vs (?P<expected>\d{1,18})")
MOST_PLACES = 4


def _sizes(event: LogEvent) -> str:
    match = _BYTES.search(event.text)
    return f"{match['got']} bytes, more than the {match['expected']}" if match else "more or less data than"


def _places_of_others(run: Run, rank: int) -> list[Evidence]:
    """Where the other ranks were when that one ended, those at one line together."""
    places: dict[str, list[int]] = {}
    first: dict[str, LogEvent] = {}
    for other, record in run.ranks.items():
        event = event_of(record, SYMPTOMS, needs="type") if other != rank else None
        if event is not None and event.frame is not None:
            where = f"{event.values.get('call') or event.values.get('below') or 'a call'} at {event.frame.place}"
            places.setdefault(where, []).append(other)
            first.setdefault(where, event)
    return [
        replace(said(first[where]), rank=None, text=f"{rank_list(ranks)}: in {where}")
        for where, ranks in list(places.items())[:MOST_PLACES]
    ]


WITHIN_S = 2.0  # an error that has no time of its own is dated by the line before it, which is older


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    """What a rank that did not wait is accused of; `text` continues a sentence that begins with the rank."""

    verdict: VerdictKind
    text: str
    subtype: Subtype = Subtype.NONE


def _told_loss(run: Run, num_suspects: int) -> LogEvent | None:
    """What srun says of a lost host of the job, or a driver of a GPU, that nothing places: who alone fell silent was there."""
    for event in (event for event in faults(run) if event.rank < 0):
        is_fatal = event.values.get("xid") not in (*HARMLESS_XIDS, *XIDS_OF_PROGRAMS)
        is_of_gpu = event.kind == EventKind.DEVICE_ERROR and is_fatal and num_suspects == 1
        if (event.kind == EventKind.NODE_LOST and "srun: error: " in event.text) or is_of_gpu:
            return event
    return None


def _suspicion(
    run: Run, rank: int, witnesses: Sequence[int], state: Situation, told: LogEvent | None, *, is_unmoved: bool
) -> _Suspicion:
    record, is_on_cpu = run.ranks[rank], state.kind == RankState.ON_CPU
    if state.kind == RankState.FINISHED:
        text = f"ended normally{_after_error(record)} while the others waited for it"
        return _Suspicion(verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.FINISHED_EARLY, text=text)
    if state.kind == RankState.IN_TEARDOWN:
        text = "is shutting down while the others wait for it"
        return _Suspicion(verdict=VerdictKind.TEARDOWN_STUCK, subtype=state.detail, text=text)
    if state.kind == RankState.FROZEN or _alone_needed_sigkill(run, record, witnesses) or is_unmoved:
        text = "is frozen: it neither waited nor logged anything, and did not react to SIGTERM"
        return _Suspicion(verdict=VerdictKind.RANK_FROZEN, text=text)
    if not is_on_cpu and record.log and record.log.done_line > record.log.last_step_line:
        text = "logged that it was done, while the others waited for it"
        return _Suspicion(verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.FINISHED_EARLY, text=text)
    if not is_on_cpu and saw_peers_close(run) and not saw_timeouts(run) and not has_other_death(run, rank):
        lost = loss_of(run, record)
        subtype = lost.subtype or state.detail
        return _Suspicion(verdict=lost.verdict, subtype=subtype, text=lost.text)
    if not is_on_cpu and not heeded_sigterm(record) and _fell_silent(run, rank, witnesses):
        text = "is frozen: the others' monitors went on logging, its log just ends"
        return _Suspicion(verdict=VerdictKind.RANK_FROZEN, subtype=state.detail, text=text)
    if not is_on_cpu and told is not None and (not record.host or record.host == told.values.get("host", record.host)):
        is_host = told.kind == EventKind.NODE_LOST
        text = f"died: {'its host was lost' if is_host else 'its GPU failed'}, by what is reported, and it fell silent"
        return _Suspicion(verdict=VerdictKind.RANK_DIED, subtype=Subtype.HOST if is_host else Subtype.DEVICE, text=text)
    return _Suspicion(
        verdict=VerdictKind.STUCK_ON_CPU, subtype=state.detail or busy_by_log(record),
        text="was busy elsewhere while the others waited for it",
    )  # fmt: skip


def _after_error(record: RankRecord) -> str:
    """The error that a rank caught and logged before it ended as if all were well."""
    caught = [event for event in record.events if event.kind in _OWN and event.frame and not logged_on(record, event)]
    if not caught or caught[-1].frame is None:
        return ""
    return f", after it logged {caught[-1].values.get('type', 'an error')} at {caught[-1].frame.place},"


def _suspect(
    run: Run,
    rank: int,
    witnesses: Sequence[int],
    states: Mapping[int, Situation],
    told: LogEvent | None,
    *,
    is_unmoved: bool,
) -> Verdict:
    """The verdict on a rank that did not wait while the others did."""
    state, first = states[rank], states[witnesses[0]]
    is_unmoved = is_unmoved and state.kind != RankState.ON_CPU
    suspicion = _suspicion(run, rank, witnesses, state, told, is_unmoved=is_unmoved)
    has_died = told is not None and suspicion.subtype in (Subtype.HOST, Subtype.DEVICE)
    reported = (replace(said(told), rank=None),) if told is not None and has_died else ()
    where = state.where if state.kind == RankState.ON_CPU else ""
    return Verdict(
        verdict=suspicion.verdict,
        subtype=suspicion.subtype,
        culprits=(rank,),
        victims=tuple(witnesses),
        op=waited_in(run.ranks[witnesses[0]], first),
        step=run.step_of(rank),
        confidence=(Basis.WITNESSES_AND_LINE if where else Basis.WITNESSES).confidence,
        headline=f"rank {rank} {suspicion.text}{where}" + (f", {state.call}" if where and state.call else ""),
        evidence=(*reported, *state.evidence, *first.evidence[:2]),
        chain=tuple((witness, rank) for witness in witnesses),
        next_steps=(
            *advice(suspicion.verdict, suspicion.subtype),
            "with the recorder on, or with dumps, this would be certain",
        ),
    )


def _alone_needed_sigkill(run: Run, record: RankRecord, witnesses: Sequence[int]) -> bool:
    return _needed_sigkill(record) and not any(_needed_sigkill(run.ranks[witness]) for witness in witnesses)


def _is_suspect(run: Run, rank: int, state: Situation, *, has_unseen: bool, is_closed: bool) -> bool:
    """Whether there is evidence against a rank that did not log a wait. A log without an error is none,
    where it went on after its peers' connections closed, or where another rank is not known at all."""
    record = run.ranks[rank]
    if state.kind == RankState.IN_TORCH or (is_closed and (_was_ended_at_work(run, record) or _had_no_answer(run))):
        return False  # it may have waited; or the others' connections closed as all were told to end, or as one gave up
    if state.kind in (
        RankState.ON_CPU,
        RankState.FROZEN,
        RankState.GIL_HELD,
        RankState.FINISHED,
        RankState.IN_TEARDOWN,
    ):
        return True
    if heeded_sigterm(record) and any(map(in_subgroup, run.ranks.values())):
        return False  # it may have waited in another group for one of those
    if record.log is None or (has_unseen and not busy_by_log(record)):
        return False
    if any("enqueued" in event.values for event in record.events if event.kind == EventKind.HEARTBEAT):
        return False  # how far it came is known, so its silence says nothing more
    if ended_first(run, record):
        return True
    return not (is_closed and _went_on_logging(run, record))


def _had_no_answer(run: Run) -> bool:
    """Whether a rank gave up connecting to another: the others' connections closed when it ended."""
    texts = (event.text for record in run.ranks.values() for event in record.events)
    return any("timed out connecting" in text for text in texts)


def _was_ended_at_work(run: Run, record: RankRecord) -> bool:
    """Whether a rank was interrupted when a person or a scheduler ended the job, and its log does not show that the job had stood
    still before: no step for longer than is usual in it."""
    if run.job_log is None or not any(map(is_interrupt, record.events)):
        return False
    kinds = (EventKind.CANCELLED, EventKind.SIGTERM)
    ended = [event for event in run.job_log.events if event.kind in kinds or is_interrupt(event)]
    steps = sorted(((record.log and record.log.step_times) or run.job_log.step_times).values())
    told_s = min((event.time_s for event in ended if event.time_s is not None), default=None)
    if told_s is None or len(steps) < 2:
        return any(event.kind == EventKind.CANCELLED for event in ended)
    longest_s = max(after - before for before, after in pairwise(steps))
    return told_s - steps[-1] < max(LEAST_STANDSTILL_S, TIMES_LONGEST_GAP * longest_s)


def _went_on_logging(run: Run, record: RankRecord) -> bool:
    """Whether a rank logged something after the first connection of another one was closed."""
    events = (event for other in run.ranks.values() for event in other.events)
    closed = min(
        (event.time_s for event in events if event.kind == EventKind.COMM_CLOSED and event.time_s), default=None
    )
    last = record.log.last_time_s if record.log else None
    return closed is not None and last is not None and (last > closed + WITHIN_S or has_recorder_talk(record))


def _fell_silent(run: Run, rank: int, witnesses: Sequence[int]) -> bool:
    """Whether the recorders of all others wrote to their logs what this rank's did not."""
    return not has_recorder_talk(run.ranks[rank]) and all(has_recorder_talk(run.ranks[other]) for other in witnesses)


def _was_cut_off(record: RankRecord, state: Situation) -> bool:
    """Whether a launcher ended a rank that shows nothing of its own: it may have waited as well, and not come to say so."""
    is_silent = state.kind in (RankState.UNKNOWN, RankState.SILENT)
    return is_silent and heeded_sigterm(record) and not busy_by_log(record)


def _needed_sigkill(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == SIGKILL
