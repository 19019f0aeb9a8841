"""Logs whose newest line comes first, as Grafana Loki and other viewers of logs export them, in their true order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, pairwise

from titan_ckpt.debug.read.text.prefixes import peel

Numbered = tuple[int, str]  # a line's number, the line
SAMPLE = 100  # lines
LEAST_TIMES = 6  # different times
MOST_LINES = 1_000_000  # of a file that is turned; a longer one is read as it is


def oldest_first(lines: Iterator[Numbered]) -> tuple[Iterator[Numbered], bool]:
    """The lines in the order in which they were written, and whether the file had them the other way round: then they are counted
    from its end.

    >>> found, is_turned = oldest_first(iter([(n + 1, f"2026-03-03T16:00:{50 - n}Z step {9 - n}") for n in range(8)]))
    >>> next(found), is_turned
    ((1, '2026-03-03T16:00:43Z step 2'), True)
    """
    sample = list(islice(lines, SAMPLE))
    if not _is_newest_first(sample):
        return chain(sample, lines), False
    held = [*sample, *islice(lines, MOST_LINES - len(sample))]
    rest = next(lines, None)
    if rest is not None:
        return chain(held, [rest], lines), False
    last = held[-1][0]
    return ((last + 1 - number, text) for number, text in reversed(held)), True


def _is_newest_first(sample: list[Numbered]) -> bool:
    """Whether every line begins with a time that is not later than that of the line before, and many are earlier."""
    times = [peel(text).time_s for _, text in sample if text.strip()]
    known = [time_s for time_s in times if time_s is not None]
    if len(known) < len(times) or len(set(known)) < LEAST_TIMES:
        return False
    return all(after <= before for before, after in pairwise(known))
