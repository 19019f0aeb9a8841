"""Publish a folder atomically: its URL never looks complete before it is, even after SIGKILL.

On a file system, files go to a hidden sibling folder that one rename makes visible; the next run to the same place removes
siblings of killed runs. A file beside such a folder, `.NAME.partial-*.owner`, proves that it is ours; without it nothing is
removed. An object store cannot rename: the caller writes the files that complete the model (config.json, the index) last, and a
failed run deletes exactly what it wrote.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from titan_ckpt.console.units import format_size
from titan_ckpt.errors import AlreadyExistsError, StoreError
from titan_ckpt.location import StrPath, local_path, normalise, scheme
from titan_ckpt.store.base import Buffer, ObjectInfo, Store
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store

OWNER_SUFFIX = ".owner"
OWNER_TEXT = b"titan-ckpt convert to-hf is writing the folder beside this file; when none runs, both may be removed\n"


@contextmanager
def publish(url: StrPath, *, size_bytes: int) -> Iterator[Store]:
    """Yield a store for the folder `url`, which becomes visible when the block ends and vanishes if the block raises.

    AlreadyExistsError if `url` exists; StoreError if `size_bytes` do not fit on the disk.
    """
    url = normalise(url)
    with _publish_folder(url, size_bytes) if scheme(url) == "file" else _publish_prefix(url) as store:
        yield store


def check_new(url: StrPath) -> None:
    """AlreadyExistsError if `url` exists and is not an empty folder. A link counts as existing, wherever it leads."""
    url = normalise(url)
    if scheme(url) == "file":
        target = local_path(url)
        is_empty = os.path.isdir(target) and not os.path.islink(target) and not os.listdir(target)
        if os.path.lexists(target) and not is_empty:
            raise AlreadyExistsError(f"{target}: exists already; give another name or remove it first")
        return
    store = open_store(url)
    found = next(store.list(), None)
    if found is not None:
        raise AlreadyExistsError(f"{store}: holds {found.path} already; give another prefix or remove it first")


@contextmanager
def _publish_folder(url: str, size_bytes: int) -> Iterator[Store]:
    target = local_path(url)
    _remove_abandoned(target)
    check_new(url)
    parent, name = os.path.split(target)
    partial = os.path.join(parent, f".{name}.partial-{secrets.token_hex(4)}")
    store = FileStore(partial)
    if size_bytes > store.free_bytes():
        raise StoreError(
            f"{target}: needs {format_size(size_bytes)}, the disk has {format_size(store.free_bytes())} free"
        )
    with _owner(partial, target):
        _make_folder(partial, target)
        try:
            yield store
            _rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _owner(partial: str, target: str) -> Iterator[None]:
    """A locked file that marks `partial` as ours: made before the folder, removed when the folder has left its name."""
    path = partial + OWNER_SUFFIX
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        owner = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StoreError(f"{target}: cannot be created: {error.strerror or error}") from error
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.write(owner, OWNER_TEXT)
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
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
    """Remove the siblings of `target` that killed runs left: a folder with our owner file beside it, which nobody has locked."""
    parent, name = os.path.split(target)
    if not os.path.isdir(parent):
        return
    ours = re.compile(rf"\.{re.escape(name)}\.partial-[0-9a-f]{{8}}{re.escape(OWNER_SUFFIX)}")
    for entry in filter(ours.fullmatch, os.listdir(parent)):
        path = os.path.join(parent, entry)
        try:
            owner = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text, folder = os.read(owner, 2 * len(OWNER_TEXT)), path.removesuffix(OWNER_SUFFIX)
            if text == OWNER_TEXT:
                shutil.rmtree(folder, ignore_errors=True)  # refuses a link
            if text == OWNER_TEXT or (text == b"" and not os.path.lexists(folder)):
                os.unlink(path)
        except OSError:
            continue
        finally:
            os.close(owner)


@contextmanager
def _publish_prefix(url: str) -> Iterator[Store]:
    check_new(url)
    store = _Recorded(open_store(url))
    try:
        yield store
    except BaseException:
        store.delete(store.written)
        raise


class _Recorded(Store):
    """A store that remembers what was written through it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner.url)
        self._inner = inner
        self.written: list[str] = []

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        info = self._inner.write(path, parts)
        self.written.append(path)
        return info

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        info = self._inner.write_if(path, data, version=version)
        self.written.append(path)
        return info

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._inner.read_into(path, start, buffer)

    def folders(self, prefix: str = "") -> list[str]:
        return self._inner.folders(prefix)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def stat(self, path: str) -> ObjectInfo:
        return self._inner.stat(path)

    def delete(self, paths: Iterable[str]) -> None:
        self._inner.delete(paths)

    def honours_conditions(self) -> bool:
        return self._inner.honours_conditions()

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def held_by_writes(self, num_files: int) -> int:
        return self._inner.held_by_writes(num_files)
