"""Whether what srun or mpiexec counts, its tasks, are the ranks, or launchers of several ranks: one torchrun for each node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.read.text.endings import FAILED_WORKER
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.schedulers.host_lists import expanded, ranges
from titan_ckpt.debug.read.text.schedulers.process_ends import Ending

MOST_RANKS = 1024  # of one task


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """What a run's texts show. `are_ranks` is None where they do not tell; `ranks` are those of each task, where they do.
    `are_spread`: labels are all that says so, and each host has one task: with a torchrun for each it would look the same."""

    are_ranks: bool | None
    ranks: Mapping[int, tuple[int, ...]]
    are_spread: bool = False

    def of_label(self, task: int) -> int:
        """The rank whose lines a label marks; -1 if the task may hold several."""
        return task if self.are_ranks is not False else self._only(task)

    def of_ending(self, ending: Ending) -> int:
        """The rank whose end was said to be a task's; -1 if the task may be a launcher."""
        if self.are_spread and ending.code == FAILED_WORKER:
            return -1
        if self.are_ranks or (self.are_ranks is None and not ending.may_be_launchers):
            return -1 if ending.rank is None else ending.rank
        return -1 if ending.rank is None else self._only(ending.rank)

    def _only(self, task: int) -> int:
        known = self.ranks.get(task, ())
        return known[0] if len(known) == 1 and self.are_ranks is False else -1


def tasks_of(texts: Sequence[JobText]) -> Tasks:
    """By what the texts show of tasks, in this order: which ranks stand behind their labels, a launcher's own lines, how many
    there are on one host, how many ranks there are."""
    shown: defaultdict[int, set[int]] = defaultdict(set)
    hosts: defaultdict[str, set[int]] = defaultdict(set)
    for text in texts:
        for task, ranks in text.tasks.items():
            shown[task] |= ranks
        for host, task in _on_hosts(text):
            hosts[host].add(task)
    seen = _ranks(texts)
    known = {task for tasks in hosts.values() for task in tasks} | set(shown)
    placed = {task: tuple(sorted(ranks)[:MOST_RANKS]) for task, ranks in shown.items() if ranks}
    if placed:
        is_each = all(ranks == (task,) for task, ranks in placed.items())
        if not is_each or len(placed) > 1:
            return Tasks(are_ranks=is_each, ranks=placed)
    if any(text.endings.is_elastic or text.endings.has_launcher for text in texts):
        return Tasks(are_ranks=False, ranks=placed or _in_blocks(known, len(seen)))
    if any(len(tasks) > 1 for tasks in hosts.values()):
        return Tasks(are_ranks=True, ranks={})
    if len(shown) > 1:
        return Tasks(are_ranks=True, ranks={}, are_spread=len(hosts) > 1)
    if len(hosts) > 1 and 1 < len(known) < len(seen):
        return Tasks(are_ranks=False, ranks=_in_blocks(known, len(seen)))
    return Tasks(are_ranks=True if known and _fits_ranks_alone(max(known), len(seen)) else None, ranks={})


def _on_hosts(text: JobText) -> Iterator[tuple[str, int]]:
    """The tasks that ended, each with its host; with the list of hosts where srun gives more tasks than these."""
    for names, numbers in text.endings.tasks:
        hosts, tasks = expanded(names), ranges(numbers)
        yield from zip(hosts if len(hosts) == len(tasks) else [names] * len(tasks), tasks, strict=True)
    yield from ((end.host, end.rank) for end in text.endings.found if end.is_task and end.host and end.rank is not None)


def _ranks(texts: Iterable[JobText]) -> set[int]:
    """All ranks that lines name; none where these leave some out."""
    seen = {writer[2] for text in texts for writer in text.writers if writer[0] == "rank"}
    seen |= {rank for text in texts for rank in text.links.values()}
    return seen if len(seen) > 1 and max(seen) + 1 == len(seen) else set()


def _fits_ranks_alone(last: int, num_ranks: int) -> bool:
    """Whether of all counts above the highest task only that of the ranks gives every task equally many."""
    counts = [count for count in range(last + 1, num_ranks + 1) if num_ranks % count == 0]
    return counts == [num_ranks] and num_ranks > 0


def _in_blocks(known: set[int], num_ranks: int) -> dict[int, tuple[int, ...]]:
    """The ranks of each task where all tasks are known and have equally many."""
    count = len(known)
    if not count or known != set(range(count)) or num_ranks % count or not num_ranks:
        return {}
    size = num_ranks // count
    return {task: tuple(range(task * size, (task + 1) * size)) for task in known}
