"""One verdict for several ranks with one fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from titan_ckpt.debug.diagnosis.ends import left_gone
from titan_ckpt.debug.diagnosis.rank_death import signal_of
from titan_ckpt.debug.diagnosis.waiting.awaited_rank import cause_of_death
from titan_ckpt.debug.diagnosis.waiting.told_waits import MAX_CHAIN
from titan_ckpt.debug.incident.confidence import ACCUSING, NAMED_TOGETHER, Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict

TOGETHER_S = 2.0
_IN_GROUPS = (
    VerdictKind.SKIPPED_COLLECTIVE, VerdictKind.ORDER_MISMATCH, VerdictKind.OP_MISMATCH, VerdictKind.SIZE_MISMATCH,
    VerdictKind.DTYPE_MISMATCH,
)  # fmt: skip


def merged(run: Run, found: Sequence[Verdict]) -> list[Verdict]:
    """Each verdict once; one for ranks that all raised or hang at the same line, that the kernel calls stopped, or that one
    signal killed within TOGETHER_S."""
    alike: dict[object, list[Verdict]] = {}
    first_s = min((ended for v in found if (ended := _killed_at(run, v)) is not None), default=0.0)
    for number, verdict in enumerate(dict.fromkeys(found)):
        alike.setdefault(_cause(run, verdict, first_s) or number, []).append(verdict)
    return [
        reduce(_died_together, those) if those[0].verdict == VerdictKind.RANK_DIED else named_together(those, 1.0)
        for those in alike.values()
    ]


def _died_together(first: Verdict, other: Verdict) -> Verdict:
    culprits = tuple(sorted({*first.culprits, *other.culprits}))
    where = f" at {other.file}:{other.line}" if other.file else ""
    cause = cause_of_death(other.subtype, other.signal, are_many=True)
    return replace(
        first,
        culprits=culprits,
        victims=tuple(rank for rank in first.victims if rank not in culprits),
        evidence=(*first.evidence[:4], *other.evidence[:1]),
        headline=f"{len(culprits)} ranks ({', '.join(map(str, culprits[:8]))}) died: they {cause}{where}",
    )


def of_program(run: Run, verdict: Verdict) -> Verdict:
    """The verdict; where it names each of several ranks of a job as one that died, of one cause, nobody is at fault alone: all
    are victims. A host or a GPU may be at fault with all its ranks."""
    everybody = max(run.world_size, len(run.ranks))
    if verdict.verdict != VerdictKind.RANK_DIED or verdict.subtype in (Subtype.HOST, Subtype.DEVICE):
        return verdict
    if everybody < 2 or len(verdict.culprits) < everybody:
        return verdict
    what = verdict.headline.partition(" died: ")[2]
    headline = f"{'both' if everybody == 2 else f'all {everybody:,}'} ranks died, none of them alone at fault: {what}"
    steps = tuple(step.replace("; the other ranks are only its victims", "") for step in verdict.next_steps)
    return replace(verdict, culprits=(), victims=verdict.culprits, headline=headline, next_steps=steps)


def _cause(run: Run, verdict: Verdict, first_s: float) -> object:
    """Equal for verdicts of one cause; None for a verdict that stands for itself."""
    if verdict.verdict == VerdictKind.STUCK_ON_CPU:
        where = verdict.evidence[0] if verdict.confidence == Basis.MAIN_STACK.confidence and verdict.evidence else None
        return (verdict.verdict, verdict.subtype, where.file, where.line) if where and where.file else None
    is_in_group = verdict.verdict in _IN_GROUPS and verdict.seq is not None and verdict.confidence >= ACCUSING
    if is_in_group and verdict.subtype != Subtype.FINISHED_EARLY:
        return verdict.verdict, verdict.subtype, verdict.group, verdict.seq, verdict.op  # in several groups of one name
    if verdict.verdict == VerdictKind.RANK_FROZEN and verdict.confidence >= Basis.PROCESS_STOPPED.confidence:
        return verdict.verdict
    if verdict.verdict == VerdictKind.RANK_DIED and verdict.confidence == Basis.PROCESS_GONE.confidence:
        return verdict.verdict if all(left_gone(run.ranks[rank]) for rank in verdict.culprits) else None
    if verdict.subtype in (Subtype.PYTHON_EXCEPTION, Subtype.OOM, Subtype.DEVICE) and verdict.file:
        return verdict.subtype, verdict.file, verdict.line, _error_type(verdict)
    if verdict.subtype == Subtype.PYTHON_EXCEPTION and verdict.evidence:  # without a traceback: by its text
        return verdict.subtype, verdict.evidence[0].text
    if verdict.subtype == Subtype.EXIT_CODE:
        return verdict.subtype
    if verdict.verdict == VerdictKind.RANK_DIED and verdict.subtype == Subtype.HOST and verdict.evidence:
        return (
            verdict.subtype,
            verdict.evidence[0].source,
            verdict.evidence[0].text,
        )  # one line tells of all ranks of a host
    ended = run.ranks[verdict.culprits[0]].exit if len(verdict.culprits) == 1 else None
    if verdict.subtype in (Subtype.SIGNAL, Subtype.OOM) and ended is not None and ended.line and ended.time_s is None:
        # One line of all, such as `srun: error: node2: tasks 4-7: Out Of Memory`.
        return verdict.subtype, verdict.signal, ended.source, ended.line
    ended_s = _killed_at(run, verdict)
    if ended_s is not None and ended_s - first_s <= TOGETHER_S:
        return verdict.subtype, verdict.signal, verdict.file, verdict.line
    return None


def _error_type(verdict: Verdict) -> str:
    """The type of the exception that ended a rank: others may fail at the same line for another reason, such as for its want."""
    is_raised = verdict.subtype == Subtype.PYTHON_EXCEPTION and bool(verdict.evidence)
    return verdict.evidence[0].text.partition(":")[0].strip() if is_raised else ""


def _killed_at(run: Run, verdict: Verdict) -> float | None:
    """When a signal killed the one culprit, where a launcher noted it."""
    if (verdict.verdict, verdict.subtype) != (VerdictKind.RANK_DIED, Subtype.SIGNAL) or len(verdict.culprits) != 1:
        return None
    ended = run.ranks[verdict.culprits[0]].exit
    return ended.time_s if ended is not None and signal_of(ended.code) else None


def named_together(found: Sequence[Verdict], factor: float = NAMED_TOGETHER) -> Verdict:
    """One verdict on ranks of which the same is known; `factor`: of its confidence."""
    first = max(found, key=lambda verdict: verdict.confidence)
    culprits = tuple(sorted({rank for verdict in found for rank in verdict.culprits}))
    others = [rank for rank in culprits if rank not in first.culprits]
    if not others:
        return first
    victims = tuple(sorted({rank for verdict in found for rank in verdict.victims} - set(culprits)))
    return replace(
        first, culprits=culprits, victims=victims, confidence=first.confidence * factor,
        headline=f"{first.headline}; the same is true of {rank_list(others)}",
        chain=tuple(dict.fromkeys(pair for verdict in found for pair in verdict.chain))[:MAX_CHAIN],
        evidence=tuple(dict.fromkeys(item for verdict in found[:4] for item in verdict.evidence[:2])),
    )  # fmt: skip
