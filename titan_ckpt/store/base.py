"""The protocol of a store, and the retries that its backends (`local`, `s3`, `any_fsspec`) share.

A `path` is relative to the store's URL and never leaves it. A write becomes visible whole or not at all. Transient errors are
retried here and nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from titan_ckpt.errors import ConditionFailedError, NotFoundError, StoreError, TransientStoreError
from titan_ckpt.location import redact

log = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")
# Memory that an object-store client needs for one streamed write: the parts in flight and the one being filled.
BYTES_PER_WRITE = 96 << 20
# Smaller than a part of a multipart upload, so a store copies such parts into buffers of its own.
LARGEST_CHANGING_PART = 8 << 20
WHOLE_TRIES = 3


@dataclass(frozen=True, slots=True)
class Steady:
    """Parts for `Store.write` that stay unchanged until it returns, so that a store may send many in one call."""

    parts: Iterable[Buffer]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """A stored object. `version` changes whenever its bytes do: an ETag, or inode, time and size of a local file.

    `is_link`: it is a symbolic link, and the rest describes the file that it points to.
    """

    path: str
    size_bytes: int
    modified_s: float
    version: str
    is_link: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter, limited by a number of tries and a deadline for the whole operation."""

    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    deadline_s: float = 120.0


def retry(
    action: Callable[[], T],
    policy: RetryPolicy,
    *,
    what: str,
    give_up_at: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return `action()`, retried on TransientStoreError only; after the last try, raise that error.

    `give_up_at()` (of `time.monotonic`) is the deadline as the action knows it; else it is the policy's, from now on.
    """
    deadline = time.monotonic() + policy.deadline_s
    for attempt in range(1, policy.tries + 1):
        try:
            return action()
        except TransientStoreError as error:
            wait_s = random.uniform(0, min(policy.longest_wait_s, policy.first_wait_s * 2**attempt))
            ends_at = deadline if give_up_at is None else give_up_at()
            if attempt == policy.tries or time.monotonic() + wait_s > ends_at:
                tried = "1 try" if attempt == 1 else f"{attempt} tries"
                raise TransientStoreError(f"{what}: given up after {tried}: {error}") from error
            log.warning("%s: %s; try %d of %d in %.1f s", what, error, attempt + 1, policy.tries, wait_s)
            sleep(wait_s)
    raise AssertionError("unreachable: a retry policy allows at least one try")


def conditionally(
    write: Callable[[], ObjectInfo],
    *,
    run: Callable[[Callable[[], ObjectInfo]], ObjectInfo],
    as_ours: Callable[[Exception], Exception],
    holds: Callable[[], bool],
    stat: Callable[[], ObjectInfo],
    where: str,
    version: str | None,
) -> ObjectInfo:
    """`run(write)`, where `run` tries again; for `Store.write_if`.

    The server may have obeyed a try whose answer was lost: a later one then fails its own condition. So if the object `holds`
    what was to be written after an earlier try, it is written. An object that is gone fails the condition, too.
    """
    earlier_try = False

    def attempt() -> ObjectInfo:
        nonlocal earlier_try
        try:
            return write()
        except Exception as error:
            may_be_ours = isinstance(as_ours(error), ConditionFailedError | NotFoundError) and earlier_try
            if may_be_ours and holds():
                return stat()
            earlier_try = True
            raise

    try:
        return run(attempt)
    except NotFoundError as error:
        if version is None:
            raise
        raise ConditionFailedError(f"{where}: was deleted by another writer") from error


class Store(ABC):
    """Bytes under one URL. Thread-safe. `str(store)` is the URL without secrets."""

    is_scattering = False  # whether one request fills several buffers

    def __init__(self, url: str) -> None:
        self.url = url
        self._shown = redact(url)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def where(self, path: str) -> str:
        """The full URL of `path` for messages, without secrets."""
        return f"{self._shown}/{path}" if path else self._shown

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from byte `start`. StoreError if the object is too short."""

    def read_scattered(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after another, with the bytes of `path` from byte `start`. One request if `is_scattering`."""
        for buffer in buffers:
            self.read_into(path, start, buffer)
            start += len(buffer)

    @abstractmethod
    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        """Stream `parts` into one object; memory use does not depend on the object's size.

        Large parts are sent without a copy. A part of up to LARGEST_CHANGING_PART bytes may change once the next part is
        requested, a larger one only after `write` returns; `Steady` parts never change before that. If `parts` raises, no
        object is left behind. An existing object is replaced as a whole.
        """

    @abstractmethod
    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        """Write a small object only if the one at `path` has `version` (None: only if there is none).

        ConditionFailedError if another writer was first. Guaranteed only where `honours_conditions()`.
        """

    @abstractmethod
    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly inside folder `prefix`, sorted."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects in folder `prefix` and its subfolders, in order of path; none if there is no such folder."""

    @abstractmethod
    def stat(self, path: str) -> ObjectInfo:
        """Size, time and version of an object. NotFoundError if there is none."""

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects, ignoring missing ones, and on a file system the folders that become empty.

        StoreError for a path that is a symbolic link or leads through one: what a link points to is not this store's to delete.
        """

    @abstractmethod
    def honours_conditions(self) -> bool:
        """Whether this store enforces `write_if`; if unknown, probed once with a temporary object."""

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - object stores have no links
        """Whether `path`, or a folder that it lies in below the store's URL, is a symbolic link."""
        return False

    def is_taken(self, path: str) -> bool:
        """Whether anything has this name, be it an object or not: a folder, or a symbolic link that leads nowhere."""
        return self.exists(path) or next(iter(self.list(path)), None) is not None

    def leftovers(self, prefix: str = "") -> Iterator[tuple[ObjectInfo, str]]:  # noqa: ARG002 - most stores leave nothing
        """Temporary files in folder `prefix`, which `list` hides, each with the path that its write was to make."""
        return iter(())

    def free_bytes(self) -> int | None:
        """Bytes free where this store keeps its objects; None where that is unknown or not limited (object stores)."""
        return None

    def doing(self, what: str) -> None:  # noqa: B027 - most stores have no use for it
        """Hear of work on the store that is not one of its calls; a store with a time limit names it when it gives up."""

    def held_by_writes(self, num_files: int) -> int:
        """Upper bound on the bytes that `num_files` concurrent `write`s keep in buffers of the store's own."""
        return num_files * BYTES_PER_WRITE

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from byte `start`, or all up to the end."""
        size = (self.stat(path).size_bytes - start) if length is None else length
        buffer = bytearray(max(size, 0))
        self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_whole(self, path: str, *, at_most: int) -> tuple[ObjectInfo, bytes | None]:
        """A small object and its details; None in place of the bytes if it has more than `at_most`.

        StoreError if its bytes do not confirm the size that the store states, so that a wrong size is never taken for damage.
        """
        for _ in range(WHOLE_TRIES):
            entry = self.stat(path)
            if entry.size_bytes > at_most:
                self.read(path, at_most, 1)
                return entry, None
            data = self.read(path)
            if len(data) == entry.size_bytes:
                return entry, data
        raise StoreError(f"{self.where(path)}: has {entry.size_bytes} bytes by its details, but {len(data)} came")

    def opened(self, path: str) -> AbstractContextManager[Callable[[int, int], bytes]]:
        """A `read(start, length)` function for several small reads of one object."""
        return nullcontext(partial(self.read, path))

    def exists(self, path: str) -> bool:
        """Whether there is an object at `path`."""
        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True


def check_absent(store: Store, path: str) -> None:
    """After a NotFoundError: StoreError if there is something at `path` all the same, which cannot be read as a file."""
    if store.is_taken(path) and not store.exists(path):  # a file may have appeared meanwhile
        raise StoreError(
            f"{store.where(path)}: is there, but not as a file that can be read: a folder, or a symbolic link to what is "
            f"missing now (not mounted?). Mend or remove it"
        )


def read_if_any(store: Store, path: str) -> bytes | None:
    """The object at `path`, None if it is proved that there is none. For files whose absence permits something."""
    try:
        return store.read(path)
    except NotFoundError:
        check_absent(store, path)
        return None


def probe_conditions(store: Store) -> bool:
    """Write a temporary object twice with "only if absent"; True if the store refuses the second write."""
    path = f".probe-{secrets.token_hex(8)}"
    store.write_if(path, b"probe", version=None)
    try:
        store.write_if(path, b"probe", version=None)
    except ConditionFailedError:
        return True
    finally:
        store.delete([path])
    log.warning("%s ignores conditional writes: if two jobs commit the same step at once, neither will notice", store)
    return False


def digest_version(data: Buffer) -> str:
    """A version for a small object in a store without ETags."""
    return hashlib.sha256(data).hexdigest()[:32]


__all__ = [
    "Buffer",
    "ObjectInfo",
    "RetryPolicy",
    "Store",
    "check_absent",
    "digest_version",
    "probe_conditions",
    "read_if_any",
    "retry",
]


def check_free(store: Store, needed_bytes: Callable[[], int]) -> None:
    """StoreError if fewer bytes than needed are free where the store keeps its objects; asked only where that is limited."""
    free = store.free_bytes()
    if free is not None and free < (needed := needed_bytes()):
        raise StoreError(f"{store}: {needed:,} bytes are to be written, {free:,} are free on that disk")
