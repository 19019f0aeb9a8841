"""Which files of someone else's folder may be read: regular files inside it, and the blobs of its own hub cache.

A link may lead to any file that this user can read, and a conversion publishes what it reads. So a link is followed only if it
ends inside the folder and passes no hidden name (`.git/config` may hold a password), or if it is one that the Hugging Face hub
cache makes within a repository: `snapshots/REVISION/NAME -> ../../blobs/HASH` (https://huggingface.co/docs/hub/local-cache).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from titan_ckpt.errors import DamagedError, UnsafeContentError
from titan_ckpt.location import local_path, scheme
from titan_ckpt.store.base import Store

_KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Bytes `[start, end)` of a file of `size_bytes`, and their digest as somebody recorded it beside the file.

    `algorithm` is xxh3-128, sha-256 or git-sha-1 (of a Git blob: its size before its bytes); `fqn` is None for no single tensor.
    """

    path: str
    size_bytes: int
    start: int
    end: int
    digest: bytes
    algorithm: str
    fqn: str | None = None


def check_own_files(store: Store, paths: Iterable[str], *, folder: str = "", are_published: bool = False) -> None:
    """Check the files `paths`, relative to `folder` of `store`; those that do not exist, and stores without links, are passed.

    UnsafeContentError for a link that leads elsewhere and, with `are_published` (files that are copied as they are), for a file
    with a second name (a hard link), which may be anyone's. DamagedError for a dangling link and for what is not a file.
    """
    root = local_root(store)
    if root is None:
        return
    top = os.path.join(root, folder)
    real_top = os.path.realpath(top)
    for path in paths:
        _check_file(os.path.join(top, path), real_top, are_published=are_published)


def check_own_folder(store: Store, path: str) -> None:
    """UnsafeContentError if the folder `path` of `store` is a link that leads out of it."""
    root = local_root(store)
    if root is not None and not _is_below(os.path.realpath(os.path.join(root, path)), os.path.realpath(root)):
        raise UnsafeContentError(f"{store.where(path)}: a link out of {store}; name the folder that it leads to")


def local_names(store: Store) -> list[str]:
    """The names in the store's folder, of whatever kind; empty for stores without links and for a missing folder."""
    root = local_root(store)
    return sorted(os.listdir(root)) if root is not None and os.path.isdir(root) else []


def local_root(store: Store) -> str | None:
    """The store's folder on this machine; None if it has no links."""
    if scheme(store.url) == "local":
        return store.url.partition("://")[2]
    return local_path(store.url) if scheme(store.url) == "file" else None


def hub_blob(path: str) -> str | None:
    """The name of the hub cache's blob that `path`, a snapshot's link, leads to; None if it is no such link."""
    folder, real = os.path.realpath(os.path.dirname(path)), os.path.realpath(path)
    blobs, name = os.path.split(real)
    before, found, after = f"{folder}/".rpartition("/snapshots/")
    is_snapshot = bool(found and after.strip("/"))
    return name if is_snapshot and blobs == f"{before}/blobs" and not name.startswith(".") else None


def _check_file(path: str, top: str, *, are_published: bool) -> None:
    try:
        info = os.lstat(path)
        is_plain = stat.S_ISREG(info.st_mode) and os.path.dirname(path) == top
        real = path if is_plain else os.path.realpath(path)
        info = info if is_plain else os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise DamagedError(
                f"{path}: a link to {os.readlink(path)}, which is not there: an unfinished download? Download the model again"
            ) from None
        return
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(info.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(info.st_mode)), "not a file")
        raise DamagedError(f"{path}: {kind}, expected a file")
    if not is_plain and hub_blob(path) is None:
        hidden = [part for part in os.path.relpath(real, top).split("/") if part.startswith(".")]
        if not _is_below(real, top) or hidden:
            raise UnsafeContentError(
                f"{path}: leads to {real}, which is not one of this folder's own files; it was not read. "
                "Copy the file into the folder if it belongs there"
            )
    if are_published and info.st_nlink > 1:
        raise UnsafeContentError(
            f"{path}: has a second name (a hard link), perhaps outside this folder; it was not read. "
            "Replace it by a copy of its own"
        )


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")
