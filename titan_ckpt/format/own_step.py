"""Whose a step's folder is. Whoever writes a step proves first that what is there is ours, or that nothing is.

Another program's DCP checkpoint may lie in a folder of our naming. Its `.metadata` is the only way to its data, so it is never
replaced. Nor is anything written behind a symbolic link below the run's URL: what a link points to may belong to others.
"""

from __future__ import annotations

import os
import re

from titan_ckpt.errors import AlreadyExistsError, CheckpointError, DamagedError, NotFoundError
from titan_ckpt.format.dcp_read import data_paths
from titan_ckpt.format.digest import digest
from titan_ckpt.format.names import COMMIT, METADATA, is_attempt, is_data_file, step_folder
from titan_ckpt.store.base import ObjectInfo, Store

MAX_INDEX_BYTES = 1 << 30
# What a save or a reshard writes into its attempt's folder, and the mark of a deletion.
_WRITTEN = re.compile(
    r"__\d+_\d+\.distcp(\.json)?|reshard\.json|manifest\.json|digests\.bin|assets/.+|deleting/[0-9a-f]{16}\.txt"
)
_ADVICE = "nothing was written. Move it away, or give another URL or step"


def attempt_of(path: str) -> str | None:
    """The attempt that a path relative to its step's folder belongs to, None if it is not named as our writers name files.

    >>> attempt_of("a-20260101T000000Z-0123abcd/__0_0.distcp"), attempt_of("a-20260101T000000Z-0123abcd/notes.txt")
    ('a-20260101T000000Z-0123abcd', None)
    """
    name, _, rest = path.partition("/")
    return name if is_attempt(name) and _WRITTEN.fullmatch(rest) else None


def read_index(store: Store, path: str) -> bytes:
    """Read a manifest or `.metadata`. DamagedError if its size is implausible, before a buffer is allocated for it.

    StoreError if the store states another size than it has bytes.
    """
    entry, data = store.read_whole(path, at_most=MAX_INDEX_BYTES)
    if data is None:
        raise DamagedError(f"{store.where(path)}: {entry.size_bytes} bytes; no index is larger than {MAX_INDEX_BYTES}")
    return data


def check_place(store: Store, step: int) -> None:
    """AlreadyExistsError if the step's folder, COMMIT or `.metadata` is a symbolic link, or another program's data is there."""
    folder = step_folder(step)
    for path in (folder, f"{folder}/{COMMIT}", f"{folder}/{METADATA}"):
        if store.is_link(path):
            raise AlreadyExistsError(
                f"{store.where(path)}: is a symbolic link, and what it points to may belong to others; {_ADVICE}"
            )
    if data := [entry.path for entry in store.list(folder) if _is_data_of_others(folder, entry)]:
        raise AlreadyExistsError(f"{store.where(data[0])}: another program's checkpoint is in this folder; {_ADVICE}")


def _is_data_of_others(folder: str, entry: ObjectInfo) -> bool:
    return os.path.dirname(entry.path) == folder and entry.path.endswith(".distcp")


def check_index(store: Store, step: int, committed: str | None) -> None:
    """AlreadyExistsError if the step's `.metadata` is another program's. `committed` is the digest that our COMMIT names."""
    folder = step_folder(step)
    path = f"{folder}/{METADATA}"
    try:
        data = read_index(store, path)
    except NotFoundError:
        return
    if digest(data).hex() != committed and not _is_ours(store, folder, data):
        raise AlreadyExistsError(
            f"{store.where(path)}: is another program's checkpoint, or not proved to be ours; {_ADVICE}"
        )


def _is_ours(store: Store, folder: str, data: bytes) -> bool:
    """Whether all data files that it names lie in attempts' folders; if it is damaged, whether only our files are beside it."""
    try:
        paths = data_paths(data, where=store.where(folder))
    except CheckpointError:
        paths = frozenset()
    if paths and not any(map(is_data_file, paths)):
        return False
    return (bool(paths) and all(map(is_data_file, paths))) or holds_only_ours(store, folder)


def holds_only_ours(store: Store, folder: str) -> bool:
    """Whether a step's folder holds files of attempts, and beside them only COMMIT and `.metadata`."""
    names = [entry.path.removeprefix(f"{folder}/") for entry in store.list(folder)]
    others = [name for name in names if name not in (COMMIT, METADATA)]
    return bool(others) and all(attempt_of(name) for name in others)
