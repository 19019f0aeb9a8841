"""Ranks of hosts, pods, units and containers that run one process each: by their names, as `job-master-0`, `job-worker-1`,
`trainer-2  |`, or because each was seen to be another rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from titan_ckpt.debug.read.text.prefixes import REPLICA
from titan_ckpt.debug.read.text.writers.labels import Writer

_NUMBER = re.compile(r"(?:^|[-_])(\d{1,5})$")
_SERVICE = re.compile(r"(?P<name>[A-Za-z][\w.-]{0,60}?)(?P<number>\d{1,5})-1")
# Vertex AI: pool 0 is one primary replica, pool 1 its workers (cloud.google.com/vertex-ai/docs/training/distributed-training).
_POOL = re.compile(r"workerpool(?P<pool>[01])-(?P<number>\d{1,5})")
_FIRST_REPLICA = "-1"  # which docker compose puts behind the name of a service, `job-worker-3-1`


def single_process_hosts(writers: Iterable[Writer], on_hosts: Mapping[Writer, set[int]]) -> dict[Writer, int]:
    """Where nothing but hosts or nodes is known: the ranks that their numbers are; none where two have the same number, or where
    machines, which are no pods, do not count from 0. `on_hosts`: which ranks introduced themselves on each."""
    writers = [*writers]
    told = {writer: min(ranks) for writer, ranks in on_hosts.items() if len(ranks) == 1}
    if told.keys() == {writer for writer in writers if writer[0] == "host"} and len(set(told.values())) == len(told):
        return told
    ranks = {writer: writer[2] for writer in writers if writer[0] == "node"}
    hosts = [writer for writer in writers if writer[0] == "host" and _NUMBER.search(writer[1])]
    has_master = any("master" in writer[1] for writer in hosts)
    are_services = len(hosts) > 1 and all(writer[1].endswith(_FIRST_REPLICA) for writer in hosts)
    for writer in hosts:
        name = writer[1].removesuffix(_FIRST_REPLICA) if are_services else writer[1]
        match, pool = _NUMBER.search(name), _POOL.fullmatch(name)
        if pool is not None:
            ranks[writer] = int(pool["number"]) + int(pool["pool"])
        elif match is not None and "-" in writer[1]:
            ranks[writer] = int(match.group(1)) + (has_master and "master" not in writer[1])
    if are_services and not ranks:
        return _numbered_services(hosts)
    if not are_services and _are_replicas(ranks):
        ranks = {writer: number - 1 for writer, number in ranks.items()}
    is_counted = set(ranks.values()) == set(range(len(ranks))) or any(
        writer[2] or writer[0] == "node" for writer in ranks
    )
    are_told = bool(on_hosts) and all(seen == {ranks.get(writer)} for writer, seen in on_hosts.items())
    return ranks if len(set(ranks.values())) == len(ranks) and (is_counted or are_told) else {}


def _numbered_services(hosts: Iterable[Writer]) -> dict[Writer, int]:
    """The ranks of services of compose that are alike but for a number, `trainer0-1`, which counts all of them from 0."""
    found = {writer: _SERVICE.fullmatch(writer[1]) for writer in hosts}
    ranks = {writer: int(match["number"]) for writer, match in found.items() if match is not None}
    are_alike = len({match["name"] for match in found.values() if match is not None}) == 1
    return ranks if are_alike and sorted(ranks.values()) == [*range(len(found))] else {}


def hosts_of_one_rank(writers: Iterable[Writer], hosts: Mapping[int, str]) -> dict[Writer, int]:
    """The ranks of hosts where lines of each name one rank, each another, and all there are; of pods also those whose numbers go
    on with the ranks of the others. `hosts`: where ranks were seen."""
    writers = [writer for writer in writers if writer[0] == "host"]
    ranks = {host: rank for rank, host in hosts.items()}
    if len(hosts) < 2 or len(ranks) != len(hosts):
        return {}
    known = {writer: ranks[writer[1]] for writer in writers if writer[1] in ranks}
    return _in_step(writers, ranks) or (known if set(hosts) == set(range(len(hosts))) else {})


def _in_step(writers: Iterable[Writer], ranks: Mapping[str, int]) -> dict[Writer, int]:
    """The ranks of all pods, if their names differ in a number alone, and it is each known rank, or a fixed number more."""
    numbers = {name: _NUMBER.search(name) for name in (*ranks, *(writer[1] for writer in writers if writer[2]))}
    told = {name: (name[: match.start()], int(match[1])) for name, match in numbers.items() if match is not None}
    steps = {(told[name][0], told[name][1] - rank) if name in told else None for name, rank in ranks.items()}
    step = steps.pop()
    if steps or step is None:
        return {}
    found = {writer: told[writer[1]][1] - step[1] for writer in writers if told.get(writer[1], ("", 0))[0] == step[0]}
    return found if all(rank >= 0 for rank in found.values()) else {}


def _are_replicas(numbers: dict[Writer, int]) -> bool:
    """Whether these are all replicas of one service of docker compose, which numbers them from 1."""
    services = {_NUMBER.sub("", writer[1]) for writer in numbers}
    return (
        len(services) == 1
        and all(writer[0] == "host" and writer[2] == REPLICA for writer in numbers)
        and sorted(numbers.values()) == [*range(1, len(numbers) + 1)]
    )
