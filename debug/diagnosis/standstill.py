"""Whether a job stands still or was merely looked at while it ran. One look at a live job cannot tell: ranks are at different
operations at every moment. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.diagnosis.ends import Told, got_over, told_to_end
from titan_ckpt.debug.diagnosis.from_logs.reported import trouble_of_job
from titan_ckpt.debug.diagnosis.rank_death import is_interrupt, logged_on, own_exception
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import is_last_word
from titan_ckpt.debug.incident.kinds import STALL, EventKind, FlagKind, VerdictKind
from titan_ckpt.debug.incident.records import Dump, Evidence, RankRecord, Run, Verdict
from titan_ckpt.debug.incident.waits import came_further_ns, looked_at_ns, pending

LEAST_STANDSTILL_S = 10.0
UNKNOWN_PACE_S = 60.0  # where too little was recorded to know how long a step takes
TIMES_LONGEST_GAP = 2.0  # a wait this many times as long as the longest before is no slow step
BEGINNING_S = 30.0  # imports take as long on a busy host
LEAST_GAPS = 8
LEAST_LOGGED = 3  # logged steps, to know how often the program logs one
# torch/distributed/elastic/agent/server/api.py
_INTERRUPTED = re.compile(r"Received (?:2|Signals\.SIGINT) death signal")
_FROM_OUTSIDE = (EventKind.CANCELLED, EventKind.SIGTERM)

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
    told: Told | None = None  # the evidence is of the moment at which a signal from outside ended the job
    is_logged: bool = False  # logged steps tell, not operations

    @property
    def text(self) -> str:
        """How long the newest wait was, and what is usual in this job."""
        if self.is_logged:
            return f"its last step was logged {self.waited_s:.1f} s before; a pause of {self.limit_s:.1f} s would not be unusual"
        return f"its newest wait lasted {self.waited_s:.1f} s; in this job one of {self.limit_s:.0f} s would not be unusual"

    @property
    def is_long_for_told(self) -> bool:
        """Whether ranks that were told to end had waited for as long as a hang may take to be noticed."""
        return self.told is not None and self.waited_s >= LEAST_STANDSTILL_S


def pace_of_live(run: Run, edges: Sequence[Edge]) -> Pace | None:
    """How a job that nothing shows to have ended or stalled was waiting when it was looked at; None if it has stalled, or if
    the evidence does not say when it was taken."""
    told = told_to_end(run)
    if _has_ended(run, is_told=told is not None) or _has_stalled(run):
        return None
    standing = [*_pending_ranks(run, edges)] or (list(run.ranks) if told else [])
    first_ns = told.first_ns if told else 0
    waits = [wait for rank in standing if (wait := _wait(run.ranks[rank], first_ns)) is not None]
    if not waits:
        return None
    waited_s = max(waits)
    limit_s = max(LEAST_STANDSTILL_S, _patience_s(run))
    return Pace(waited_s=waited_s, limit_s=limit_s, told=told) if waited_s < limit_s else None


def pace_of_logs(run: Run) -> Pace | None:
    """How a job of which logs alone tell went on until its launcher was told to end it; None if something else may have ended it,
    or if it had logged no step for long."""
    said = trouble_of_job(run)
    newest_s = run.job_log.last_time_s or 0.0 if run.job_log is not None and said else 0.0
    told_s = min((event.time_s for event in said if event.kind in _FROM_OUTSIDE and event.time_s), default=newest_s)
    logs = [record.log for record in run.ranks.values() if record.log is not None and record.log.step_times]
    if not told_s or len(logs) < len(run.ranks) or any(map(_shows_own_end, run.ranks.values())):
        return None
    if not all(event.kind in _FROM_OUTSIDE or is_interrupt(event) for event in said):
        return None
    times = [sorted(log.step_times.values()) for log in logs]
    gaps = [max(b - a for a, b in itertools.pairwise(each)) for each in times if len(each) >= LEAST_LOGGED]
    waited_s = max((told_s - each[-1] for each in times), default=0.0)
    limit_s = TIMES_LONGEST_GAP * min(gaps, default=0.0)
    if len(gaps) < len(logs) or not 0 <= waited_s < limit_s:
        return None
    by_sigterm = not any(map(_INTERRUPTED.search, (event.text for event in said)))
    told = Told(ranks=tuple(run.ranks), is_all=True, by_sigterm=by_sigterm, first_ns=int(told_s * 1e9))
    return Pace(waited_s=waited_s, limit_s=limit_s, told=told, is_logged=True)


def _shows_own_end(record: RankRecord) -> bool:
    """Whether anything but the end that a launcher made is known of a rank."""
    ended = record.exit is not None and record.exit.code != 0 and not record.exit.was_told
    return ended or any(event.kind != EventKind.SIGTERM and not is_interrupt(event) for event in record.events)


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
    """Whether anything but a look at live processes was left: an exit, an error, a launcher's report. What comes of a signal
    from outside (`is_told`) is none of these."""
    if run.launcher is not None and run.launcher.code is not None:
        return True
    if run.job_log is not None and any(map(is_last_word, run.job_log.events)):
        return True
    return any(_shows_end(record, is_told=is_told) for record in run.ranks.values())


# Texts of these kinds end a process, if they do, by an exception: that its recorder dumps for, or its exit code shows.
_NO_END = (EventKind.SIGTERM, EventKind.EXCEPTION, EventKind.OOM)
_OF_OTHERS = (*_NO_END, EventKind.COMM_CLOSED)  # also what comes of the end of another rank


def _shows_end(record: RankRecord, *, is_told: bool) -> bool:
    is_stopped = record.process_state[:1] in ("T", "t")
    is_gone = record.is_gone or record.process_state == "gone" or record.process_state[:1] in ("Z", "X")
    has_left = record.heartbeat is not None and record.heartbeat.is_stopped and not is_told
    is_dumped = any(_shows_trouble(record, dump, is_told=is_told) for dump in record.dumps)
    harmless = _OF_OTHERS if is_told else _NO_END
    has_failed = any(event.kind not in harmless and not logged_on(record, event) for event in record.events)
    return is_stopped or (is_gone and not is_told) or has_left or is_dumped or has_failed or record.exit is not None


def _shows_trouble(record: RankRecord, dump: Dump, *, is_told: bool) -> bool:
    """Whether a dump was written for what its rank did not get over, and what a signal from outside does not explain."""
    if not any(word in dump.reason for word in ("exception", "sigterm", "timeout", "abort", "fatal", "gil")):
        return False
    if got_over(record, dump):
        return False
    is_explained = "sigterm" in dump.reason or ("exception" in dump.reason and own_exception(record) is None)
    return not (is_told and is_explained)


def _has_stalled(run: Run) -> bool:
    """Whether a recorder saw two moments without progress between them: that is what makes it dump a stall."""
    return any(stack.reason == STALL for record in run.ranks.values() for stack in record.stacks)


def stood_to_the_end(run: Run) -> bool:
    """Whether recorders dumped a stall, and ticked on without progress for longer than a wait may last: whatever ended the
    processes then, the job had hung."""
    beats = [record.heartbeat for record in run.ranks.values() if record.heartbeat is not None]
    stood_s = min(((beat.alive_ns - came_further_ns(beat)) / 1e9 for beat in beats if beat.moves), default=0.0)
    return _has_stalled(run) and stood_s >= max(LEAST_STANDSTILL_S, _patience_s(run))


def _pending_ranks(run: Run, edges: Sequence[Edge]) -> Iterator[int]:
    waiting = {edge.waiter for edge in edges}
    for rank, record in run.ranks.items():
        if rank in waiting or (len(record.operations) > 0 and bool(pending(record.operations).any())):
            yield rank


def _wait(record: RankRecord, told_ns: int) -> float | None:
    """For how long a rank's newest operation, a pending one if there is any, had been the last when the evidence was taken, or
    when the first rank was told to end; None if no time is known."""
    is_pending = pending(record.operations)
    created = record.operations["created_ns"][is_pending if is_pending.any() else slice(None)]
    looked_ns = min(filter(None, (looked_at_ns(record), told_ns)), default=0)
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
        headline=f"{pace.told.text if pace.told else ''} in a wait that may have been a hang; if it was: {suspected.headline}",
        evidence=(Evidence(text=waited), *suspected.evidence[:4]), chain=suspected.chain,
        next_steps=("find out who ended it: a person, a time limit, a preemption", *suspected.next_steps),
    )  # fmt: skip
