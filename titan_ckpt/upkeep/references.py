"""Files of one step that another step refers to, while saves and deletions run side by side. No locks: each looks at the other.

A save writes its manifest, which names the files that it needs, and *then* checks that a committed step still holds each of them.
A deletion removes the COMMITs of what goes, and *then* reads every manifest, of attempts that are not committed yet, too. So
whichever comes second sees the other: the save is not committed, or the deletion leaves the file.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from titan_ckpt.checkpoint.open import open_manifest, stored_digests
from titan_ckpt.errors import CheckpointError, NotFoundError
from titan_ckpt.format.commit import Commit, find_commit
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.format.names import MANIFEST, is_attempt, parse_step, step_folder
from titan_ckpt.format.own_step import read_index
from titan_ckpt.store.base import Store


def named_files(manifest: Manifest) -> frozenset[str]:
    """Paths in the run of all data files that a manifest names."""
    folder = step_folder(manifest.step)
    return frozenset(os.path.normpath(f"{folder}/{file.path}") for file in manifest.files)


def check_sources(store: Store, manifest: Manifest) -> None:
    """CheckpointError unless a committed step holds or names each file of other steps that `manifest` names.

    To be called once the manifest is in the store, and before its COMMIT is.
    """
    own = f"{step_folder(manifest.step)}/{manifest.attempt}/"
    wanted = {path for path in named_files(manifest) if not path.startswith(own)}
    if not wanted:
        return
    owners = {step for path in wanted if (step := parse_step(path.partition("/")[0])) is not None}
    for step in owners:
        commit = _valid_commit(store, step)
        if commit is not None:
            wanted = {path for path in wanted if not path.startswith(f"{step_folder(step)}/{commit.attempt}/")}
    for step in reversed(_steps(store)):
        if not wanted:
            return
        wanted -= _named_by_commit(store, step)
    if wanted:
        raise CheckpointError(
            f"{store.where(min(wanted))}: an incremental save refers to it, but no committed step holds it any more, so it "
            f"may be deleted at any moment. Nothing was committed; the next save writes everything again"
        )


def _valid_commit(store: Store, step: int) -> Commit | None:
    try:
        return find_commit(store, step)
    except CheckpointError:
        return None  # what cannot be read proves nothing


def _named_by_commit(store: Store, step: int) -> frozenset[str]:
    commit = _valid_commit(store, step)
    try:
        return frozenset() if commit is None else named_files(open_manifest(store, commit))
    except CheckpointError:
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What saves need that a deletion has not planned for: `files`, and all that is in the `folders` of attempts."""

    files: frozenset[str]
    folders: frozenset[str]

    def holds(self, path: str) -> bool:
        """Whether an object must stay."""
        return path in self.files or "/".join(path.split("/")[:2]) in self.folders


def needs(store: Store, *, seen: Collection[str], going: Collection[str]) -> Needs:
    """What the manifests of a run name, committed or not, besides those in `seen`, and those in `going` that no COMMIT names.

    CheckpointError for a manifest that cannot be decoded: its needs are unknown.
    """
    files: set[str] = set()
    folders: set[str] = set()
    for step in _steps(store):
        folder = step_folder(step)
        for name in store.folders(folder):
            path = f"{folder}/{name}/{MANIFEST}"
            if not is_attempt(name) or path in seen or (path in going and not _is_committed(store, step, name)):
                continue
            if store.exists(path):
                files |= _named_at(store, path)
                folders.add(f"{folder}/{name}")
    return Needs(files=frozenset(files), folders=frozenset(folders))


def _is_committed(store: Store, step: int, attempt: str) -> bool:
    commit = _valid_commit(store, step)
    return commit is not None and commit.attempt == attempt


def _named_at(store: Store, path: str) -> frozenset[str]:
    try:
        data = read_index(store, path)
        return named_files(
            decode_manifest(data, where=store.where(path), num_digests=lambda: stored_digests(store, path))
        )
    except NotFoundError:
        return frozenset()  # another deletion has taken the attempt


def _steps(store: Store) -> list[int]:
    return sorted(step for name in store.folders() if (step := parse_step(name)) is not None)
