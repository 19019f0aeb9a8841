"""What in a step's folder may be deleted: only files that are proved to be ours. The one place that holds this proof.

Retention and `prune` remove nothing that is not in `StepFiles`. A file is ours if

- it is our COMMIT, or the manifest that this COMMIT names by size and digest names it; or
- it is in an attempt's folder (its name has the start of the save and 32 random bits) and is named as our writers name files; or
- it is a `.metadata` that the COMMIT names by digest, or whose every data file lies in attempts' folders.

Everything else stays: what users put there, checkpoints of other programs, symbolic links and what is behind one. A file that a
`.metadata` names stays for as long as that `.metadata` does: plain DCP readers must never find data missing.
"""

from __future__ import annotations

import calendar
import math
import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from titan_ckpt.checkpoint.open import CheckpointInfo
from titan_ckpt.errors import CheckpointError
from titan_ckpt.format.commit import Commit, commit_path
from titan_ckpt.format.dcp_read import data_paths
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import DIGEST_BYTES, Manifest
from titan_ckpt.format.manifest_json import digests_beside
from titan_ckpt.format.names import ASSETS, COMMIT, DIGESTS, MANIFEST, METADATA, is_data_file, marks_folder, step_folder
from titan_ckpt.format.own_step import attempt_of, read_index
from titan_ckpt.store.base import ObjectInfo, Store

_START = re.compile(r"a-(\d{8}T\d{6}Z)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpIndex:
    """A step's `.metadata`: the attempts and files (paths in the store) that it names, and whether it is ours."""

    entry: ObjectInfo
    is_ours: bool
    is_committed: bool
    files: frozenset[str] = frozenset()
    attempts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The objects of a step's folder, by whose they are.

    `commit` and `committed` are COMMIT and what it names; `attempts` what other saves of the step left; `leftovers` temporary
    files of our writes; `others` are paths that are not proved to be ours. `refusal` says why nothing of this step may be
    deleted; it is empty if something may.
    """

    step: int
    refusal: str = ""
    commit: ObjectInfo | None = None
    index: DcpIndex | None = None
    attempt: str | None = None
    committed: tuple[ObjectInfo, ...] = ()
    attempts: dict[str, tuple[ObjectInfo, ...]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    leftovers: tuple[ObjectInfo, ...] = ()

    def removal(self, attempts: Collection[str], *, is_whole: bool, kept: frozenset[str]) -> tuple[ObjectInfo, ...]:
        """What to delete, in this order, to remove those `attempts` and, if `is_whole`, the commit.

        COMMIT goes first and `.metadata` second, so that at every moment whatever a reader can open is complete. Files in `kept`,
        to which other checkpoints refer, stay.
        """
        if self.refusal:
            return ()
        data = [entry for name in attempts for entry in self.attempts[name]]
        going = {*attempts, *([self.attempt] if is_whole and self.attempt is not None else [])}
        first = []
        if is_whole:
            data += self.committed
            first += [self.commit] if self.commit is not None else []
        stays = kept
        if self.index is not None:
            if is_whole and self.index.is_ours and (self.index.is_committed or self.index.attempts <= going):
                first.append(self.index.entry)
            else:
                stays |= self.index.files
        return (*first, *sorted((entry for entry in data if entry.path not in stays), key=lambda entry: entry.path))


def files_of_step(store: Store, info: CheckpointInfo, manifest: Manifest | None) -> StepFiles:
    """Sort the objects of a step. `manifest` is the one that its COMMIT names, None for a step without a COMMIT."""
    folder = step_folder(info.step)
    if store.is_link(folder):
        refusal = "the folder is a symbolic link, so what it holds may belong to others"
        return StepFiles(step=info.step, refusal=refusal, others=(folder,))
    for path in (f"{folder}/{COMMIT}", f"{folder}/{METADATA}"):
        if store.is_link(path):  # a link that leads nowhere is not listed
            return StepFiles(step=info.step, refusal=f"{path} is a symbolic link", others=(path,))
    entries = {entry.path: entry for entry in store.list(folder)}
    own = {path: entry for path, entry in entries.items() if not entry.is_link}
    commit, named = own.get(commit_path(info.step)) if info.commit else None, _named(info.commit, manifest, own)
    index = _index(store, own.get(f"{folder}/{METADATA}"), info.commit)
    attempts: dict[str, tuple[ObjectInfo, ...]] = {}
    for path, entry in own.items():
        name = attempt_of(path.removeprefix(f"{folder}/"))
        is_committed = info.commit is not None and name == info.commit.attempt
        if name is not None and not is_committed and not _is_strange(store, path, own):
            attempts[name] = (*attempts.get(name, ()), entry)
    ours = {*named, *(entry.path for found in attempts.values() for entry in found)}
    ours |= {found.path for found in (commit, index.entry if index and index.is_ours else None) if found is not None}
    return StepFiles(
        step=info.step, refusal=_refusal(index, named, own), commit=commit, index=index,
        attempt=info.commit.attempt if info.commit else None, attempts=attempts,
        committed=tuple(own[path] for path in sorted(named) if path in own), others=tuple(sorted(entries.keys() - ours)),
        leftovers=tuple(entry for entry, name in store.leftovers(folder) if _is_written(name.removeprefix(f"{folder}/"))),
    )  # fmt: skip


def _is_written(name: str) -> bool:
    """Whether a save writes a file of this name, relative to its step's folder."""
    return name in (COMMIT, METADATA) or attempt_of(name) is not None


def _named(commit: Commit | None, manifest: Manifest | None, own: Mapping[str, ObjectInfo]) -> set[str]:
    """Paths in the step's own folder that a verified manifest stands for, and marks of deletions."""
    if commit is None or manifest is None:
        return set()
    folder = step_folder(commit.step)
    attempt = f"{folder}/{commit.attempt}"
    paths = {f"{attempt}/{MANIFEST}", *(f"{attempt}/{ASSETS}/{name}" for name in manifest.assets)}
    beside = own.get(f"{attempt}/{DIGESTS}")
    if beside is not None and manifest.chunks.digests is None:
        paths |= {beside.path} if beside.size_bytes == DIGEST_BYTES * len(manifest.chunks) else set()
    paths |= {
        path for path in own if path.startswith(f"{marks_folder(attempt)}/") and attempt_of(path[len(folder) + 1 :])
    }
    return paths | {f"{folder}/{file.path}" for file in manifest.files if not file.path.startswith("../")}


def _is_strange(store: Store, path: str, own: Mapping[str, ObjectInfo]) -> bool:
    """Whether it is a `digests.bin` that no manifest beside it names."""
    attempt, _, name = path.rpartition("/")
    if name != DIGESTS or attempt.endswith(f"/{ASSETS}"):
        return False
    manifest = f"{attempt}/{MANIFEST}"
    if manifest not in own:
        return True
    try:
        expected = digests_beside(read_index(store, manifest), store.where(manifest))
        return expected is None or digest(read_index(store, path)).hex() != expected
    except CheckpointError:
        return True


def _index(store: Store, entry: ObjectInfo | None, commit: Commit | None) -> DcpIndex | None:
    """The step's `.metadata`; one that cannot be decoded is not ours, and what it names is unknown."""
    if entry is None:
        return None
    data = read_index(store, entry.path)
    is_committed = commit is not None and digest(data).hex() == commit.metadata_digest
    try:
        paths = data_paths(data, where=store.where(entry.path))
    except CheckpointError:
        return DcpIndex(entry=entry, is_ours=is_committed, is_committed=is_committed)
    folder = os.path.dirname(entry.path)
    names = frozenset(name for path in paths if (name := attempt_of(path)) is not None)
    files = frozenset(os.path.normpath(f"{folder}/{path}") for path in paths)
    is_ours = is_committed or (bool(paths) and all(is_data_file(path) for path in paths))
    return DcpIndex(entry=entry, is_ours=is_ours, is_committed=is_committed, files=files, attempts=names)


def _refusal(index: DcpIndex | None, named: set[str], own: dict[str, ObjectInfo]) -> str:
    """Why nothing of a step may go: what must go before the data cannot, or it is unknown what is needed."""
    if index is not None and not index.is_ours and not index.files:
        return f"its {METADATA} cannot be decoded, so what it needs is unknown"
    if missing := sorted(path for path in named - own.keys() if path.endswith(".distcp")):
        return f"{missing[0]} is not a file in this folder; is it, or a folder above it, a symbolic link?"
    return ""


def start_of(attempt: str) -> float:
    """When an attempt began, in seconds since the epoch; infinity for a name that holds no date, so that it is never old."""
    match = _START.match(attempt)
    try:
        return float(calendar.timegm(time.strptime(match.group(1), "%Y%m%dT%H%M%SZ"))) if match else math.inf
    except ValueError:
        return math.inf
