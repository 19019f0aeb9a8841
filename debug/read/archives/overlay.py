"""A store that also shows what its archives hold: each archive's members stand below its name. Read-only."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from titan_ckpt.errors import PermissionDeniedError
from titan_ckpt.store.base import Buffer, ObjectInfo, Store
from titan_ckpt.store.local import FileStore


class UnpackedFolder(FileStore):
    """The members of one archive, under that archive's name in messages."""

    def __init__(self, folder: Path, shown: str) -> None:
        super().__init__(str(folder))
        self._shown = shown


class Overlay(Store):
    """`base` and the files of `unpacked`, whose folders are named like the archives in `base`."""

    def __init__(self, base: Store, unpacked: FileStore) -> None:
        super().__init__(base.url)
        self._base, self._unpacked = base, unpacked

    def _store(self, path: str) -> Store:
        return self._unpacked if self._unpacked.exists(path) else self._base

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._store(path).read_into(path, start, buffer)

    def opened(self, path: str) -> AbstractContextManager[Callable[[int, int], bytes]]:
        return self._store(path).opened(path)

    def stat(self, path: str) -> ObjectInfo:
        return self._store(path).stat(path)

    def folders(self, prefix: str = "") -> builtins.list[str]:
        return sorted({*self._base.folders(prefix), *self._unpacked.folders(prefix)})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from sorted([*self._base.list(prefix), *self._unpacked.list(prefix)], key=lambda entry: entry.path)

    def honours_conditions(self) -> bool:
        return False

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:  # noqa: ARG002 - nothing is written
        raise self._refused(path)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:  # noqa: ARG002
        raise self._refused(path)

    def delete(self, paths: Iterable[str]) -> None:
        raise self._refused(next(iter(paths), ""))

    def _refused(self, path: str) -> PermissionDeniedError:
        return PermissionDeniedError(f"{self.where(path)}: archives are only read")
