"""Every scheme that fsspec knows: `memory://`, `gs://`, `az://`, `sftp://`, ...

An fsspec file is published when it is closed, even by an exception or the garbage collector. A failed write is therefore
discarded and its file marked closed, so that half an object never appears. fsspec has no conditional writes; only `memory://`,
which is local to this process, enforces them with a lock. An fsspec client may lack time limits, so each call runs on a thread
of its own and is abandoned at the deadline of the retry policy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import fsspec
from fsspec.core import url_to_fs

from titan_ckpt.errors import (
    AlreadyExistsError,
    ConditionFailedError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TitanError,
    TransientStoreError,
    UsageError,
)
from titan_ckpt.location import check_relative, normalise, redact, scheme
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, Store, retry
from titan_ckpt.store.time_limit import HungStoreError, call_within, on_a_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

SINGLE_SHOT_BYTES = 8 << 20
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "checksum")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStore(Store):
    """Objects under a URL of any fsspec file system; `options` are passed to that file system."""

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, policy: RetryPolicy, **options: Any) -> None:
        super().__init__(normalise(url))
        self._policy = policy
        self._in_memory = scheme(self.url) == "memory"
        try:
            self._fs, root = url_to_fs(self.url, **options)
        except ImportError as error:
            raise UsageError(f"{self}: {error}") from error
        except ValueError as error:
            known = ", ".join(sorted(fsspec.available_protocols()))
            raise UsageError(f"{self}: {redact(str(error))}; fsspec knows {known}") from error
        except OSError as error:
            raise _translate(error, str(self)) from error
        self._root = str(root).rstrip("/")

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        data = self._call(path, lambda: self._fs.cat_file(self._full(path), start=start, end=start + len(view)))
        if len(data) != len(view):
            raise StoreError(
                f"{self.where(path)}: ends at byte {start + len(data)}, but {len(view)} bytes from byte {start} were requested"
            )
        view[:] = data

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        full = self._full(path)
        head, rest = self._take_head(iter(parts))
        if rest is None:
            self._call(path, lambda: self._publish(full, head))
        else:
            self._stream(path, head, rest)
        return self.stat(path)

    def _take_head(self, parts: Iterator[Buffer]) -> tuple[bytes, Iterator[Buffer] | None]:
        """Split off what one request can write: (the first bytes, the remaining parts or None).

        On `memory://` the head is everything, since the bytes stay in memory anyway.
        """
        head = bytearray()
        for part in parts:
            head += memoryview(part).cast("B")
            if len(head) > SINGLE_SHOT_BYTES and not self._in_memory:
                return bytes(head), parts
        return bytes(head), None

    def _publish(self, full: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(full, data)
        except FileNotFoundError:
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(full, data)

    def _stream(self, path: str, head: bytes, rest: Iterator[Buffer]) -> None:
        """Write a large object without retries: `rest` can be read only once, and fsspec retries its own requests."""
        file = self._translated(path, lambda: self._open(self._full(path)))
        try:
            self._translated(path, lambda: file.write(head))
            for part in rest:
                self._translated(path, partial(file.write, memoryview(part).cast("B")))
            self._translated(path, file.close)
            self._translated(path, file.commit)
        except HungStoreError:
            _mark_closed(file)
            on_a_thread(0, partial(_discard, file))  # do not wait: it may hang too
            raise
        except BaseException:
            _discard(file)
            raise

    def _open(self, full: str) -> Any:
        with suppress(FileExistsError, NotImplementedError):
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        return self._fs.open(full, "wb", autocommit=False)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        with FsspecStore._lock:
            found = self.stat(path).version if self.exists(path) else None
            if found != version:
                state = "already exists" if version is None else "was changed by another writer"
                raise ConditionFailedError(f"{self.where(path)}: {state}")
            return self.write(path, [data])

    def honours_conditions(self) -> bool:
        return self._honours_conditions

    @cached_property
    def _honours_conditions(self) -> bool:
        if not self._in_memory:
            log.warning(
                "%s: fsspec has no conditional writes: if two jobs commit the same step at once, neither will notice",
                self,
            )
        return self._in_memory

    def folders(self, prefix: str = "") -> list[str]:
        found = self._look(prefix, lambda: list(self._fs.ls(self._folder(prefix), detail=True)))
        names = (str(item["name"]).rstrip("/").rpartition("/")[2] for item in found if item["type"] == "directory")
        return sorted(names)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._look(prefix, lambda: sorted(self._fs.find(self._folder(prefix), detail=True).items()))
        return (self._entry(self._relative(name), info) for name, info in found)

    def _look(self, prefix: str, action: Callable[[], Sequence[T]]) -> Sequence[T]:
        self._fs.invalidate_cache()
        try:
            return self._call(prefix, action)
        except NotFoundError:
            return ()

    def stat(self, path: str) -> ObjectInfo:
        full = self._full(path)
        self._fs.invalidate_cache()
        info = self._call(path, lambda: self._fs.info(full))
        if info.get("type") == "directory":
            raise NotFoundError(f"{self.where(path)}: not a file")
        return self._entry(path, info)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            remove = partial(self._fs.rm_file, self._full(path))
            with suppress(NotFoundError):
                self._call(path, remove)

    def _entry(self, path: str, info: dict[str, Any]) -> ObjectInfo:
        size, modified_s = int(info.get("size") or 0), _modified_s(info)
        known = next((str(info[key]).strip('"') for key in _VERSION_KEYS if info.get(key)), None)
        return ObjectInfo(path=path, size_bytes=size, modified_s=modified_s, version=known or f"{modified_s!r}-{size}")

    def _call(self, path: str, action: Callable[[], T]) -> T:
        """Run `action` with retries, its errors translated to ours."""
        return retry(lambda: self._translated(path, action), self._policy, what=self.where(path))

    def _translated(self, path: str, action: Callable[[], T]) -> T:
        try:
            return action() if self._in_memory else call_within(self._policy.deadline_s, action, what=self.where(path))
        except TitanError:
            raise
        except Exception as error:
            raise _translate(error, self.where(path)) from error

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_relative(path)}"

    def _folder(self, prefix: str) -> str:
        return self._full(prefix) if prefix else self._root

    def _relative(self, name: str) -> str:
        return name.strip("/")[len(self._root.strip("/")) :].lstrip("/")


def _discard(file: Any) -> None:
    """Discard a half-written file."""
    with suppress(Exception):
        file.discard()
    _mark_closed(file)


def _mark_closed(file: Any) -> None:
    """Keep the garbage collector from closing, and so publishing, the file."""
    with suppress(AttributeError):
        file.closed = True


def _modified_s(info: dict[str, Any]) -> float:
    value = next((info[key] for key in _TIME_KEYS if info.get(key)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)


def _translate(error: Exception, where: str) -> TitanError:
    text = f"{where}: {type(error).__name__}: {redact(str(error))}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFoundError(f"{where}: no such file or folder")
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(text)
    if isinstance(error, PermissionError):
        return PermissionDeniedError(text)
    if isinstance(error, ConnectionError | TimeoutError):
        return TransientStoreError(text)
    return StoreError(text)
