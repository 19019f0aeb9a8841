"""Evidence that speaks against a verdict which was inferred, not recorded. Pure."""

from __future__ import annotations

from titan_ckpt.debug.diagnosis.from_logs.named_ranks import absent_ranks
from titan_ckpt.debug.incident.kinds import FlagKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict

RECORDED = 0.85  # from here on a verdict rests on what was recorded of the rank itself

_NOT_COME = (VerdictKind.STUCK_ON_CPU, VerdictKind.SKIPPED_COLLECTIVE, VerdictKind.RANK_DIED, VerdictKind.RANK_FROZEN)


def is_contradicted(run: Run, verdict: Verdict) -> bool:
    """Whether a verdict that a rank did not come rests on inference, and either its dump is older than what it then did, or
    error texts name other ranks as those that did not come."""
    if verdict.subtype == Subtype.FINISHED_EARLY and not _ended_before(run, verdict):
        return True
    if verdict.confidence >= RECORDED or not verdict.culprits or verdict.verdict not in _NOT_COME:
        return False
    accused = set(verdict.culprits)
    stale = {rank for flag in run.flags if flag.flag == FlagKind.DUMP_SKEW for rank in flag.ranks}
    named = set(absent_ranks(run))
    return bool(accused & stale) or bool(named and not accused & named)


def _tells_exceptions(run: Run) -> bool:
    """Whether a recorder dumped for an exception and did not take that for an orderly end."""
    return any(
        record.heartbeat
        and not record.heartbeat.is_stopped
        and any(dump.reason == "exception" for dump in record.dumps)
        for record in run.ranks.values()
    )


EARLIER_NS = 1_000_000_000


def _ended_before(run: Run, verdict: Verdict) -> bool:
    """Whether a rank that is said to have finished early ended before those that waited for it, where its recorder alone says so,
    and may have taken an uncaught exception for an orderly end, as older ones did."""
    finished = [run.ranks[rank] for rank in verdict.culprits if run.ranks[rank].exit is None]
    if all(record.heartbeat and record.heartbeat.status == 0 for record in finished) or _tells_exceptions(run):
        return True
    ends = [record.heartbeat.alive_ns for record in finished if record.heartbeat and record.heartbeat.is_stopped]
    others = [run.ranks[rank].heartbeat for rank in verdict.victims if rank in run.ranks]
    later = [beat.alive_ns for beat in others if beat is not None]
    return not ends or not later or max(ends) + EARLIER_NS < max(later)
