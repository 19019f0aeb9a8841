"""Whether a job stands still or was merely looked at while it ran. One look at a live job cannot tell: ranks are at different
operations at every moment. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.diagnosis.rank_death import logged_on, was_told
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import is_last_word
from titan_ckpt.debug.incident.kinds import STALL, EventKind, FlagKind, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, RankRecord, Run, Verdict
from titan_ckpt.debug.incident.waits import looked_at_ns, pending

LEAST_STANDSTILL_S = 10.0
UNKNOWN_PACE_S = 60.0  # where too little was recorded to know how long a step takes
TIMES_LONGEST_GAP = 2.0  # a wait this many times as long as the longest before is no slow step
BEGINNING_S = 30.0  # imports take as long on a busy host
LEAST_GAPS = 8

# Verdicts that say only that a rank has not come yet. The others (a death, operations that disagree) hold in a live job too.
NOT_YET = frozenset(
    {
        VerdictKind.STUCK_ON_CPU, VerdictKind.WAIT_CHAIN, VerdictKind.P2P_MISSING_PEER, VerdictKind.P2P_CYCLE,
        VerdictKind.PG_INIT_HANG, VerdictKind.SCHEDULED_NOT_STARTED, VerdictKind.STARTED_NOT_COMPLETED,
        VerdictKind.TEARDOWN_STUCK, VerdictKind.WRONG_GROUP, VerdictKind.INSUFFICIENT_DATA, VerdictKind.STRAGGLER,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of a live job: for how long its newest wait lasts, and from when on that is a standstill (seconds)."""

    waited_s: float
    limit_s: float
    is_told: bool = False  # the evidence is of the moment at which all ranks were told to end

    @property
    def is_long_for_told(self) -> bool:
        """Whether ranks that were told to end had waited for as long as a hang may take to be noticed."""
        return self.is_told and self.waited_s >= LEAST_STANDSTILL_S


def pace_of_live(run: Run, edges: Sequence[Edge]) -> Pace | None:
    """How a job that nothing shows to have ended or stalled was waiting when it was looked at; None if it has stalled, or if
    the evidence does not say when it was taken."""
    is_told = all(map(was_told, run.ranks.values()))
    if _has_ended(run, is_told=is_told) or _has_stalled(run):
        return None
    waits = [wait for rank in _pending_ranks(run, edges) if (wait := _wait(run.ranks[rank])) is not None]
    if not waits:
        return None
    waited_s = max(waits)
    limit_s = max(LEAST_STANDSTILL_S, _patience_s(run))
    return Pace(waited_s=waited_s, limit_s=limit_s, is_told=is_told) if waited_s < limit_s else None


def is_beginning(run: Run) -> bool:
    """Whether the job has just begun, so that ranks which are not there may still come: after an attempt that left something of
    them they have longer."""
    is_awaited = any(flag.flag == FlagKind.EARLIER_ATTEMPT for flag in run.flags)
    beats = [record.heartbeat for record in run.ranks.values() if record.heartbeat is not None]
    if not beats or _has_ended(run, is_told=False):
        return False
    began_ns, seen_ns = min(beat.phase_ns for beat in beats), max(beat.alive_ns for beat in beats)
    has_issued = any(len(record.operations) for record in run.ranks.values())
    return not has_issued and seen_ns - began_ns < (UNKNOWN_PACE_S if is_awaited else BEGINNING_S) * 1e9


def _has_ended(run: Run, *, is_told: bool) -> bool:
    """Whether anything but a look at live processes was left: an exit, an error, a launcher's report. That all were told to end
    (`is_told`) is none of these."""
    if run.launcher is not None and run.launcher.code is not None:
        return True
    if run.job_log is not None and any(map(is_last_word, run.job_log.events)):
        return True
    return any(_shows_end(record, is_told=is_told) for record in run.ranks.values())


# Texts of these kinds end a process, if they do, by an exception: that its recorder dumps for, or its exit code shows.
_NO_END = (EventKind.SIGTERM, EventKind.EXCEPTION, EventKind.OOM)


def _shows_end(record: RankRecord, *, is_told: bool) -> bool:
    is_gone = record.is_gone or record.process_state == "gone" or record.process_state[:1] in ("T", "t", "Z", "X")
    has_left = record.heartbeat is not None and record.heartbeat.is_stopped and not is_told
    is_dumped = any(_is_of_trouble(dump.reason) and not (is_told and "sigterm" in dump.reason) for dump in record.dumps)
    has_failed = any(event.kind not in _NO_END and not logged_on(record, event) for event in record.events)
    return is_gone or has_left or is_dumped or has_failed or record.exit is not None


def _is_of_trouble(reason: str) -> bool:
    return any(word in reason for word in ("exception", "sigterm", "timeout", "abort", "fatal", "gil"))


def _has_stalled(run: Run) -> bool:
    """Whether a recorder saw two moments without progress between them: that is what makes it dump a stall."""
    return any(stack.reason == STALL for record in run.ranks.values() for stack in record.stacks)


def _pending_ranks(run: Run, edges: Sequence[Edge]) -> Iterator[int]:
    waiting = {edge.waiter for edge in edges}
    for rank, record in run.ranks.items():
        if rank in waiting or (len(record.operations) > 0 and bool(pending(record.operations).any())):
            yield rank


def _wait(record: RankRecord) -> float | None:
    """For how long a rank's newest operation had been pending when the evidence was taken; None if no time is known."""
    created = record.operations["created_ns"][pending(record.operations)]
    told = [int(dump.time_s * 1e9) for dump in record.dumps if "sigterm" in dump.reason and dump.time_s]
    last_ns = looked_at_ns(record)  # a copied dump's file is younger
    looked_ns = min(told + [last_ns] * (last_ns > 0), default=0)
    if not len(created) or not looked_ns or int(created.max()) <= 0:
        return None
    since = max(int(created.max()), record.heartbeat.moved_ns if record.heartbeat else 0)
    return max(0.0, (looked_ns - since) / 1e9)


def _patience_s(run: Run) -> float:
    """How long a rank may wait before it counts as standing still: some times the longest pause between operations so far."""
    pauses = [pause for record in run.ranks.values() if (pause := _longest_pause_s(record)) is not None]
    return TIMES_LONGEST_GAP * max(pauses) if pauses else UNKNOWN_PACE_S


def _longest_pause_s(record: RankRecord) -> float | None:
    """The longest time between two operations of a rank; None where it issued too few."""
    if len(record.operations) <= LEAST_GAPS:
        return None
    created = np.sort(record.operations["created_ns"][record.operations["created_ns"] > 0])
    return float(np.diff(created).max() / 1e9) if len(created) > LEAST_GAPS else None


def is_not_yet(verdict: Verdict) -> bool:
    """Whether a verdict says only that something has not come yet."""
    is_order = verdict.verdict in (VerdictKind.SKIPPED_COLLECTIVE, VerdictKind.ORDER_MISMATCH)
    return verdict.verdict in NOT_YET or (is_order and verdict.seq is None)


def ended_in_wait(pace: Pace, suspected: Verdict) -> Verdict:
    """INSUFFICIENT_DATA on a job that was ended in a long wait, though not in one that only a hang explains."""
    waited = f"the newest wait had lasted {pace.waited_s:.1f} s; in this job one of {pace.limit_s:.0f} s would not be unusual"
    return Verdict(
        verdict=VerdictKind.INSUFFICIENT_DATA, suspects=suspected.culprits or suspected.suspects, victims=suspected.victims,
        group=suspected.group, seq=suspected.seq, op=suspected.op, confidence=Basis.UNDECIDED.confidence,
        headline=f"all ranks were told to end (SIGTERM) in a wait that may have been a hang; if it was: {suspected.headline}",
        evidence=(Evidence(text=waited), *suspected.evidence[:4]), chain=suspected.chain,
        next_steps=("find out who sent SIGTERM: a person, a time limit, a preemption", *suspected.next_steps),
    )  # fmt: skip
