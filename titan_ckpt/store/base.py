"""One small protocol over every place that holds bytes: local disk, memory, S3, and any other fsspec scheme.

A `path` is relative to the store's URL and never leaves it. A write is visible whole or not at all. Transient failures are
retried here and nowhere else. The backends: `store_file`, `store_s3`, `store_fsspec`.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from titan_ckpt.errors import ConditionFailedError, NotFoundError, TransientStoreError
from titan_ckpt.location import redact

log = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")
# What a client of an object store keeps of one streamed write: parts under way and the one that is being filled.
BYTES_PER_WRITE = 96 << 20
# Less than a part of a multipart upload, so that a store gathers such parts into buffers of its own.
LARGEST_CHANGING_PART = 8 << 20


@dataclass(frozen=True, slots=True)
class Steady:
    """Parts for `Store.write` none of which changes before it returns: a store may send many of them in one call."""

    parts: Iterable[Buffer]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object. `version` changes whenever its bytes do (an ETag, or a digest for local files)."""

    path: str
    size_bytes: int
    modified_s: float
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter, bounded by tries and by a deadline for the whole operation."""

    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    deadline_s: float = 120.0


def retry(action: Callable[[], T], policy: RetryPolicy, *, what: str, sleep: Callable[[float], None] = time.sleep) -> T:
    """The result of `action()`, tried again on TransientStoreError only; the last such error when the tries are spent."""
    give_up_at = time.monotonic() + policy.deadline_s
    for attempt in range(1, policy.tries + 1):
        try:
            return action()
        except TransientStoreError as error:
            wait_s = random.uniform(0, min(policy.longest_wait_s, policy.first_wait_s * 2**attempt))
            if attempt == policy.tries or time.monotonic() + wait_s > give_up_at:
                raise TransientStoreError(f"{what}: given up after {attempt} tries: {error}") from error
            log.warning("%s: %s; try %d of %d in %.1f s", what, error, attempt + 1, policy.tries, wait_s)
            sleep(wait_s)
    raise AssertionError("unreachable: a retry policy allows at least one try")


class Store(ABC):
    """Bytes under one URL. Thread-safe. `str(store)` is the URL without secrets."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._shown = redact(url)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def where(self, path: str) -> str:
        """`path` as a full URL for messages, without secrets."""
        return f"{self._shown}/{path}" if path else self._shown

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from `start`. StoreError if the object ends before that."""

    @abstractmethod
    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        """Write `parts` one after another as one object, streamed: memory does not grow with the size.

        Large parts are sent as they stand, without a copy: none of more than LARGEST_CHANGING_PART may change before `write`
        returns, a smaller one not before the next is asked for, and none at all of `Steady` parts. An exception from `parts`
        leaves no object. An object that is there already is replaced whole.
        """

    @abstractmethod
    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        """Write a small object only if the one at `path` has `version` (None: only if there is none).

        ConditionFailedError when somebody else was first. Only binding where `honours_conditions()`.
        """

    @abstractmethod
    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly below folder `prefix`, sorted."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object at or below folder `prefix`, in order of path; nothing if there is no such folder."""

    @abstractmethod
    def stat(self, path: str) -> ObjectInfo:
        """NotFoundError if there is no such object."""

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects (those already gone are fine) and, on a file system, folders that this leaves empty."""

    @abstractmethod
    def honours_conditions(self) -> bool:
        """Whether `write_if` really refuses on this store; probed once with an object of our own where unknown."""

    def free_bytes(self) -> int | None:
        """Bytes free where this store keeps its objects; None where that is unknown or not limited (object stores)."""
        return None

    def held_by_writes(self, num_files: int) -> int:
        """Upper bound on the bytes that `num_files` concurrent `write`s keep in buffers of the store's own."""
        return num_files * BYTES_PER_WRITE

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start`, or all to the end."""
        size = (self.stat(path).size_bytes - start) if length is None else length
        buffer = bytearray(max(size, 0))
        self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def opened(self, path: str) -> AbstractContextManager[Callable[[int, int], bytes]]:
        """`read(start, length)` of one object, for several small reads that depend on each other."""
        return nullcontext(partial(self.read, path))

    def exists(self, path: str) -> bool:
        """Whether there is an object at `path`."""
        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True


def probe_conditions(store: Store) -> bool:
    """Write an object of our own twice with "only if absent": True when the second write is refused."""
    path = f".probe-{secrets.token_hex(8)}"
    store.write_if(path, b"probe", version=None)
    try:
        store.write_if(path, b"probe", version=None)
    except ConditionFailedError:
        return True
    finally:
        store.delete([path])
    log.warning("%s ignores conditional writes: two jobs that commit the same step at once cannot be told apart", store)
    return False


def digest_version(data: Buffer) -> str:
    """A version for a small object on a store that has no ETags."""
    return hashlib.sha256(data).hexdigest()[:32]


__all__ = [
    "Buffer",
    "ObjectInfo",
    "RetryPolicy",
    "Store",
    "digest_version",
    "probe_conditions",
    "retry",
]
