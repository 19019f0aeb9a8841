"""Ranks by the numbers of their processes, which count on each host anew: in containers all ranks may have the same one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from titan_ckpt.debug.read.text.job_text import NOBODY, JobText


class Pids:
    """Which rank has which process. `hosts`: of ranks, as far as they are known when a rank is looked up."""

    def __init__(self, known: Iterable[tuple[int, int]], hosts: Mapping[int, str]) -> None:
        """`known`: number of the process and rank."""
        self._ranks: defaultdict[int, set[int]] = defaultdict(set)
        self._hosts = hosts
        for pid, rank in known:
            self.add(pid, rank)

    def add(self, pid: int, rank: int) -> None:
        """Note that a rank has this process."""
        self._ranks[pid].add(rank)

    def rank(self, pid: int, host: str = "") -> int:
        """The rank with this process on a host, any if that is ""; -1 if none or several may be meant."""
        found = {rank for rank in self._ranks.get(pid, ()) if self._may_be_on(rank, host)}
        return found.pop() if len(found) == 1 else -1

    def are_others(self, pids: Iterable[int], rank: int) -> bool:
        """Whether one of these is another process than those that a rank is known to have."""
        others = [pid for pid in pids if rank not in self._ranks.get(pid, ())]
        return bool(others) and any(rank in ranks for ranks in self._ranks.values())

    def _may_be_on(self, rank: int, host: str) -> bool:
        known = self._hosts.get(rank, "")
        return not host or not known or known.partition(".")[0] == host.partition(".")[0]


def host_in(path: str, known: Iterable[str]) -> str:
    """The one of these hosts whose name is a word of a path, as in `pyspy_node-1.txt`; "" if none or several are."""
    found = {
        host for host in known if host in path and re.search(rf"(?<![A-Za-z0-9]){re.escape(host)}(?![A-Za-z0-9])", path)
    }
    return found.pop() if len(found) == 1 else ""


def note_hosts(texts: Sequence[JobText]) -> None:
    """Give what a host's kernel wrote of a process the name of the host: of the line's prefix, or a rank's in the file's name."""
    known = {host for text in texts for host in text.hosts.values()}
    for text in texts:
        of_file = host_in(text.source, known)
        for (kind, place, _), stream in text.writers.items():
            host = place if kind == "host" else of_file if kind == NOBODY[0] else ""
            for events in (stream.first, stream.last) if host else ():
                for n, event in enumerate(events):
                    if "pid" in event.values:
                        events[n] = replace(event, values={"host": host, **event.values})
