"""Prefixes that are ambiguous alone, as `3: ` and `[3] ` are: what most lines of a file begin with counts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from titan_ckpt.debug.read.text.prefixes import LOOK, WEAK, Line, is_word, outer_of, peel

SAMPLE = 400
LEAST_SHARE = 0.6
_UNLABELLED = ("srun:", "slurmstepd:", "mpirun", "+ ", "- ", "prterun")


def usual_prefixes(lines: Sequence[str], year: int = 1970) -> tuple[tuple[str, ...], list[Line]]:
    """The ambiguous forms that most of `lines` have, outermost first, and the lines without these and all other prefixes.

    >>> usual_prefixes(["0: start", "1: start", "1: Traceback (most recent call last):"])[0]
    ('srun',)
    """
    enabled: list[str] = []
    peeled = [peel(line, (), year) for line in lines]
    for _ in range(3):
        texts = [line.text.removeprefix(f"{line.level} ") if line.level else line.text for line in peeled]
        kept = [at for at, text in enumerate(texts) if text.strip() and not text.startswith(_UNLABELLED)]
        rests, outers = [texts[at] for at in kept], [outer_of(peeled[at]) for at in kept]
        new = next((name for name in WEAK if name not in enabled and _is_usual(name, rests, outers)), None)
        if new is None:
            break
        enabled.append(new)
        peeled = [peel(line, enabled, year) for line in lines]
    return tuple(enabled), peeled


def _is_usual(name: str, rests: Sequence[str], outers: Sequence[tuple[str, int | None] | None]) -> bool:
    pattern, _ = WEAK[name]
    is_local = any(outer is not None and outer[1] is not None for outer in outers)
    if name == "inner":
        return _are_inner(pattern, rests, outers)
    if name in ("hydra", "srun") and is_local:
        return False  # tasks are outside of the processes that they start
    labels: Counter[str] = Counter()
    for rest in rests:
        match = pattern.match(rest[:LOOK])
        if match and not is_word(name, match):
            labels[match.groupdict().get("rank") or match.groupdict().get("host") or ""] += 1
    known = sum(labels.values())
    if not known or known < LEAST_SHARE * len(rests) or (name in ("hydra", "srun") and _counts_up(rests, pattern)):
        return False
    if name in _OF_PROGRAMS:
        return _are_side_by_side([int(match["rank"]) for rest in rests if (match := pattern.match(rest[:LOOK]))])
    if name in ("hydra", "srun") and _are_pids({int(label) for label in labels}, is_certain=name == "hydra"):
        return False
    return name in ("hydra", "srun") or all(re.search(r"[\d-]", label) for label in labels)


def _are_inner(pattern: re.Pattern[str], rests: Sequence[str], outers: Sequence[tuple[str, int | None] | None]) -> bool:
    """Whether numbers behind the labels of processes are their ranks: each belongs to one process, and they run side by side. A
    host's name may be that of several, a place on a host not."""
    pairs = [
        (int(match["rank"]), outer)
        for rest, outer in zip(rests, outers, strict=True)
        if outer is not None and (match := pattern.match(rest[:LOOK])) and not _is_labelled(rest[match.end() :])
    ]
    numbers, labels = {number for number, _ in pairs}, {outer for _, outer in pairs}
    if len(labels) < 2 or len(set(pairs)) != len(numbers) or len(pairs) < LEAST_SHARE * len(rests):
        return False
    is_one_each = len(labels) == len(numbers) or all(outer[1] is not None for outer in labels)
    first = min(numbers)
    return is_one_each and first % len(numbers) == 0 and _are_side_by_side([number - first for number, _ in pairs])


def _is_labelled(text: str) -> bool:
    """Whether a text begins with a label of its own: what stands before it is no program's."""
    line = peel(text[:LOOK])
    return line.local_rank is not None or line.rank is not None


_MOST_NODES = 100  # whose ranks' lines are labelled `[N]`, and not by a launcher in a clearer form
_OF_PROGRAMS = ("parenthesis", "angle", "index", "short", "gpu", "logfmt")  # which mean what their programs want


def _are_side_by_side(numbers: Sequence[int]) -> bool:
    """Whether numbers are those of processes that run together: all from 0, each seen after a higher one. What counts epochs or
    items only grows."""
    highest = itertools.accumulate(numbers, max)
    again = {number for number, high in zip(numbers, highest, strict=True) if number < high}
    return bool(again) and again == set(range(max(numbers)))


def _are_pids(numbers: set[int], *, is_certain: bool) -> bool:
    """Whether numbers are those of processes, or ports: too large for the ranks of a node. Where all must be ranks or pids
    (`is_certain`), also those that do not begin at a multiple of their count, as a node's share of the ranks does."""
    first, count = min(numbers), len(numbers)
    return first >= _MOST_NODES * count or (is_certain and first % count != 0)


def _counts_up(rests: Sequence[str], pattern: re.Pattern[str]) -> bool:
    """Whether the numbers are those of the lines: each once, in order."""
    numbers = [int(match["rank"]) for rest in rests if (match := pattern.match(rest[:LOOK]))]
    return len(numbers) > 3 and all(b == a + 1 for a, b in itertools.pairwise(numbers))
