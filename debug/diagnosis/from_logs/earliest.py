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
from titan_ckpt.debug.incident.records import LogEvent, Run, Verdict

# What a rank says that ends because others failed.
_OF_OTHERS = re.compile(
    r"\b(?:another|other|remote|peer|some) (?:worker|rank|process|node|replica|host|actor)s?\b.{0,60}?"
    r"\b(?:fail|die|dead|crash|exit|abort|gone|lost|error|kill)",
    re.IGNORECASE,
)


def in_order(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts; among those on exceptions of ranks' own the earliest first, and last those that speak of other ranks."""
    found = {n: event for n, verdict in enumerate(verdicts) if (event := _raised(run, verdict)) is not None}
    if len(found) < 2:
        return list(verdicts)
    moments = _moments(found)
    order = sorted(found, key=lambda n: (_OF_OTHERS.search(found[n].text) is not None, moments.get(n, (0.0, 0)), n))
    ordered = dict(zip(found, (verdicts[n] for n in order), strict=True))
    return [ordered.get(n, verdict) for n, verdict in enumerate(verdicts)]


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
