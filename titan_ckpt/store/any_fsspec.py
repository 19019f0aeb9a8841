"""Every scheme that fsspec knows: `memory://`, `gs://`, `az://`, `sftp://`, ...

An fsspec file is published when it is closed, even by an exception or the garbage collector. A failed write is therefore
discarded and its file marked closed, so that half an object never appears. fsspec has no conditional writes; only `memory://`,
which is local to this process, enforces them with a lock. An fsspec client may lack time limits, so each call runs on a thread
of its own and is abandoned at the deadline of the retry policy.

A failure must never look like "nothing there". fsspec's `find`, `walk`, `glob`, `exists`, `isfile` and `isdir` take errors for
absence, so none of them is called: folders are walked here with `ls`, which raises. And when a call says that something is
missing, the folder it should be in is listed; if that contradicts, the call is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import fsspec
from fsspec.core import url_to_fs

from titan_ckpt.arguments import nearest
from titan_ckpt.errors import (
    ConditionFailedError,
    NotFoundError,
    StoreError,
    TitanError,
    TransientStoreError,
    UsageError,
)
from titan_ckpt.location import check_relative, normalise, redact, redact_text, scheme
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, Store, retry
from titan_ckpt.store.clients.extras import missing_library
from titan_ckpt.store.clients.fsspec_settings import checked_options, read_only_in
from titan_ckpt.store.deadline import first_answer_limit_s
from titan_ckpt.store.fsspec_errors import translate
from titan_ckpt.store.time_limit import HungStoreError, call_within, on_a_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
_Entries: TypeAlias = list[tuple[str, dict[str, Any]]]

SINGLE_SHOT_BYTES = 8 << 20
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "checksum")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


def schemes() -> list[str]:
    """The schemes that fsspec knows, whether or not their libraries are installed."""
    return list(fsspec.available_protocols())


class _NotAFileError(NotFoundError):
    """There is a folder of that name."""


class FsspecStore(Store):
    """Objects under a URL of any fsspec file system; `options` are passed to that file system.

    Or at the path `root` of a `filesystem`, which `url` is to name in messages: by default the path in the URL.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, url: str, policy: RetryPolicy, *, filesystem: Any = None, root: str | None = None, **options: Any
    ) -> None:
        super().__init__(url if filesystem is not None else normalise(url))
        self._policy = policy
        self._in_memory, self._is_answered = scheme(self.url) == "memory", False
        if filesystem is not None:
            self._fs, found = filesystem, filesystem._strip_protocol(self.url) if root is None else root
        else:
            self._fs, found = self._file_system(options)
        self._root = str(found).rstrip("/")

    def _file_system(self, options: dict[str, Any]) -> tuple[Any, str]:
        """The file system of this URL, and the path in it."""
        name = scheme(self.url)
        try:
            checked = checked_options(self.url, options, str(self))
            return cast(tuple[Any, str], url_to_fs(self.url, **checked))
        except ImportError as error:
            raise missing_library(name, str(self), error) from error
        except ValueError as error:
            known = "" if name in schemes() else f"; {nearest(name, schemes())}fsspec knows {len(schemes())} others"
            raise UsageError(f"{self}: {redact_text(str(error))}{known}") from error
        except TitanError:
            raise
        except Exception as error:
            raise self._as_ours(error, str(self)) from error

    def _as_ours(self, error: Exception, where: str) -> TitanError:
        """The error of ours for one of the file system's."""
        return translate(error, where)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        if len(view):
            view[:] = self._call(path, lambda: self._range(path, start, len(view)))
        else:
            self.stat(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        if length is not None:
            return super().read(path, start, length)
        return self._call(path, lambda: self._rest(path, start))

    def _range(self, path: str, start: int, length: int) -> Buffer:
        data = self._cat(path, start, start + length)
        if len(data) > length:
            whole = ": the whole object; a server that answers no ranges?" * (
                len(data) == self._stated(path).size_bytes
            )
            raise TransientStoreError(
                f"sent {len(data)} bytes from byte {start}, though {length} were requested{whole}"
            )
        size = start + len(data) if len(data) == length else self._stated(path).size_bytes
        if start + length > size:
            raise StoreError(
                f"{self.where(path)}: ends at byte {size}, but {length} bytes from byte {start} were requested"
            )
        if len(data) < length:
            raise TransientStoreError(f"sent {len(data)} of {length} bytes from byte {start}")
        return data

    def _rest(self, path: str, start: int) -> bytes:
        """The bytes from `start` to the end. One more is requested, so that a size that is too small is noticed."""
        size = self._stated(path).size_bytes
        data = self._cat(path, start, size + 1) if start <= size else b""
        if len(data) != max(size - start, 0):
            raise TransientStoreError(f"the object has {size} bytes, but {len(data)} came from byte {start} to the end")
        return bytes(data)

    def _cat(self, path: str, start: int, end: int) -> Buffer:
        data = self._fs.cat_file(self._full(path), start=start, end=end)
        if not isinstance(data, Buffer):
            raise TransientStoreError(f"{type(data).__name__} came instead of bytes")
        return data

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        self._check_writable()
        full = self._full(path)
        head, rest = self._take_head(iter(parts))
        if rest is None:
            return self._call(path, lambda: self._publish(path, full, head))
        size = self._stream(path, head, rest)
        return self._check_size(self.stat(path), size)

    def _check_writable(self) -> None:
        """UsageError where a change would not reach the store, or not at once."""
        if own := read_only_in(self.url):
            raise UsageError(f"{self}: {own} is read, not written; save to the store itself, and read through {own}")

    def _check_size(self, entry: ObjectInfo, size_bytes: int) -> ObjectInfo:
        """`entry`, if the object has the size that was written."""
        if entry.size_bytes != size_bytes:
            where = self.where(entry.path)
            raise TransientStoreError(f"{where}: {size_bytes} bytes were written, but the store has {entry.size_bytes}")
        return entry

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

    def _publish(self, path: str, full: str, data: bytes) -> ObjectInfo:
        try:
            self._fs.pipe_file(full, data)
        except FileNotFoundError:
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(full, data)
        return self._check_size(self._stated(path), len(data))

    def _stream(self, path: str, head: bytes, rest: Iterator[Buffer]) -> int:
        """Write a large object without retries: `rest` can be read only once, and fsspec retries its own requests.

        Returns its size.
        """
        file = self._translated(path, lambda: self._open(self._full(path)))
        size = 0
        try:
            for part in chain([head], rest):
                view = memoryview(part).cast("B")
                count = self._translated(path, partial(file.write, view))
                if isinstance(count, int) and count != len(view):
                    raise StoreError(f"{self.where(path)}: the store took {count} of {len(view)} bytes")
                size += len(view)
            self._translated(path, file.close)
            self._translated(path, file.commit)
        except HungStoreError:
            _mark_closed(file)
            on_a_thread(0, partial(_discard, file))  # do not wait: it may hang too
            raise
        except BaseException:
            _discard(file)
            raise
        return size

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
        return sorted(name for name, info in self._entries(prefix) if _is_folder(info))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        entries = dict(self._entries(prefix))
        for key in sorted(f"{name}/" if _is_folder(info) else name for name, info in entries.items()):
            name = key.rstrip("/")
            path = f"{prefix}/{name}" if prefix else name
            if key != name:
                yield from self.list(path)
            elif (entry := self._listed(path, entries[name])) is not None:
                yield entry

    def _entries(self, prefix: str) -> _Entries:
        """Names and details of what is directly inside a folder; none if there is no such folder."""
        full = self._folder(prefix)
        try:
            return self._call(prefix, lambda: self._ls(full), is_quick=True)
        except NotFoundError:
            return []

    def _ls(self, full: str) -> _Entries:
        """`fs.ls`, without what is not inside: some list a folder in itself, or siblings whose names begin with its own."""
        self._fs.invalidate_cache()
        folder = full.strip("/")
        named = [(str(item["name"]).strip("/"), item) for item in self._fs.ls(full, detail=True)]
        named = [(name, item) for name, item in named if not folder.startswith(f"{name}/")]  # zip:// lists its parents
        if strange := [name for name, _ in named if not name.startswith(folder)]:
            raise StoreError(f"{self}: a listing of {redact(folder)} names {redact(strange[0])}, which is not inside")
        return [(name.rpartition("/")[2], item) for name, item in named if name.rpartition("/")[0] == folder]

    def _listed(self, path: str, info: dict[str, Any]) -> ObjectInfo | None:
        """The object of a folder's entry; a link counts as the file it points to, and None if that is none."""
        if not _is_link(info) and info.get("size") is not None:
            return self._entry(path, info)
        try:
            return replace(self.stat(path), is_link=_is_link(info))  # a listing of http:// has no sizes
        except NotFoundError:
            return None

    def stat(self, path: str) -> ObjectInfo:
        return self._call(path, lambda: self._stated(path), is_quick=True)

    def _stated(self, path: str) -> ObjectInfo:
        self._fs.invalidate_cache()
        info: dict[str, Any] = self._fs.info(self._full(path))
        if info.get("type") == "directory":
            raise _NotAFileError(f"{self.where(path)}: not a file")
        return self._entry(path, info)

    def delete(self, paths: Iterable[str]) -> None:
        self._check_writable()
        for path in paths:
            remove = partial(self._fs.rm_file, self._full(path))
            with suppress(NotFoundError):
                self._call(path, remove)

    def is_link(self, path: str) -> bool:
        parts = check_relative(path).split("/")
        found = (self._details("/".join(parts[: depth + 1])) for depth in range(len(parts)))
        return any(info is not None and _is_link(info) for info in found)

    def is_taken(self, path: str) -> bool:
        return self._details(path) is not None

    def _details(self, path: str) -> dict[str, Any] | None:
        """What its folder lists of a path; None if nothing."""
        folder, _, name = path.rpartition("/")
        return dict(self._entries(folder)).get(name)

    def _entry(self, path: str, info: dict[str, Any]) -> ObjectInfo:
        size, modified_s = info.get("size"), _modified_s(info)
        if not isinstance(size, int) or size < 0:
            raise StoreError(f"{self.where(path)}: the store does not say how large it is (size {size!r})")
        known = next((str(info[key]).strip('"') for key in _VERSION_KEYS if info.get(key)), None)
        return ObjectInfo(path=path, size_bytes=size, modified_s=modified_s, version=known or f"{modified_s!r}-{size}")

    def _call(self, path: str, action: Callable[[], T], *, is_quick: bool = False) -> T:
        """Run `action` with retries, its errors translated to ours. `is_quick`: the first answer to it is due soon."""
        return retry(lambda: self._confirmed(path, action, is_quick=is_quick), self._policy, what=self.where(path))

    def _confirmed(self, path: str, action: Callable[[], T], *, is_quick: bool) -> T:
        """Run `action`; NotFoundError only if the folder of `path` does not list it either."""
        try:
            return self._translated(path, action, is_quick=is_quick)
        except NotFoundError as error:
            if not isinstance(error, _NotAFileError) and self._is_listed(self._folder(path)):
                raise TransientStoreError(f"{self.where(path)}: said to be missing, but its folder lists it") from error
            raise

    def _is_listed(self, full: str) -> bool:
        """Whether the folder of `full` lists it. A folder that is said to be missing is looked for in its own, and so on."""
        folder, _, name = full.rstrip("/").rpartition("/")
        if not folder.strip("/") or not name:
            return False
        try:
            entries = self._translated("", partial(self._ls, folder))
            return any(found == name and not _is_link(info) for found, info in entries)  # a link may lead nowhere
        except NotFoundError:
            return self._is_listed(folder)
        except (TransientStoreError, HungStoreError):
            raise
        except StoreError:
            return False  # a folder that cannot be listed at all contradicts nothing

    def _translated(self, path: str, action: Callable[[], T], *, is_quick: bool = False) -> T:
        deadline_s = self._policy.deadline_s
        limit_s = first_answer_limit_s(deadline_s) if is_quick and not self._is_answered else deadline_s
        try:
            result = action() if self._in_memory else call_within(limit_s, action, what=self.where(path))
        except TitanError:
            raise
        except Exception as error:
            raise self._as_ours(error, self.where(path)) from error
        self._is_answered = True
        return result

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_relative(path)}".removeprefix(
            "" if self._root else "/"
        )  # archives have no root folder

    def _folder(self, prefix: str) -> str:
        return self._full(prefix) if prefix else self._root


def _is_folder(info: dict[str, Any]) -> bool:
    return bool(info["type"] == "directory") and not _is_link(info)


def _is_link(info: dict[str, Any]) -> bool:
    """Whether a listing's entry is a symbolic link (local and SFTP file systems)."""
    return bool(info.get("islink")) or info.get("type") == "link"


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
