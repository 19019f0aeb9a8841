"""Which of several ranks that raised exceptions of their own raised the first: the others may have raised for want of that one.

The order is known within one file, and between files where the tracebacks, or the records that announce them, have times: all
with a time zone or all without. Else it is not known, and the verdicts stay in the order of the ranks. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Exit, LogEvent, Run, Verdict

# What a rank says that ends because others failed.
_OF_OTHERS = re.compile(
    r"\b(?:another|other|remote|peer|some) (?:worker|rank|process|node|replica|host|actor)s?\b.{0,60}?"
    r"\b(?:fail|die|dead|crash|exit|abort|gone|lost|error|kill)",
    re.IGNORECASE,
)


# What a rank raises in its own code that lost another one: a connection, a pipe, a file that the other one writes.
_LOST = re.compile(
    r"(?:[\w.]{1,80}\.)?(?:(?:Connection\w{0,20}Error|BrokenPipeError|EOFError|URLError|RemoteDisconnected|\w{0,20}DiedError)\b"
    r"|FileNotFoundError: .{0,300}(?:rank|worker|peer)[_-]?\d)"
)
AT_ONCE_S = 5.0  # the time of a traceback is that of the record before it


def in_order(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts; among those on exceptions of ranks' own the earliest first, or all of these together where nothing shows
    which that is."""
    verdicts = _without_victims(run, verdicts)
    found = {n: event for n, verdict in enumerate(verdicts) if (event := _raised(run, verdict)) is not None}
    if len(found) < 2:
        return verdicts
    moments = _moments(run, found)
    first = min(moments.values(), default=(0.0, 0))[0]
    at_once = [n for n in found if not moments or moments[n][0] <= first + AT_ONCE_S]
    least = min(_weakness(run, verdicts[n], found[n]) for n in at_once)
    tied = [n for n in at_once if _weakness(run, verdicts[n], found[n]) == least]
    if len(tied) > 1 and not _is_sure(found, moments, tied):
        rest = [verdict for n, verdict in enumerate(verdicts) if n not in tied]
        return [_one_of([verdicts[n] for n in tied]), *rest]
    order = sorted(found, key=lambda n: (n not in tied, moments.get(n, (0.0, 0)), n))
    ordered = dict(zip(found, (verdicts[n] for n in order), strict=True))
    return [ordered.get(n, verdict) for n, verdict in enumerate(verdicts)]


def _weakness(run: Run, verdict: Verdict, event: LogEvent) -> tuple[bool, bool, bool]:
    """How little an exception is a cause: a launcher told its rank to end, it speaks of others, or is how one loses them."""
    ends = [run.ranks[rank].exit for rank in verdict.culprits]
    was_told = any(end is not None and end.was_told for end in ends)
    return was_told, _OF_OTHERS.search(event.text) is not None, _LOST.match(event.text) is not None


def _is_sure(found: Mapping[int, LogEvent], moments: Mapping[int, tuple[float, int]], tied: Sequence[int]) -> bool:
    """Whether the order of these is known: by their lines in one file, or by the times of the records that announce them."""
    first, second = sorted(moments.get(n, (0.0, 0)) for n in tied)[:2]
    one_file = len({found[n].source for n in tied}) == 1
    return bool(moments) and (one_file or (first[0] < second[0] and all("announced" in found[n].values for n in tied)))


def _one_of(tied: Sequence[Verdict]) -> Verdict:
    """All ranks of several verdicts as suspects."""
    ranks = tuple(sorted(rank for verdict in tied for rank in verdict.culprits))
    return replace(
        tied[0], culprits=(), suspects=ranks, victims=(), file="", line=0, confidence=Basis.ORDER_UNKNOWN.confidence,
        headline=f"{rank_list(ranks)} raised exceptions of their own, and nothing shows which came first",
        evidence=tuple(verdict.evidence[0] for verdict in tied if verdict.evidence),
        next_steps=("read these tracebacks: one of them may only tell of the other", *tied[0].next_steps[1:]),
    )  # fmt: skip


def _without_victims(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Without ranks that a signal ended after another rank had failed by an exception of its own."""
    failed = [rank for verdict in verdicts if _raised(run, verdict) is not None for rank in verdict.culprits]
    exits = [ended for rank in failed if (ended := run.ranks[rank].exit) is not None]
    return [verdict for verdict in verdicts if not (failed and verdict.signal and _are_victims(run, verdict, exits))]


def _are_victims(run: Run, verdict: Verdict, failed: Sequence[Exit]) -> bool:
    """Whether libraries aborted these ranks, or a launcher lists the `failed` ones as the first, or before them."""
    if verdict.signal == "SIGABRT":
        return True
    ended = [run.ranks[rank].exit for rank in verdict.culprits]
    return any(
        first.is_first or all(later is not None and _is_before(first, later) for later in ended) for first in failed
    )


def _is_before(first: Exit, later: Exit) -> bool:
    if first.time_s is not None and later.time_s is not None:
        return first.time_s < later.time_s
    return first.time_s is later.time_s is None and first.source == later.source and first.line < later.line


def _raised(run: Run, verdict: Verdict) -> LogEvent | None:
    """The first exception of a verdict's ranks, if it rests on that."""
    if verdict.verdict != VerdictKind.RANK_DIED or verdict.confidence != Basis.OWN_EXCEPTION.confidence:
        return None
    events = [event for rank in verdict.culprits if (event := own_exception(run.ranks[rank])) is not None]
    return min(events, key=lambda event: (event.time_s or 0.0, event.line), default=None)


def _moments(run: Run, found: Mapping[int, LogEvent]) -> dict[int, tuple[float, int]]:
    """When each was raised; {} where that cannot be compared."""
    if len({event.source for event in found.values()}) == 1:
        return {n: (0.0, event.line) for n, event in found.items()}
    zones = {event.values.get("dated", "") for event in found.values()}
    if "" in zones or (len(zones) > 1 and "local" in zones):
        return {}
    ahead = _ahead_s(run, {event.rank for event in found.values()})
    return {n: (_utc_s(event) - ahead.get(event.rank, 0.0), event.line) for n, event in found.items()}


LEAST_STEPS = 3


def _ahead_s(run: Run, ranks: set[int]) -> dict[int, float]:
    """How far the clock of each rank is ahead of that of one of them, by the times at which they logged the same steps; {} where
    these differ from step to step by as much: then the ranks took them apart."""
    times = {
        rank: log.step_times for rank in sorted(ranks) if rank in run.ranks and (log := run.ranks[rank].log) is not None
    }
    first = next(iter(times.values()), {})
    found = {}
    for rank, mine in times.items():
        gaps = sorted(mine[step] - first[step] for step in mine.keys() & first.keys())
        if len(gaps) < LEAST_STEPS:
            return {}
        middle, spread = gaps[len(gaps) // 2], gaps[-1] - gaps[0]
        if abs(middle) > max(1.0, 4 * spread):
            found[rank] = middle
    return found


def _utc_s(event: LogEvent) -> float:
    zone = event.values["dated"]
    return (event.time_s or 0.0) - (0.0 if zone == "local" else float(zone))
