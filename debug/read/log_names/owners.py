"""Which ranks the writers of all logs are: by process, by place on a host, by node, by a scheduler's task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from titan_ckpt.debug.incident.records import MAX_RANK
from titan_ckpt.debug.read.log_names.pids import Pids
from titan_ckpt.debug.read.log_names.places import crowded, files_of_nodes, offsets, speakers
from titan_ckpt.debug.read.log_names.services import hosts_of_one_rank, single_process_hosts
from titan_ckpt.debug.read.text.job_text import OWN, JobText
from titan_ckpt.debug.read.text.schedulers.host_lists import expanded
from titan_ckpt.debug.read.text.schedulers.process_ends import Ending
from titan_ckpt.debug.read.text.schedulers.tasks import tasks_of
from titan_ckpt.debug.read.text.streams import Stream
from titan_ckpt.debug.read.text.writers.labels import Writer


class Owners:
    """The ranks of writers that are named otherwise: by process, by place on a host, by node."""

    def __init__(self, texts: Sequence[JobText], known: Iterable[tuple[int, int, str]]) -> None:
        known = [*known]
        self.links: dict[Writer, int] = {}
        self.hosts: dict[int, str] = {rank: host for _, rank, host in known if host}
        self.spawned: dict[int, int] = {}  # pid -> rank, by the launcher that started them
        self.pids = Pids(((pid, rank) for pid, rank, _ in known), self.hosts)
        self.tasks = tasks_of(texts)
        writers = {writer for text in texts for writer in text.writers}
        for text in texts:
            self.links.update({writer: rank for writer, rank in text.links.items() if rank <= MAX_RANK})
            self.hosts.update(text.hosts)
            for ending in text.endings.found:
                self._learn(text, ending)
            self.spawned.update({pid: self._on_one_host(text, local) for pid, local in text.endings.spawned.items()})
        for pid, rank in self.spawned.items():
            self.pids.add(pid, rank)
        for text in texts:
            for (kind, _, number), rank in text.links.items():
                if kind == "pid" and rank <= MAX_RANK:
                    self.pids.add(number, rank)
        self._offsets = offsets(texts, self.links)
        self._speakers = speakers(texts, self._offsets)
        self._crowded = crowded(texts) - self._offsets.keys()
        num_hosts = len({writer[1] for writer in writers if writer[0] == "host"})
        self._num_nodes = max(num_hosts, len({task for text in texts for task in text.tasks}))
        self._of_nodes = files_of_nodes(texts)
        on_hosts = {writer: ranks for text in texts for writer, ranks in text.on_hosts.items()}
        has_launcher = any(text.endings.has_launcher or any(text.endings.spawned.values()) for text in texts)
        has_places = (
            has_launcher or any(writer[0] in ("rank", "local", "task") for writer in writers) or bool(self.links)
        )
        nodes = {writer: node for text in texts for writer, node in text.nodes.items()}
        self._nodes = (
            hosts_of_one_rank(writers, self.hosts)
            if has_places
            else {**nodes, **single_process_hosts(writers, on_hosts)}
        )

    def _learn(self, text: JobText, ending: Ending) -> None:
        if ending.rank is None or (ending.is_task and self.tasks.of_ending(ending) != ending.rank):
            return
        if ending.local_rank is not None:
            self.links.setdefault(("local", f"{text.scope}|{ending.place}", ending.local_rank), ending.rank)
        if ending.pid:
            self.pids.add(ending.pid, ending.rank)
        if ending.host:
            self.hosts.setdefault(ending.rank, ending.host)

    def _on_one_host(self, text: JobText, local: int) -> int:
        """The rank with this number on the host of a launcher: the same number, unless a line says otherwise."""
        return self.links.get(("local", f"{text.scope}|", local), local)

    def rank(self, writer: Writer) -> int:
        """The rank of a writer, -1 where it is not known."""
        kind, place, number = writer
        if kind in ("rank", OWN):
            return number if number <= MAX_RANK else -1
        if writer in self.links:
            return self.links[writer]
        if kind == "task":
            rank = self.tasks.of_label(number)
            return rank if rank <= MAX_RANK else -1
        if kind == "local":
            is_elsewhere = place in self._speakers and number not in self._speakers[place]
            return -1 if place in self._crowded or is_elsewhere else self._offsets.get(place, 0) + number
        if kind == "pid":
            rank = self.pids.rank(number, place)
            return self._nodes.get(writer, -1) if rank < 0 else rank
        return self._nodes.get(writer, -1)

    def owner(self, writer: Writer, stream: Stream) -> int:
        """The rank of a writer; -1, too, where a host's kernel speaks of another process than that of the rank there."""
        rank = self.rank(writer)
        events = chain(stream.first, stream.last) if writer[0] == "host" and rank >= 0 else ()
        pids = [int(event.values["pid"]) for event in events if event.values.get("pid", "").isdigit()]
        return -1 if self.pids.are_others(pids, rank) else rank

    def of_ending(self, text: JobText, ending: Ending) -> int:
        """The rank that ended."""
        if ending.rank is not None:
            return self.tasks.of_ending(ending) if ending.is_task else ending.rank
        if ending.local_rank is not None:
            place = f"{text.scope}|{ending.place}"
            said = {rank for task, ranks in text.tasks.items() if ending.place == f"task {task}" for rank in ranks}
            is_known = place in self._offsets or self._speakers.get(place) or 0 in said  # which is on the first node
            if not is_known and (text.source in self._of_nodes or (ending.place and self._num_nodes > 1)):
                return -1
            return self.rank(("local", place, ending.local_rank))
        return self.pids.rank(ending.pid, ending.host) if ending.pid else -1

    def of_task(self, task: int) -> list[int]:
        """The rank that a task is, where that is known."""
        return [task] if self.tasks.are_ranks and task <= MAX_RANK else []

    def of_hosts(self, hosts: str) -> list[int]:
        """The ranks on hosts in Slurm's notation, such as `node[003-004]`."""
        return [rank for host in expanded(hosts) for rank in self.of_host(host)]

    def of_host(self, host: str) -> list[int]:
        """The ranks on a host, by its short name."""
        short = host.partition(".")[0]
        known = [rank for rank, name in self.hosts.items() if short and name.partition(".")[0] == short]
        return known or [rank for writer, rank in self._nodes.items() if writer[1] == host]
