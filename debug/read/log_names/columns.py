"""Logs whose names hold several numbers, `train-4411-n1-t5.log` or `task_5_of_8.log`: the one that counts all logs is the rank.

Names of that form are made by `srun --output=%x-%j-n%n-t%t.log` and by launchers that put the attempt behind the process:
`trainer_5_attempt_0_stderr.log`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from titan_ckpt.debug.read.text.job_text import JobText

_NUMBER = re.compile(r"\d{1,18}")
_ENDING = re.compile(r"(?:\.[A-Za-z]{1,8}){1,3}$")
# What stands before a number that counts something else: what may hold several ranks, or what follows each other.
NO_RANKS = re.compile(
    r"(?:node|host|machine|pod|attempt|try|restart|run|job|epoch|step|part|log|trial|fold|seed|exp(?:eriment)?|version)[._-]?$",
    re.IGNORECASE,
)


def by_column(texts: Sequence[JobText]) -> list[dict[int, list[JobText]]]:
    """The logs of each folder by the only number in their names that is another one in each and counts from 0 without a gap."""
    folders: defaultdict[str, defaultdict[tuple[str, ...], list[tuple[list[int], JobText]]]]
    folders = defaultdict(lambda: defaultdict(list))
    for text in texts:
        folder, _, name = text.source.rpartition("/")
        if _ENDING.search(name) and len(numbers := _NUMBER.findall(name)) > 1:
            folders[folder][tuple(_NUMBER.split(name))].append(([*map(int, numbers)], text))
    return [found for by_form in folders.values() if (found := _counted(by_form))]


def _counted(by_form: dict[tuple[str, ...], list[tuple[list[int], JobText]]]) -> dict[int, list[JobText]]:
    """The logs of a folder by their number; {} where a form of name has none, or these count differently."""
    found: defaultdict[int, list[JobText]] = defaultdict(list)
    for words, named in by_form.items():
        columns = [[numbers[place] for numbers, _ in named] for place in range(len(words) - 1)]
        counting = [
            column
            for before, column in zip(words[:-1], columns, strict=True)
            if len(column) > 1 and sorted(column) == [*range(len(column))] and not NO_RANKS.search(before)
        ]
        if len(counting) != 1:
            return {}
        for number, (_, text) in zip(counting[0], named, strict=True):
            found[number].append(text)
    sizes = {len(named) for named in by_form.values()}
    return dict(found) if len(sizes) == 1 else {}
