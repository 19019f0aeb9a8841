"""Commit a checkpoint while deletions may run: all its files are there before COMMIT and after it, or it is withdrawn. No torch.

No locks: saves and deletions look at each other. A save writes its manifest, which names the files that it needs, and *then*
looks for marks of deletions in their folders, and for the files; after its COMMIT it does so again. A deletion puts a mark into
each folder that it takes something from, and *then* reads all manifests and COMMITs (`upkeep.references`); the mark goes
last. So whichever comes second sees the other: the save fails, or the deletion leaves the files.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import check_files, open_manifest
from titan_ckpt.errors import CheckpointError, ConditionFailedError, DamagedError, NotFoundError, StoreError
from titan_ckpt.format.commit import (
    WITHDRAWN,
    Before,
    Commit,
    commit_path,
    find_commit,
    metadata_path,
    publish,
    write_commit,
)
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.names import MANIFEST, marks_folder, step_folder
from titan_ckpt.store.base import Store

log = logging.getLogger(__name__)
STALE_MARK_S = 86_400.0  # the deletion that left it is long dead


def named_files(manifest: Manifest) -> frozenset[str]:
    """Paths in the run of all data files that a manifest names."""
    folder = step_folder(manifest.step)
    return frozenset(os.path.normpath(f"{folder}/{file.path}") for file in manifest.files)


def commit_checkpoint(store: Store, manifest: Manifest, metadata: bytes, *, replaces: Before | None) -> Commit:
    """Commit a checkpoint whose data files are all written; see `format.commit.write_commit`.

    CheckpointError if a file is missing, or a deletion is under way in a folder that holds one. Then nothing is committed, or the
    commit was taken back and the one before is in its place.
    """
    old = _what_it_replaces(store, manifest.step, replaces)
    prove = partial(check_all_there, store, manifest)
    commit = write_commit(store, manifest, metadata, replaces=replaces, prove=prove)
    _prove_or_withdraw(store, manifest, _New(version=commit.version, metadata=metadata), old)
    return commit


def commit_copy(store: Store, manifest: Manifest, metadata: bytes, *, commit: bytes, before: Before) -> None:
    """Commit a copy of a checkpoint, whose manifest and data files are written, with the COMMIT of its source."""
    old = _what_it_replaces(store, manifest.step, before)
    prove = partial(check_all_there, store, manifest)
    version = publish(store, manifest.step, manifest.attempt, metadata, commit, before, prove=prove)
    _prove_or_withdraw(store, manifest, _New(version=version, metadata=metadata), old)


def check_all_there(store: Store, manifest: Manifest) -> None:
    """CheckpointError unless the manifest and each file that it names are there, and no deletion has begun beside one of them."""
    folder = step_folder(manifest.step)
    own = f"{folder}/{manifest.attempt}"
    try:
        written_s = store.stat(f"{own}/{MANIFEST}").modified_s
    except NotFoundError as error:
        raise DamagedError(f"{error}: deleted while this step was saved") from error
    for place in sorted({own, *(os.path.dirname(path) for path in named_files(manifest))}):
        marks = [mark.path for mark in store.list(marks_folder(place)) if written_s - mark.modified_s < STALE_MARK_S]
        if marks:
            raise CheckpointError(
                f"{store.where(marks[0])}: a deletion is under way where this step has files. Save again when it has ended; "
                f"give `prune --incomplete` an `--older-than` longer than any save takes"
            )
    check_files(Checkpoint(store=store, url=store.url, step=manifest.step, folder=folder, manifest=manifest))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Old:
    """The COMMIT that a save replaces, and the `.metadata` beside it."""

    commit: bytes
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _New:
    """The version of the COMMIT that a save has written, and the `.metadata` beside it."""

    version: str
    metadata: bytes


def _what_it_replaces(store: Store, step: int, before: Before | None) -> _Old | None:
    if before is None or before.commit is None or before.metadata is None:
        return None
    try:
        return _Old(commit=store.read(commit_path(step)), metadata=store.read(metadata_path(step)))
    except NotFoundError:
        return None


def _prove_or_withdraw(store: Store, manifest: Manifest, new: _New, old: _Old | None) -> None:
    try:
        check_all_there(store, manifest)
    except CheckpointError as error:
        try:
            is_back = _withdraw(store, manifest.step, new, old)
        except ConditionFailedError:
            raise error from None  # another job has committed the step meanwhile
        except StoreError as failure:
            raise DamagedError(
                f"{error}; its COMMIT could not be taken back ({failure}): {store}@{manifest.step} is damaged. Save it again"
            ) from error
        back = "; the checkpoint that was there before is back" if is_back else ""
        raise type(error)(f"{error} (step {manifest.step} was committed and taken back{back})") from error


def _withdraw(store: Store, step: int, new: _New, old: _Old | None) -> bool:
    """Take a commit back, with its `.metadata`. True if the one before it, which is whole, is in its place again.

    ConditionFailedError if another job has committed the step since.
    """
    path, index, version = commit_path(step), metadata_path(step), new.version
    if old is not None:
        version = store.write_if(path, old.commit, version=version).version
        if _is_whole(store, step):
            if _holds(store, index, new.metadata):
                store.write_if(index, old.metadata, version=store.stat(index).version)
            return True
    store.write_if(path, WITHDRAWN, version=version)  # no job replaces it that has not seen it
    if _holds(store, index, new.metadata):
        store.delete([index])
    store.delete([path])
    return False


def _is_whole(store: Store, step: int) -> bool:
    try:
        commit = find_commit(store, step)
        if commit is None:
            return False
        check_all_there(store, open_manifest(store, commit))
    except CheckpointError:
        return False
    return True


def _holds(store: Store, path: str, data: bytes) -> bool:
    try:
        return store.read(path) == data
    except NotFoundError:
        return False
