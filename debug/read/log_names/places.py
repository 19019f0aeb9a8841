"""Places in which local ranks count: launchers' hosts, by the names of their folders and by lines that name both numbers."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from titan_ckpt.debug.read.text.job_text import NOBODY, JobText
from titan_ckpt.debug.read.text.writers.labels import Writer

_MOST_LOGS = 64  # of one local rank that are compared


def offsets(texts: Sequence[JobText], links: Mapping[Writer, int]) -> dict[str, int]:
    """The first rank of each place in which local ranks count: as a line shows it, else in the order of the hosts."""
    first: dict[str, int] = {}
    for (kind, place, number), rank in links.items():
        if kind == "local" and rank >= number:
            first.setdefault(place, rank - number)
    for text in texts:
        if text.endings.node.start is not None:
            first.setdefault(f"{text.scope}|", text.endings.node.start)
    sizes: defaultdict[str, int] = defaultdict(int)
    for text in texts:
        for kind, place, number in text.writers:
            if kind == "local":
                sizes[place] = max(sizes[place], number + 1)
    if len(sizes) > 1 and not set(sizes) & set(first) and len({re.sub(r"\d+", "#", place) for place in sizes}) == 1:
        begin = 0
        for place in sorted(sizes, key=_natural):
            first[place] = begin
            begin += sizes[place]
    return first


def files_of_nodes(texts: Sequence[JobText]) -> set[str]:
    """The files that differ in a number alone, and are of no single rank: each is of another node, as of the pods of a job."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        if text.default == NOBODY:
            alike[re.sub(r"\d+", "#", text.source)].append(text.source)
    return {source for sources in alike.values() if len(sources) > 1 for source in sources}


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,9})", text)]


def speakers(texts: Sequence[JobText], first: Mapping[str, int]) -> dict[str, set[int]]:
    """The ranks that are named in each place that is not the first node's: rank 0 is none of them. Of a node of several of which
    nothing tells its place none is known: {}."""
    named, lost = dict[str, set[int]](), set[str]()
    for text in texts:
        if text.default != NOBODY:
            continue  # one process's own
        place, node = f"{text.scope}|", text.endings.node
        ranks = {writer[2] for writer in text.writers if writer[0] == "rank"}
        ranks |= {rank for rank, number in text.named.items() if number > 1}
        for where, those in (
            (place, ranks),
            *((f"{place}task {task}", of_task) for task, of_task in text.tasks.items()),
        ):
            named[where] = named.get(where, set()) | those
        if node.is_mixed or (node.num_nodes > 1 and node.start is None):
            lost.add(place)
    return {
        place: ranks
        for place, ranks in named.items()
        if 0 not in ranks and (ranks or place in lost) and (place not in first or place in lost)
    }


def crowded(texts: Sequence[JobText]) -> set[str]:
    """The places in which two logs have the same steps of the same local rank: they are of several hosts."""
    steps: defaultdict[int, list[tuple[str, set[int]]]] = defaultdict(list)
    for text in texts:
        for writer, stream in text.writers.items():
            if writer[0] == "local" and writer != text.default and stream.step_times:
                steps[writer[2]].append((writer[1], set(stream.step_times)))
    pairs = (pair for found in steps.values() for pair in itertools.combinations(found[:_MOST_LOGS], 2))
    return {place for one, other in pairs if one[1] & other[1] for place in (one[0], other[0])}
