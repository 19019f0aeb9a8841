"""Find the evidence files of a folder; their names give kind, rank and snapshot."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.incident.attempts import EARLIER, earlier_attempt, earlier_attempts
from titan_ckpt.debug.read.log_names.pods import newest_starts
from titan_ckpt.debug.read.several import TORCHRUN_NAMES, find_several
from titan_ckpt.errors import NotFoundError
from titan_ckpt.parsing.unpacking import PACKED, unpacked
from titan_ckpt.store.base import Store

MAX_FILES = 200_000
MAX_FILE_BYTES = 1 << 28
MAX_UNPACKED_BYTES = 1 << 28
HEAD_OF_LOG = 4 << 20
TAIL_OF_LOG = 12 << 20

_ATTEMPT = re.compile(r"(?P<base>.*)attempt_(?P<number>\d{1,6})$")
_ATTEMPT_IN_NAME = re.compile(  # a log of one attempt of the job, or of the process that the rest of the name tells
    r"(?P<base>(?:.*[/._-])?(?:attempt|restart)[._=-]?)(?P<number>\d{1,4})(?P<after>(?:[._-][A-Za-z]{1,12})*\.(?:log|txt|out|err))$",
    re.IGNORECASE,
)
_LOCAL = re.compile(r"local[_-]?rank[_-]?\d{1,6}", re.IGNORECASE)  # counts on its host, which the folder is of
_RANK = re.compile(r"rank[_-]?0*(\d{1,6})(?!\d)", re.IGNORECASE)
_GLOBAL = re.compile(r"(?:global|world)[_-]?rank[_-]?0*(\d{1,6})(?!\d)", re.IGNORECASE)
_TRAILING = re.compile(r"(?:trace|dump|flight_recorder|fr)[\w-]*?_0*(\d{1,6})$", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?<![\d])0*(\d{1,6})$")
_NUMBER = re.compile(r"0*(\d{1,6})")
_TORCHRUN = re.compile(  # of one attempt alone, too: `debug LOGS/attempt_0`
    rf"(?:(?P<base>(?:^|.*/)attempt_\d{{1,6}})/|^)(?P<local>\d{{1,6}})/{TORCHRUN_NAMES}$"
)
TEXT_ENDINGS = (".log", ".out", ".err", ".txt", ".stdout", ".stderr")
_ENDINGS = frozenset((".json", ".jsonl", ".stacks", ".box", ".pickle", ".pkl", ".pt", ".svg", *TEXT_ENDINGS))
_STEP_FOLDER = re.compile(r"^step-\d{8,}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """A file that may be evidence. `stem` is its name without rank-independent endings: snapshots of equal stem belong
    together (a pickle, its JSON twin, its stacks). `host_folder`: torchrun's log folder; `rank` then counts the ranks of its
    host."""

    path: str
    rank: int | None
    reason: str
    stem: str
    suffix: str
    size_bytes: int
    modified_s: float
    host_folder: str = ""

    @property
    def last_number(self) -> int | None:
        """The number that the name ends with: torch's DebugInfoWriter puts the rank behind whatever prefix it is given."""
        match = _LAST_NUMBER.search(self.stem)
        return int(match[1]) if match else None

    @property
    def folder_number(self) -> int | None:
        """The number that its folder is called: a rank, where people collect the dumps of each in a folder."""
        match = _NUMBER.fullmatch(self.path.rpartition("/")[0].rpartition("/")[2])
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFolders:
    """Where to look: the folders of one incident, and the names of all incidents there are (oldest first)."""

    incident: str
    folders: tuple[str, ...]
    incidents: tuple[str, ...]


def find_incident_folders(store: Store, incident: str | None = None) -> IncidentFolders:
    """The newest incident of a run (`debug/<incident>/` plus `logs/`), a folder of incidents, or the folder itself.

    `incident`: this one of `IncidentFolders.incidents` instead. NotFoundError if there is none of that name.
    """
    folders = store.folders()
    if "debug" in folders:
        found = store.folders("debug")
        incidents = (*(name for name in found if name != EARLIER),)
        if EARLIER in found and not incidents:  # a recorder's own folder
            incidents = _with_history(store, "debug")
        newest = _chosen(store, incidents, incident)
        main = f"debug/{newest}" if newest else "debug"
        return IncidentFolders(
            incident=newest, folders=(main, *(["logs"] if "logs" in folders else [])), incidents=incidents
        )
    if any(_STEP_FOLDER.match(name) for name in folders):
        return IncidentFolders(incident="", folders=("logs",) if "logs" in folders else (), incidents=())
    several = tuple(found.folder for found in find_several(store))
    if not several and EARLIER in folders:
        several = _with_history(store)
    chosen = _chosen(store, several, incident)
    return IncidentFolders(incident=chosen, folders=(chosen,), incidents=several)


def _with_history(store: Store, folder: str = "") -> tuple[str, ...]:
    """The earlier attempts in a recorder's folder, and "" for the newest; () if there are none."""
    above = f"{folder}/" if folder else ""
    history = earlier_attempts(entry.path.removeprefix(above) for entry in store.list(f"{above}{EARLIER}"))
    return (*history, "") if history else ()


def _chosen(store: Store, incidents: Sequence[str], wanted: str | None) -> str:
    """The incident of that name, or the newest; "" if there are none."""
    if wanted is None:
        return incidents[-1] if incidents else ""
    if wanted not in incidents:
        raise NotFoundError(f"{store}: no incident {wanted!r}; there are: {', '.join(incidents[:20]) or 'none'}")
    return wanted


def evidence_files(store: Store, folders: IncidentFolders) -> list[EvidenceFile]:
    """Every file of the incident, sorted by path; of torchrun's attempts and of a container's starts only the last, for the
    earlier ones are history."""
    found: list[EvidenceFile] = []
    for folder in folders.folders:
        for entry in store.list(folder):
            if earlier_attempt(entry.path) not in (None, folder):
                continue
            found.append(evidence_file(entry.path, entry.size_bytes, entry.modified_s))
            if len(found) >= MAX_FILES:
                return newest(found)
    return newest(found)


def newest(files: list[EvidenceFile]) -> list[EvidenceFile]:
    """The files without those of earlier attempts and of earlier starts of a container."""
    kept = newest_starts({file.path: file.modified_s for file in files})
    return _of_last_attempts([file for file in files if file.path in kept])


def _of_last_attempts(files: list[EvidenceFile]) -> list[EvidenceFile]:
    attempts = {file.path: found for file in files if (found := _attempt(file))}
    last: dict[str, int] = {}
    for process, number in attempts.values():
        last[process] = max(last.get(process, 0), number)
    return [file for file in files if (found := attempts.get(file.path)) is None or found[1] == last[found[0]]]


def _attempt(file: EvidenceFile) -> tuple[str, int] | None:
    """Whose attempt a file is of, and which, by its folder or by its name."""
    if match := _ATTEMPT.search(file.host_folder):
        return match["base"], int(match["number"])
    match = _ATTEMPT_IN_NAME.match(file.path)
    return None if match is None else (f"{match['base']}#{match['after']}", int(match["number"]))


def evidence_file(path: str, size_bytes: int, modified_s: float) -> EvidenceFile:
    name = path.rpartition("/")[2]
    bare, suffix = _split(name)
    rank, rest = _rank_of(path, bare)
    of_torchrun = _TORCHRUN.match(path)
    is_local = _LOCAL.search(bare) is not None and _GLOBAL.search(bare) is None
    host_folder = (of_torchrun["base"] or "") if of_torchrun else path.rpartition("/")[0] if is_local else ""
    return EvidenceFile(
        path=path, rank=rank, reason=rest.strip("._-"), stem=bare, suffix=suffix,
        size_bytes=size_bytes, modified_s=modified_s, host_folder=host_folder,
    )  # fmt: skip


def _split(name: str) -> tuple[str, str]:
    """`rank_0.after_error.json.gz` -> (`rank_0.after_error`, `.json`)."""
    for packed in PACKED:
        name = name.removesuffix(packed)
    bare, dot, ending = name.rpartition(".")
    return (bare, dot + ending) if dot + ending in _ENDINGS else (name, "")


def _rank_of(path: str, bare: str) -> tuple[int | None, str]:
    if match := _GLOBAL.search(bare) or _RANK.search(bare):
        return int(match.group(1)), bare[match.end() :]
    if match := _TRAILING.search(bare):
        return int(match.group(1)), ""
    if match := _TORCHRUN.match(path):
        return int(match["local"]), ""
    folders = path.rpartition("/")[0]
    if match := _RANK.search(folders.rpartition("/")[2]):
        return int(match.group(1)), bare
    return None, bare


def read_evidence_file(store: Store, file: EvidenceFile) -> bytes:
    """The file's content, unpacked. ValueError or DamagedError when it is too large or its compression is damaged.

    Logs, which may be longer, are read by `log_chunks`.
    """
    is_packed = file.path.endswith(PACKED)
    if file.size_bytes > MAX_FILE_BYTES:
        raise ValueError(f"{file.size_bytes} bytes: larger than any evidence file")
    try:
        data = store.read(file.path)
    except NotFoundError as error:
        raise ValueError("vanished while it was read") from error
    if not is_packed:
        return data
    pieces = unpacked(file.path, [data], packed_bytes=len(data), most_bytes=MAX_UNPACKED_BYTES)
    return b"".join(pieces)


CHUNK = 1 << 20
MAX_LOG_BYTES = 64 << 30  # unpacked


def log_chunks(
    store: Store, file: EvidenceFile, on_bytes: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[bytes, bool]]:
    """A log of any length, unpacked, in chunks; True for those between its head and its tail. Holds TAIL_OF_LOG at most.

    `on_bytes` is called with the bytes of each piece of the file that was read.
    """
    held: deque[bytes] = deque()
    head = size = 0
    parts = _raw_chunks(store, file, on_bytes)
    for chunk in unpacked(file.path, parts, packed_bytes=file.size_bytes, most_bytes=MAX_LOG_BYTES):
        if head < HEAD_OF_LOG:
            head += len(chunk)
            yield chunk, False
            continue
        held.append(chunk)
        size += len(chunk)
        while size - len(held[0]) >= TAIL_OF_LOG:
            size -= len(held[0])
            yield held.popleft(), True
    for chunk in held:
        yield chunk, False


def _raw_chunks(store: Store, file: EvidenceFile, on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    for start in range(0, file.size_bytes, CHUNK):
        size_bytes = min(CHUNK, file.size_bytes - start)
        yield store.read(file.path, start, size_bytes)
        on_bytes(size_bytes)
