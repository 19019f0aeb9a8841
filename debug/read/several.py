"""Tell a folder of one incident, spread over hosts, from a folder of several incidents: those repeat each other's ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.incident.attempts import earlier_attempt
from titan_ckpt.debug.read.log_names.pods import are_pods
from titan_ckpt.parsing.unpacking import PACKED
from titan_ckpt.store.base import ObjectInfo, Store

SNIFFED_BYTES = 64 << 10
MOST_SNIFFED = 64  # files
_RANKED = re.compile(r"(?<!local)(?<!local[_-])rank[_-]?\d{1,6}|(?:trace|dump|fr)\w{0,20}_\d{1,6}$", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"(?:global[_-]?)?(?:rank|proc|process)[_-]?\d{1,6}", re.IGNORECASE)  # of one rank's files
_CONSOLE = re.compile(r"\.(?:log|out|err|txt)(?:\.gz|\.zst|\.xz|\.bz2)?$", re.IGNORECASE)
_HOST = re.compile(r"(?:node|host|gpu|worker|master|pod|ip|cn|n)[-_]?\d|\d{1,3}(?:[.-]\d{1,3}){3}", re.IGNORECASE)
MOST_LEVELS = 32  # of folders; what lies deeper is one incident
_SAID_RANK = re.compile(rb"\[rank(\d{1,6})\]:|\brank\s{0,8}: (\d{1,6}) \(local_rank")
TORCHRUN_NAMES = r"(?:(?:stdout|stderr)\.log(?:\.gz|\.zst|\.xz|\.bz2)?|error\.json)"
_TORCHRUN = re.compile(rf"(?:^|/)attempt_\d{{1,6}}/\d{{1,6}}/|^\d{{1,6}}/{TORCHRUN_NAMES}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundIncident:
    """One incident's folder in a folder of several, and when it was last written."""

    folder: str
    modified_s: float


def find_several(store: Store) -> list[FoundIncident]:
    """The incidents under a folder that holds several, oldest first; [] if it holds one."""
    files = [file for file in store.list("") if earlier_attempt(file.path) is None]
    folders = _incidents(store, "", files)
    if len(folders) < 2:
        return []
    times: defaultdict[str, float] = defaultdict(float)
    for file in files:
        for folder in folders:
            if file.path.startswith(f"{folder}/"):
                times[folder] = max(times[folder], file.modified_s)
    return sorted(
        (FoundIncident(folder=f, modified_s=times[f]) for f in folders), key=lambda i: (i.modified_s, i.folder)
    )


def _incidents(store: Store, folder: str, files: Sequence[ObjectInfo]) -> list[str]:
    """The folders of the incidents among `files`, which all are in `folder`."""
    inside: defaultdict[str, list[ObjectInfo]] = defaultdict(list)
    begin = len(folder) + bool(folder)
    for file in files:
        name, slash, _ = file.path[begin:].partition("/")
        inside[name if slash else ""].append(file)
    own = inside.pop("", [])
    if (
        not inside
        or folder.count("/") >= MOST_LEVELS
        or are_pods(inside)
        or all(map(_RANK_FOLDER.fullmatch, inside))
        or any(re.match(r"attempt_\d|step-\d", name) for name in inside)
    ):
        return [folder]
    found = {name: _incidents(store, f"{folder}/{name}" if folder else name, part) for name, part in inside.items()}
    if any(len(part) > 1 for part in found.values()) or _repeat_each_other(store, inside):
        return [place for part in found.values() for place in part]
    return next(iter(found.values())) if len(found) == 1 and not own else [folder]


def _repeat_each_other(store: Store, parts: Mapping[str, Sequence[ObjectInfo]]) -> bool:
    """Whether two parts hold the same rank's evidence: a dump or log of equal name, or consoles that name the same rank."""
    seen: set[str] = set()
    consoles: defaultdict[str, list[tuple[str, ObjectInfo]]] = defaultdict(list)
    for part, files in parts.items():
        names = set()
        for file in files:
            name = file.path.rpartition("/")[2]
            if _TORCHRUN.search(file.path):
                continue
            if _RANKED.search(name):
                names.add(name)
            elif _CONSOLE.search(name):
                consoles[name].append((part, file))
        if names & seen:
            return True
        seen |= names
    return any(_consoles_repeat(store, found) for found in consoles.values() if len(found) > 1)


def _consoles_repeat(store: Store, consoles: Sequence[tuple[str, ObjectInfo]]) -> bool:
    """Whether consoles of equal name name the same rank; where none names any, whether their folders are no hosts'."""
    owners: dict[int, str] = {}
    for part, file in consoles[:MOST_SNIFFED]:
        for rank in _ranks_said(store, file):
            if owners.setdefault(rank, part) != part:
                return True
    return not owners and not all(_HOST.match(part) for part, _ in consoles)


def _ranks_said(store: Store, file: ObjectInfo) -> set[int]:
    if file.path.endswith(PACKED) or not file.size_bytes:
        return set()
    tail = max(0, file.size_bytes - SNIFFED_BYTES)
    data = store.read(file.path, tail, file.size_bytes - tail)
    return {int(match.group(1) or match.group(2)) for match in _SAID_RANK.finditer(data)}
