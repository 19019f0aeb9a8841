"""Tell a folder of one incident, spread over hosts, from a folder of several incidents: those repeat each other's ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.incident.attempts import earlier_attempt
from titan_ckpt.debug.read.log_names.pods import are_pods
from titan_ckpt.debug.read.text import clocks
from titan_ckpt.parsing.unpacking import PACKED
from titan_ckpt.store.base import ObjectInfo, Store

SNIFFED_BYTES = 64 << 10
MOST_SNIFFED = 64  # files, or incidents
MOST_LOGS, MOST_LINES = 4, 200  # that are searched for a time, of an incident, and of a log
YEAR_KNOWN_S = 31_622_400.0  # a time without a year is read as one of 1970
_RANKED = re.compile(r"(?<!local)(?<!local[_-])rank[_-]?\d{1,6}|(?:trace|dump|fr)\w{0,20}_\d{1,6}$", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"(?:global[_-]?)?(?:rank|proc|process)[_-]?\d{1,6}", re.IGNORECASE)  # of one rank's files
_CONSOLE = re.compile(r"\.(?:log|out|err|txt)(?:\.gz|\.zst|\.xz|\.bz2)?$", re.IGNORECASE)
_HOST = re.compile(r"(?:node|host|gpu|worker|master|pod|ip|cn|n)[-_]?\d|\d{1,3}(?:[.-]\d{1,3}){3}", re.IGNORECASE)
_LOOK = re.compile(r"(look|take|snap(?:shot)?|sample|stacks?|py-?spy|dump|round|t)[_-]?\d{1,6}", re.IGNORECASE)
_STACK = re.compile(
    rb"\s*(?:Process \d+: |PID \d+ - |Thread \d+ \(|\[New LWP|\[Thread debugging|\[\s*\{\s*\"pid\"|\{\"titan_ckpt\": \"process\")"
)
MOST_LEVELS = 32  # of folders; what lies deeper is one incident
_SAID_RANK = re.compile(rb"\[rank(\d{1,6})\]:|\brank\s{0,8}: (\d{1,6}) \(local_rank")
TORCHRUN_NAMES = r"(?:(?:stdout|stderr)\.log(?:\.gz|\.zst|\.xz|\.bz2)?|error\.json)"
_TORCHRUN = re.compile(rf"(?:^|/)attempt_\d{{1,6}}/\d{{1,6}}/|^\d{{1,6}}/{TORCHRUN_NAMES}$")


_OF_TRAINING = re.compile(r"\.(?:jsonl|toml|safetensors)$")  # tells of a run, not of a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundIncident:
    """One incident's folder in a folder of several, and when it was last written, in seconds since the epoch."""

    folder: str
    modified_s: float


def find_several(store: Store) -> list[FoundIncident]:
    """The incidents under a folder that holds several, oldest first; [] if it holds one.

    By the newest time in their logs where each has one, as copies of files have other times; else by those of the files.
    """
    files = [file for file in store.list("") if earlier_attempt(file.path) is None]
    folders = _incidents(store, "", files)
    inside: dict[str, list[ObjectInfo]] = {folder: [] for folder in folders}
    for file in files if len(folders) > 1 else ():
        for folder in folders:
            if file.path.startswith(f"{folder}/"):
                inside[folder].append(file)
    folders = [folder for folder, part in inside.items() if not all(_OF_TRAINING.search(file.path) for file in part)]
    if len(folders) < 2:
        return []
    inside = {folder: inside[folder] for folder in folders}
    times = {folder: max((file.modified_s for file in part), default=0.0) for folder, part in inside.items()}
    if len(folders) <= MOST_SNIFFED:
        said = {folder: _said_s(store, part) for folder, part in inside.items()}
        times = said if all(said.values()) else times
    return sorted(
        (FoundIncident(folder=f, modified_s=times[f]) for f in folders), key=lambda i: (i.modified_s, i.folder)
    )


def _said_s(store: Store, files: Sequence[ObjectInfo]) -> float:
    """The newest time near the end of some logs, in seconds since the epoch; 0 if they have none, or none with a year."""
    logs = [file for file in files if _CONSOLE.search(file.path)]
    found = [0.0]
    for file in sorted(logs, key=lambda file: (-file.modified_s, file.path))[:MOST_LOGS]:
        lines = reversed(_tail(store, file).decode(errors="replace").splitlines()[-MOST_LINES:])
        stamps = (clocks.ANYWHERE.search(line[:400]) for line in lines)
        found.append(next((clocks.seconds(stamp, 1970) or 0.0 for stamp in stamps if stamp is not None), 0.0))
    return max(found) if max(found) > YEAR_KNOWN_S else 0.0


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
        or _are_looks(store, inside)
    ):
        return [folder]
    found = {name: _incidents(store, f"{folder}/{name}" if folder else name, part) for name, part in inside.items()}
    if any(len(part) > 1 for part in found.values()) or _repeat_each_other(store, inside):
        return [place for part in found.values() for place in part]
    return next(iter(found.values())) if len(found) == 1 and not own else [folder]


def _are_looks(store: Store, parts: Mapping[str, Sequence[ObjectInfo]]) -> bool:
    """Whether folders such as `look0` and `look1` hold nothing but stacks: of one job, at several times."""
    looks = {name: match[1] for name in parts if (match := _LOOK.fullmatch(name))}
    files = [file for name in looks for file in parts[name]]
    is_one_row = len(looks) > 1 and len(set(looks.values())) == 1 and len(files) <= MOST_SNIFFED * len(looks)
    return is_one_row and bool(files) and all(_is_stack(store, file) for file in files[:MOST_SNIFFED])


def _is_stack(store: Store, file: ObjectInfo) -> bool:
    """Whether a file begins as the dumps of py-spy (text and JSON), gdb and eu-stack do, or as `debug collect --pid` writes."""
    return bool(file.size_bytes) and _STACK.match(store.read(file.path, 0, min(file.size_bytes, 256))) is not None


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
    return {int(match.group(1) or match.group(2)) for match in _SAID_RANK.finditer(_tail(store, file))}


def _tail(store: Store, file: ObjectInfo) -> bytes:
    """The end of a log; nothing of a packed one."""
    if file.path.endswith(PACKED) or not file.size_bytes:
        return b""
    start = max(0, file.size_bytes - SNIFFED_BYTES)
    return store.read(file.path, start, file.size_bytes - start)
