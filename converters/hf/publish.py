"""Publish a folder atomically: its URL never looks complete before it is, even after SIGKILL.

On a file system, files go to a hidden sibling folder that one rename makes visible; the next run to the same place removes
siblings of killed runs. An object store cannot rename: the caller writes the files that complete the model (config.json, the
index) last, and a failed run deletes what it wrote.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from titan_ckpt.console.units import format_size
from titan_ckpt.errors import AlreadyExistsError, StoreError
from titan_ckpt.location import local_path, normalise, scheme
from titan_ckpt.store.base import Store
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store


@contextmanager
def publish(url: str, *, size_bytes: int) -> Iterator[Store]:
    """Yield a store for the folder `url`, which becomes visible when the block ends and vanishes if the block raises.

    AlreadyExistsError if `url` exists; StoreError if `size_bytes` do not fit on the disk.
    """
    url = normalise(url)
    with _publish_folder(url, size_bytes) if scheme(url) == "file" else _publish_prefix(url) as store:
        yield store


def check_new(url: str) -> None:
    """AlreadyExistsError if `url` exists and is not an empty folder."""
    url = normalise(url)
    if scheme(url) == "file":
        target = local_path(url)
        if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
            raise AlreadyExistsError(f"{target}: exists already; give another name or remove it first")
        return
    store = open_store(url)
    found = next(store.list(), None)
    if found is not None:
        raise AlreadyExistsError(f"{store}: holds {found.path} already; give another prefix or remove it first")


@contextmanager
def _publish_folder(url: str, size_bytes: int) -> Iterator[Store]:
    target = local_path(url)
    check_new(url)
    _remove_abandoned(target)
    parent, name = os.path.split(target)
    partial = os.path.join(parent, f".{name}.partial-{secrets.token_hex(4)}")
    store = FileStore(partial)
    if size_bytes > store.free_bytes():
        raise StoreError(
            f"{target}: needs {format_size(size_bytes)}, the disk has {format_size(store.free_bytes())} free"
        )
    _make_folder(partial, target)
    owner = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield store
        _rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(owner)


def _make_folder(partial: str, target: str) -> None:
    try:
        os.makedirs(partial)
    except OSError as error:
        raise StoreError(f"{target}: cannot be created: {error.strerror or error}") from error


def _rename(partial: str, target: str) -> None:
    """Rename to a new name or onto an empty folder; durable on return."""
    try:
        os.rename(partial, target)
    except OSError as error:
        raise AlreadyExistsError(f"{target}: something was put there meanwhile ({error.strerror})") from error
    descriptor = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(target: str) -> None:
    """Remove siblings of `target` left by killed runs; a running one holds its lock."""
    parent, name = os.path.split(target)
    if not os.path.isdir(parent):
        return
    for entry in os.listdir(parent):
        if not entry.startswith(f".{name}.partial-"):
            continue
        folder = os.path.join(parent, entry)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


@contextmanager
def _publish_prefix(url: str) -> Iterator[Store]:
    check_new(url)
    store = open_store(url)
    try:
        yield store
    except BaseException:
        store.delete([entry.path for entry in store.list()])
        raise
