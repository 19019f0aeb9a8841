"""`gs://` and `az://` through obstore (https://developmentseed.org/obstore), which has conditional writes for both.

Azure: `If-None-Match` and `If-Match`; GCS: `x-goog-if-generation-match`. A version is an ETag; for GCS the generation that goes
with it is asked for just before a conditional write, so the write fails if the object changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import obstore
from obstore import exceptions as theirs

from titan_ckpt.errors import (
    ConditionFailedError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TitanError,
    TransientStoreError,
)
from titan_ckpt.location import check_relative, normalise, redact_text
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, Store, conditionally, retry
from titan_ckpt.store.clients.obstore_settings import make_store

T = TypeVar("T")
CHUNK_BYTES = 8 << 20
CHUNKS_AT_ONCE = 4
_DENIED = (theirs.PermissionDeniedError, theirs.UnauthenticatedError)
_TRANSIENT_WORDS = (
    "error sending request", "timed out", "timeout", "connection", "code: 5", "code: 429", "code: 408", "dns error",
)  # fmt: skip
CLIENT = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
NO_RETRIES = {"max_retries": 0, "retry_timeout": timedelta(seconds=20)}


class ObstoreStore(Store):
    """Objects under `gs://bucket/prefix` or `az://container/prefix`."""

    def __init__(self, url: str, policy: RetryPolicy, options: Mapping[str, Any]) -> None:
        super().__init__(normalise(url))
        self._policy = policy
        self._store, self._prefix = make_store(self.url, options, str(self), client=CLIENT, retries=NO_RETRIES)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        if not len(view):
            self.stat(path)
            return

        def get() -> None:
            end = start + len(view)
            try:
                data = obstore.get_range(self._store, self._key(path), start=start, end=end)
            except theirs.BaseError as error:
                size = self._head(path).size_bytes
                if end <= size:
                    raise
                raise StoreError(_beyond(self.where(path), size, start, len(view))) from error
            if len(data) != len(view):
                size = self._head(path).size_bytes
                if end > size:
                    raise StoreError(_beyond(self.where(path), size, start, len(view)))
                raise TransientStoreError(f"{self.where(path)}: {len(data)} of {len(view)} bytes came")
            view[:] = memoryview(data)

        self._call(path, "read", get)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        if length is not None or start:
            return super().read(path, start, length)
        return self._call(path, "read", lambda: bytes(obstore.get(self._store, self._key(path)).bytes()))

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        chunks = _chunks(parts)
        first, second = next(chunks, b""), next(chunks, None)
        if second is None:
            return self._call(path, "write", lambda: self._put(path, first, "overwrite"))
        sent = _Sent(chain([first, second], chunks))
        try:
            # Not tried again: the parts can be read only once.
            obstore.put(self._store, self._key(path), sent, chunk_size=CHUNK_BYTES, max_concurrency=CHUNKS_AT_ONCE)
        except Exception as error:
            if sent.error is not None:
                raise sent.error from None
            raise self._as_ours(path, "write", error) from error
        if sent.error is not None:
            raise sent.error
        entry = self.stat(path)
        if entry.size_bytes != sent.size_bytes:
            found = f"{sent.size_bytes} bytes were written, the store has {entry.size_bytes}"
            raise TransientStoreError(f"{self.where(path)}: {found}")
        return entry

    def _put(self, path: str, data: Buffer, mode: Any) -> ObjectInfo:
        obstore.put(self._store, self._key(path), bytes(data), mode=mode, use_multipart=False)
        return self._head(path)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        body = bytes(data)

        def put() -> ObjectInfo:
            mode: Any = "create" if version is None else self._unchanged(path, version)
            answer = obstore.put(self._store, self._key(path), body, mode=mode, use_multipart=False)
            written = str(answer["e_tag"]).strip('"')
            return ObjectInfo(path=path, size_bytes=len(body), modified_s=self._head(path).modified_s, version=written)

        return conditionally(
            put,
            run=lambda attempt: self._call(path, "write", attempt),
            as_ours=lambda error: self._as_ours(path, "write", error),
            holds=lambda: self._holds(path, body),
            stat=lambda: self._head(path),
            where=self.where(path),
            version=version,
        )

    def _unchanged(self, path: str, version: str) -> dict[str, str]:
        """The condition that the object has `version`. ConditionFailedError if it has another one already."""
        found = obstore.head(self._store, self._key(path))
        if str(found["e_tag"]).strip('"') != version:
            raise ConditionFailedError(f"{self.where(path)}: another writer was first")
        return {name: str(found[name]) for name in ("e_tag", "version") if found.get(name)}

    def _holds(self, path: str, body: bytes) -> bool:
        try:
            return bytes(obstore.get(self._store, self._key(path)).bytes()) == body
        except FileNotFoundError:
            return False

    def folders(self, prefix: str = "") -> list[str]:
        folder = self._folder(prefix)
        found = self._call(prefix, "list", lambda: obstore.list_with_delimiter(self._store, folder or None))
        names = {str(name).strip("/").rpartition("/")[2] for name in found["common_prefixes"]}
        return sorted(name for name in names if name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = self._folder(prefix)
        pages = iter(obstore.list(self._store, folder or None))
        strip = len(self._prefix) + 1 if self._prefix else 0
        while (page := self._call(prefix, "list", lambda: next(pages, None))) is not None:
            for item in page:
                yield self._entry(str(item["path"])[strip:], item)

    def stat(self, path: str) -> ObjectInfo:
        return self._call(path, "stat", lambda: self._head(path))

    def _head(self, path: str) -> ObjectInfo:
        return self._entry(path, obstore.head(self._store, self._key(path)))

    def _entry(self, path: str, item: Mapping[str, Any]) -> ObjectInfo:
        version = str(item.get("e_tag") or item.get("version")).strip('"')
        return ObjectInfo(
            path=path, size_bytes=int(item["size"]), modified_s=item["last_modified"].timestamp(), version=version
        )

    def delete(self, paths: Iterable[str]) -> None:
        for path, key in [(path, self._key(path)) for path in paths]:
            try:
                self._call(path, "delete", partial(obstore.delete, self._store, key))
            except NotFoundError:
                continue

    def honours_conditions(self) -> bool:
        return True

    def _call(self, path: str, verb: str, action: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return action()
            except Exception as error:
                raise self._as_ours(path, verb, error) from error

        return retry(attempt, self._policy, what=f"{verb} {self.where(path)}")

    def _as_ours(self, path: str, verb: str, error: Exception) -> TitanError:
        """`error` as one of ours, without secrets."""
        what = f"{self.where(path)}: cannot {verb}"
        if isinstance(error, TitanError):
            return error
        if isinstance(error, theirs.AlreadyExistsError | theirs.PreconditionError):
            return ConditionFailedError(f"{what}: another writer was first")
        text = f"{what}: {redact_text(str(error).strip().partition(chr(10))[0])[:400]}"
        if isinstance(error, theirs.NotFoundError | FileNotFoundError):
            is_container = "ContainerNotFound" in str(error) or "NoSuchBucket" in str(error)
            return NotFoundError(f"{text}: no such bucket" if is_container else f"{self.where(path)}: no such object")
        if "token request" in str(error):
            hint = (
                "give the options of an account (docs/stores.md), or GOOGLE_APPLICATION_CREDENTIALS or AZURE_STORAGE_*"
            )
            return PermissionDeniedError(f"{text}; no credentials were found: {hint}")
        if isinstance(error, _DENIED):
            return PermissionDeniedError(f"{text}; check the credentials and their permissions")
        is_transient = "builder error" not in str(error) and any(
            word in str(error).lower() for word in _TRANSIENT_WORDS
        )
        return TransientStoreError(text) if is_transient else StoreError(text)

    def _key(self, path: str) -> str:
        return self._folder(check_relative(path))

    def _folder(self, prefix: str) -> str:
        return "/".join(part for part in (self._prefix, check_relative(prefix) if prefix else "") if part)


class _Sent:
    """Chunks on their way; keeps the error of their source, which the client would wrap."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self.size_bytes, self.error = chunks, 0, None

    error: BaseException | None

    def __iter__(self) -> _Sent:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._chunks)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        self.size_bytes += len(chunk)
        return chunk


def _chunks(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """The bytes of `parts`, in chunks of CHUNK_BYTES and a smaller last one."""
    waiting = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            taken = view[: CHUNK_BYTES - len(waiting)]
            waiting += taken
            view = view[len(taken) :]
            if len(waiting) == CHUNK_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def _beyond(where: str, size: int, start: int, length: int) -> str:
    return f"{where}: ends at byte {size}, but {length} bytes from byte {start} were requested"
