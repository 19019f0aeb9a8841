"""What other programs report of a job: NCCL's RAS and inspector, GPU tools, kernels, schedulers and cluster managers.

A process that does not answer RAS is a verdict where it is one of few. All else that names no rank is a fact, which an undecided
report lists: one RAS report alone cannot tell a hang from a job that is just launching, two with equal counts can. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, Run, Situation, Verdict

# By weight. Of the last, a healthy job may have any.
FAULTS = (
    EventKind.UNREACHABLE, EventKind.NODE_LOST, EventKind.DEVICE_ERROR, EventKind.KILLED, EventKind.OOM, EventKind.EXITED,
    EventKind.PREEMPTED, EventKind.TIME_LIMIT, EventKind.CANCELLED, EventKind.DESYNC,
)  # fmt: skip
_FACTS = (*FAULTS, EventKind.EXCEPTION, EventKind.COMM_ERROR, EventKind.HEARTBEAT, EventKind.DEVICE_SLOW)
MOST_SHOWN = 6
_KNOWN = (RankState.DEAD, RankState.FROZEN, RankState.GIL_HELD)  # which have verdicts of their own


def faults(run: Run) -> list[LogEvent]:
    """What was reported that a healthy job has none of, the gravest first; of the job, or of ranks by another tool."""
    return [event for event in _events(run) if event.kind in FAULTS]


def trouble_of_job(run: Run) -> list[LogEvent]:
    """What the job's own log says that no rank is known to have written, but for what stands before its word that it is done."""
    job = run.job_log
    if job is None:
        return []
    return [
        event for event in job.events if not job.done_line or event.source != job.source or event.line > job.done_line
    ]


def facts(run: Run) -> tuple[Evidence, ...]:
    """What was reported, the gravest first, a text once."""
    seen: dict[str, Evidence] = {}
    for event in _events(run):
        rank = event.rank if event.rank >= 0 else None
        seen.setdefault(event.text, Evidence(text=event.text[:300], rank=rank, source=f"{event.source}:{event.line}"))
    return tuple(seen.values())[:MOST_SHOWN]


_FAILS = re.compile(
    r"\b(?:fatal|panic|fail(?:ed|ure)|errors?|killed|aborted|crashed|unreachable|(?:unable|not able|could not|cannot|can't) "
    r"(?:to )?\w+|rc=[1-9]\d*)\b(?!\s*[:=]?\s*[\d.]+(?:[\s%,|]|$))",
    re.IGNORECASE,
)
_HANGS = re.compile(
    r"\bno (?:progress|output|heartbeat)\b.{0,40}\b(?:for|in|since)\b"
    r"|\b(?:is|has|are|seems?|appears?) (?:hung|stuck|stalled|hanging)\b|\b(?:hang|stall|deadlock) detected\b",
    re.IGNORECASE,
)
_NO_FAILURE = re.compile(
    r"\b(?:no|0|zero|without) (?:\w+ )?(?:errors?|failures?)\b|\bWARN|\bDEBUG\b|\bINFO\b|\bretry|\bignor|\bskip|\bcontinu|\bfall",
    re.IGNORECASE,
)


def parting(run: Run) -> Iterator[Evidence]:
    """The last lines of logs that end after their last step with a word of a failure, in whatever form, or of a hang."""
    logs = {rank: record.log for rank, record in run.ranks.items() if record.log}
    for rank, log in [*logs.items(), *([(None, run.job_log)] if run.job_log else [])]:
        last = next((line for line in reversed(log.tail) if line.strip()), "")[:400]
        begun = max(log.last_step_line, log.done_line)
        is_after = log.tail_line > begun and (begun > 0 or rank is not None)
        has_failed = is_after and _FAILS.search(last) and not _NO_FAILURE.search(last)
        if has_failed or (log.tail_line > begun and _HANGS.search(last)):
            yield Evidence(text=f"last line: {last.strip()[:200]}", rank=rank, source=f"{log.source}:{log.tail_line}")


def suspects(run: Run) -> tuple[int, ...]:
    """Ranks that reports or exceptions of others name, where they are a minority."""
    named = {rank for event in faults(run) for rank in _named(run, event)}
    named = named or {
        rank for event in blaming(run) for rank in map(int, event.values["blames"].split(",")) if rank in run.ranks
    }
    return tuple(sorted(named)) if 2 * len(named) < run.world_size else ()


def blaming(run: Run) -> list[LogEvent]:
    """Exceptions of the program's own that say of other ranks that they are gone, or did not do their part."""
    return [event for record in run.ranks.values() for event in record.events if "blames" in event.values]


def reported(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Verdicts on few processes that do not answer RAS, and on few ranks that two of its reports show behind at equal counts."""
    silent = [event for event in _events(run) if event.kind == EventKind.UNREACHABLE]
    ranks = sorted({rank for event in silent for rank in _named(run, event)})
    if ranks and 2 * len(ranks) < run.world_size and not any(_lives(states[rank]) for rank in ranks):
        is_dead = any(event.values.get("is_dead") for event in silent)
        yield _verdict(
            run, VerdictKind.RANK_DIED if is_dead else VerdictKind.RANK_FROZEN, ranks, silent, Basis.NO_ANSWER,
            "does not answer NCCL's RAS" + (" any more and is considered dead" if is_dead else "")
            + ": its process is stopped or gone, or its host is lost",
        )  # fmt: skip
    behind = [event for event in _events(run) if event.kind == EventKind.DESYNC and "counts" in event.values]
    reports = Counter(text for text, _ in {(event.text, event.values.get("at", "")) for event in behind})
    again = [event for event in behind if reports[event.text] > 1]
    ranks = sorted({rank for event in again for rank in _named(run, event)})
    if ranks and 2 * len(ranks) < run.world_size and not any(states[rank].kind in _KNOWN for rank in ranks):
        yield _verdict(
            run, VerdictKind.STUCK_ON_CPU, ranks, again, Basis.BEHIND_TWICE,
            "launched fewer operations than the others, and no more between two of RAS's reports",
        )  # fmt: skip

    yield from _lost_task(run)


_NO_TROUBLE = (EventKind.EXITED, EventKind.SIGTERM, EventKind.CANCELLED)


def _lost_task(run: Run) -> Iterator[Verdict]:
    """RANK_DIED for the one rank that JAX's coordination service or Ray lost, where nothing tells of trouble that may have done
    it."""
    logs = [record.log for record in run.ranks.values() if record.log] + ([run.job_log] if run.job_log else [])
    said = [
        event
        for event in _events(run)
        if event.kind == EventKind.EXITED and event.rank >= 0 and "is_lost" in event.values
    ]
    ranks = sorted({event.rank for event in said})
    if any(
        max(log.last_step_line, log.done_line) > event.line
        for log in logs
        for event in said
        if event.source == log.source
    ):
        return  # the job went on
    if len(ranks) == 1 < run.world_size and all(event.kind in _NO_TROUBLE for log in logs for event in log.events):
        yield _verdict(
            run, VerdictKind.RANK_DIED, ranks, said, Basis.EXIT_CODE_ALONE,
            "died: its process was lost, and nothing shows an exception or the trouble of a peer",
        )  # fmt: skip


def _verdict(
    run: Run, kind: VerdictKind, ranks: Sequence[int], said: Sequence[LogEvent], basis: Basis, text: str
) -> Verdict:
    one = next(event for event in said if set(_named(run, event)) & set(ranks))
    return Verdict(
        verdict=kind, subtype=Subtype.NONE, culprits=tuple(ranks), confidence=basis.confidence, step=run.step_of(ranks[0]),
        headline=f"{rank_list(ranks)} {text}", evidence=(Evidence(text=one.text[:300], source=f"{one.source}:{one.line}"),),
        next_steps=("look at that process and its host: is it there, and what does its stack show?",),
    )  # fmt: skip


def _lives(state: Situation) -> bool:
    """Whether other evidence says what the rank does, or how it ended."""
    return state.kind not in (RankState.UNKNOWN, RankState.SILENT)


def _named(run: Run, event: LogEvent) -> list[int]:
    names = event.values.get("names", "")
    named = [int(name) for name in names.split(",") if name.isdigit()] or ([event.rank] if event.rank >= 0 else [])
    return [rank for rank in named if rank in run.ranks]


def _events(run: Run) -> list[LogEvent]:
    """The job's own reports, and those of other tools on ranks."""
    of_job = [event for event in trouble_of_job(run) if event.kind in _FACTS]
    kinds = (EventKind.UNREACHABLE, EventKind.DEVICE_SLOW, EventKind.HEARTBEAT, EventKind.EXITED, EventKind.DESYNC)
    of_ranks = [
        event
        for record in run.ranks.values()
        for event in record.events
        if event.kind in kinds or (event.kind == EventKind.COMM_ERROR and "NCCL WARN" in event.text)
    ]
    return sorted([*of_job, *of_ranks], key=lambda event: _FACTS.index(event.kind))
