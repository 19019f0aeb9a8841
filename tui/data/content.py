"""List what is at a URL, cheaply, so that a wrong path is an error before the screens open."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from titan_ckpt.debug.incident.records import Flag
from titan_ckpt.debug.live.processes import GONE, find_processes
from titan_ckpt.debug.read.archives.unpack import is_archive, unpacked_archives
from titan_ckpt.debug.read.discovery import TEXT_ENDINGS, EvidenceFile, evidence_files, find_incident_folders
from titan_ckpt.errors import NotFoundError, StoreError
from titan_ckpt.format.names import parse_foreign_step
from titan_ckpt.location import absence, local_path, normalise, parse_location, redact, scheme
from titan_ckpt.parsing.unpacking import PACKED
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.data.run_folders import DEPTH, EVIDENCE_ENDINGS, METRICS_PATHS, holds_runs
from titan_ckpt.tui.data.runs import CONFIG_PATH, SINGLE_CHECKPOINT

_SIDECAR = ".sidecar.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A log, with the rank from its name."""

    path: str
    rank: int | None
    size_bytes: int

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed."""
        return self.path.endswith(PACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Contents of a run or an incident.

    `metrics` is the path of metrics.jsonl or "". `has_runs` marks a folder of runs. `step` is the step named in the URL.
    `incidents` names all that are there, oldest first; `chosen` is the one that was asked for (None: the newest).
    `evidence`: path, size and time of change of every file of the incident. `archive`: the URL of what was unpacked to `url`.
    """

    url: str
    store: Store
    has_evidence: bool
    has_checkpoints: bool
    logs: tuple[LogFile, ...]
    metrics: str
    incident: str = ""
    incidents: tuple[str, ...] = ()
    chosen: str | None = None
    has_runs: bool = False
    step: int | None = None
    evidence: frozenset[tuple[str, int, float]] = frozenset()
    archive: str = ""

    @property
    def shown_url(self) -> str:
        """Where it is for people: of an archive not the private folder."""
        return self.archive or self.url

    def beside(self, other: Content) -> Content:
        """This content, of the same archive as `other` if both are in one folder."""
        return replace(self, archive=other.archive) if self.url == other.url else self


def find_content(url: str, incident: str | None = None) -> Content:
    """List what is at `url`: a run, an incident folder, a folder of dumps or logs, or one file of these.

    `incident` chooses one of several, the newest by default.

    Raises NotFoundError if there is nothing to show.
    """
    location = parse_location(url)
    try:
        return replace(_content(open_store(location.url), url, incident), step=location.step, chosen=incident)
    except OSError as error:
        raise StoreError(
            f"{redact(url)}: {error.strerror} ({error.filename}); open a folder whose files are all readable"
        ) from error


@contextmanager
def opened(url: str) -> Iterator[Content]:
    """What `find_content` finds, for as long as it is shown: an archive on local disk is unpacked into a private folder."""
    if not is_archive(url) or scheme(url) != "file":
        yield find_content(url)
        return
    folder, _, name = local_path(normalise(url)).rpartition("/")
    store, flags = open_store(folder or "/"), list[Flag]()
    with unpacked_archives(store, [store.stat(name)], flags, is_only=True) as inside:
        try:
            content = find_content(inside.url)
        except NotFoundError as error:
            raise StoreError(f"{redact(url)}: {flags[0].text}" if flags else f"{redact(url)}: {error}") from error
        yield replace(content, archive=url)


def left_no_process(content: Content) -> bool:
    """Whether all ranks ran on this machine, and none has a process here any more."""
    sidecars = [PurePosixPath(path) for path, _, _ in content.evidence if path.endswith(_SIDECAR)]
    if not sidecars or scheme(content.url) != "file":
        return False
    folders = {Path(local_path(content.url)) / path.parent for path in sidecars}
    found = [process for folder in folders for process in find_processes(folder)]
    return len(found) == len(sidecars) and all(process.state == GONE for process in found)


def _content(store: Store, url: str, incident: str | None) -> Content:
    single = _single_file(store)
    if single is not None:
        return single
    folders = store.folders()
    has_steps = any(parse_foreign_step(name) is not None for name in folders)
    runs = Content(url=url, store=store, has_evidence=False, has_checkpoints=False, logs=(), metrics="", has_runs=True)
    if not has_steps and "debug" not in folders and holds_runs(store, folders):
        return runs
    place = find_incident_folders(store, incident)
    found = evidence_files(store, place)
    metrics = next((path for path in METRICS_PATHS if store.exists(path)), "")
    has_checkpoints = has_steps or any(store.exists(path) for path in (*SINGLE_CHECKPOINT, CONFIG_PATH))
    has_evidence = any(_is_evidence(source) for source in found if source.path != CONFIG_PATH)
    if not (has_checkpoints or has_evidence or metrics):
        if holds_runs(store, folders, DEPTH):
            return runs
        raise _nothing_here(store, folders)
    return Content(
        url=url, store=store, has_evidence=has_evidence, has_checkpoints=has_checkpoints, metrics=metrics,
        logs=_logs(found), incident=place.incident, incidents=place.incidents,
        evidence=frozenset((source.path, source.size_bytes, source.modified_s) for source in found),
    )  # fmt: skip


def _single_file(store: Store) -> Content | None:
    """Content of a URL that names one dump or log: the store is its folder, and only this file is listed."""
    if scheme(store.url) != "file":
        return None
    folder, _, name = local_path(store.url).rpartition("/")
    parent = open_store(folder or "/")
    if not name or not parent.exists(name):
        return None
    size = parent.stat(name).size_bytes
    is_log = _is_log(name)
    return Content(
        url=store.url, store=parent, has_evidence=True, has_checkpoints=False, metrics="",
        logs=(LogFile(path=name, rank=None, size_bytes=size),) if is_log else (),
    )  # fmt: skip


def _is_log(path: str) -> bool:
    for packed in PACKED:
        path = path.removesuffix(packed)
    return path.endswith(TEXT_ENDINGS)


def _is_evidence(source: EvidenceFile) -> bool:
    is_of_rank = source.rank is not None
    if source.suffix in EVIDENCE_ENDINGS:
        return is_of_rank or _is_log(source.path) or source.suffix == ".json"
    return is_of_rank and source.suffix == ""


def _logs(found: Iterable[EvidenceFile]) -> tuple[LogFile, ...]:
    """The logs by rank, for lines of one moment are shown in this order; those of no rank come first."""
    logs = (source for source in found if _is_log(source.path))
    ordered = sorted(logs, key=lambda source: (-1 if source.rank is None else source.rank, source.path))
    return tuple(LogFile(path=each.path, rank=each.rank, size_bytes=each.size_bytes) for each in ordered)


def _nothing_here(store: Store, folders: list[str]) -> StoreError:
    if why := absence(store.url):
        return NotFoundError(f"{redact(str(store))}: {why}")
    names = [
        *(f"{name}/" for name in itertools.islice(folders, 5)),
        *(e.path for e in itertools.islice(store.list(""), 3)),
    ]
    seen = f"it contains {', '.join(names[:5])}" if names else "it is empty"
    return NotFoundError(
        f"{redact(str(store))}: neither a run nor an incident: no step folder, dump, stack, log or metrics.jsonl ({seen}). "
        "Open a run (the URL in save.url), a folder of runs, an incident folder, or a folder of dumps or logs"
    )
