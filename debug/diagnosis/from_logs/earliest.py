"""Which of several ranks that raised exceptions of their own raised the first: the others may have raised for want of that one.

The order is known within one file, and between files where the tracebacks, or the records that announce them, have times: all
with a time zone or all without. Else it is not known, and the verdicts stay in the order of the ranks. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Exit, LogEvent, Run, Verdict

# What a rank says that ends because others failed.
_OF_OTHERS = re.compile(
    r"\b(?:another|other|remote|peer|some) (?:worker|rank|process|node|replica|host|actor)s?\b.{0,60}?"
    r"\b(?:fail|die|dead|crash|exit|abort|gone|lost|error|kill)",
    re.IGNORECASE,
)


def in_order(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts; among those on exceptions of ranks' own the earliest first, and last those that speak of other ranks."""
    verdicts = _without_victims(run, verdicts)
    found = {n: event for n, verdict in enumerate(verdicts) if (event := _raised(run, verdict)) is not None}
    if len(found) < 2:
        return verdicts
    moments = _moments(found)
    order = sorted(found, key=lambda n: (_OF_OTHERS.search(found[n].text) is not None, moments.get(n, (0.0, 0)), n))
    ordered = dict(zip(found, (verdicts[n] for n in order), strict=True))
    return [ordered.get(n, verdict) for n, verdict in enumerate(verdicts)]


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


def _moments(found: Mapping[int, LogEvent]) -> dict[int, tuple[float, int]]:
    """When each was raised; {} where that cannot be compared."""
    if len({event.source for event in found.values()}) == 1:
        return {n: (0.0, event.line) for n, event in found.items()}
    zones = {event.values.get("dated", "") for event in found.values()}
    if "" in zones or (len(zones) > 1 and "local" in zones):
        return {}
    return {n: (_utc_s(event), event.line) for n, event in found.items()}


def _utc_s(event: LogEvent) -> float:
    zone = event.values["dated"]
    return (event.time_s or 0.0) - (0.0 if zone == "local" else float(zone))
