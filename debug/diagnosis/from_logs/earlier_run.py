"""A rank's log that is of an earlier run: what it did then says nothing of this one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from titan_ckpt.debug.incident.records import Run

LEAST_S = 3600.0  # clocks that nobody sets differ by less
MOST_ZONE_S, ZONE_S, EXACT_S = 14.5 * 3600, 900.0, 60.0  # of UTC+14, and time zones are whole quarters of an hour


def are_of_earlier_run(run: Run, ranks: Sequence[int]) -> bool:
    """Whether the logs of these ranks ended before those of others, which are more, came to their first step."""
    others = [steps for rank in run.ranks if rank not in ranks and (steps := _steps(run, rank))]
    return bool(ranks) and all(_num_later(run, rank, others) > len(ranks) for rank in ranks)


def _num_later(run: Run, rank: int, others: Sequence[Mapping[int, float]]) -> int:
    """How many of the others began after a rank had ended, which no time zone explains."""
    log = run.ranks[rank].log
    if log is None or log.last_time_s is None:
        return 0
    mine, end_s = log.step_times, log.last_time_s
    later = [steps for steps in others if min(steps.values()) - end_s > LEAST_S]
    gaps = [steps[step] - mine[step] for steps in later for step in steps.keys() & mine.keys()]
    if not gaps:
        return sum(min(steps.values()) - end_s > MOST_ZONE_S for steps in later)
    gap = median(gaps)
    is_zone = gap < MOST_ZONE_S and abs(gap - ZONE_S * round(gap / ZONE_S)) < EXACT_S
    return 0 if is_zone else len(later)


def _steps(run: Run, rank: int) -> Mapping[int, float]:
    log = run.ranks[rank].log
    return log.step_times if log is not None else {}
