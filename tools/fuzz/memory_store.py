"""A store in memory, for one input at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from titan_ckpt.errors import NotFoundError, PermissionDeniedError
from titan_ckpt.store.base import Buffer, ObjectInfo, Store


class MemoryStore(Store):
    """The files of a mapping; nothing can be written."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__("memory://fuzz")
        self._files = files

    def _get(self, path: str) -> bytes:
        try:
            return self._files[path]
        except KeyError as error:
            raise NotFoundError(f"{self.where(path)}: not there") from error

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        data = self._get(path)[start : start + len(buffer)]
        if len(data) < len(buffer):
            raise NotFoundError(f"{self.where(path)}: {len(data)} bytes at {start}, expected {len(buffer)}")
        buffer[:] = data

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._get(path)
        return data[start:] if length is None else data[start : start + length]

    def folders(self, prefix: str = "") -> list[str]:
        inside = (path.removeprefix(f"{prefix}/" if prefix else "") for path in self._files if path.startswith(prefix))
        return sorted({path.partition("/")[0] for path in inside if "/" in path})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (self.stat(path) for path in sorted(self._files) if path.startswith(prefix))

    def stat(self, path: str) -> ObjectInfo:
        return ObjectInfo(path=path, size_bytes=len(self._get(path)), modified_s=1.7e9, version="1")

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        raise PermissionDeniedError(f"{self.where(path)}: read only, {parts}")

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        raise PermissionDeniedError(f"{self.where(path)}: read only, {len(data)}, {version}")

    def delete(self, paths: Iterable[str]) -> None:
        raise PermissionDeniedError(f"{paths}: read only")

    def honours_conditions(self) -> bool:
        return False
