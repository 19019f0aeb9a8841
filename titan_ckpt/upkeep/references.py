"""Files that saves need, while saves and deletions run side by side (`checkpoint.commit_proved` has the other side of this)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from titan_ckpt.checkpoint.commit_proved import named_files
from titan_ckpt.checkpoint.open import stored_digests
from titan_ckpt.errors import CheckpointError, NotFoundError
from titan_ckpt.format.commit import find_commit
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.format.names import MANIFEST, is_attempt, parse_step, step_folder
from titan_ckpt.format.own_step import read_index
from titan_ckpt.store.base import Store


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

    CheckpointError for a manifest that cannot be decoded: its needs are unknown. StoreError for one that cannot be read.
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
    """Whether COMMIT names the attempt, or may: one that cannot be read proves nothing."""
    try:
        commit = find_commit(store, step)
    except CheckpointError:
        return True
    return commit is not None and commit.attempt == attempt


def _named_at(store: Store, path: str) -> frozenset[str]:
    try:
        data = read_index(store, path)
        return named_files(
            decode_manifest(data, where=store.where(path), num_digests=lambda: stored_digests(store, path))
        )
    except NotFoundError:
        return frozenset()  # another deletion has taken the attempt
    except CheckpointError as error:
        raise type(error)(
            f"the deletion stops here: which files of other steps {store.where(path)} needs is unknown ({error}). "
            f"Mend it, or remove {path.rpartition('/')[0]} yourself"
        ) from error


def _steps(store: Store) -> list[int]:
    return sorted(step for name in store.folders() if (step := parse_step(name)) is not None)
