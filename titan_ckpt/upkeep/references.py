"""Files of one step that another step refers to, while saves and deletions run side by side. No locks: each looks at the other.

A save writes its manifest, which names the files that it needs, and *then* checks that a committed step still holds each of them.
A deletion removes the COMMITs of what goes, and *then* reads every manifest, of attempts that are not committed yet, too. So
whichever comes second sees the other: the save is not committed, or the deletion leaves the file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator

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


def manifests(store: Store, *, besides: Collection[str]) -> Iterator[str]:
    """Paths of the manifests of a run, committed or not, that are not in `besides`."""
    for step in _steps(store):
        folder = step_folder(step)
        for name in store.folders(folder):
            path = f"{folder}/{name}/{MANIFEST}"
            if is_attempt(name) and path not in besides and store.exists(path):
                yield path


def needed_by(store: Store, paths: Iterable[str]) -> frozenset[str]:
    """The files that the manifests at `paths` name. CheckpointError for one that cannot be decoded: its needs are unknown."""
    found: set[str] = set()
    for path in paths:
        try:
            data, count = read_index(store, path), stored_digests(store, path)
            found |= named_files(decode_manifest(data, where=store.where(path), num_digests=lambda count=count: count))
        except NotFoundError:
            continue  # another deletion has taken the attempt
    return frozenset(found)


def _steps(store: Store) -> list[int]:
    return sorted(step for name in store.folders() if (step := parse_step(name)) is not None)
