"""Local disks and mounted file systems. A write is durable when it returns: file and folder are fsynced."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from titan_ckpt.errors import AlreadyExistsError, ConditionFailedError, NotFoundError, PermissionDeniedError, StoreError
from titan_ckpt.location import check_relative, local_path, normalise, redact
from titan_ckpt.store.base import Buffer, ObjectInfo, Steady, Store

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-(.+)-[0-9a-f]{12}")
# Start writeback after every so many bytes, so that the final fsync has little left to wait for.
WRITE_BEHIND_BYTES = 16 << 20
MAX_PARTS_A_CALL = 1024  # IOV_MAX of Linux and macOS


class FileStore(Store):
    """A local or mounted POSIX file system."""

    _lock = threading.Lock()

    def __init__(self, url: str) -> None:
        super().__init__(normalise(url))
        self._root = local_path(self.url)
        self._durable = set[str]()

    def _full(self, path: str) -> str:
        return os.path.join(self._root, check_relative(path))

    def _folder(self, prefix: str) -> str:
        return self._full(prefix) if prefix else self._root

    def held_by_writes(self, num_files: int) -> int:  # noqa: ARG002 - the page cache belongs to the kernel
        return 0

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        with self.opened(path) as file, _os_errors(self.where(path)):
            done = 0
            while done < len(view):
                count = os.preadv(file.descriptor, [view[done:]], start + done)
                if count == 0:
                    raise StoreError(
                        f"{self.where(path)}: ends at byte {start + done}, "
                        f"but {len(view)} bytes from byte {start} were requested"
                    )
                done += count

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self.opened(path) as read:
            return read(start, read.size_bytes - start if length is None else length)

    def opened(self, path: str) -> _OpenFile:
        return _OpenFile(self, path, self._full(path))

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        target = self._full(path)
        return self._publish(path, parts, lambda temporary: os.replace(temporary, target))

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        target = self._full(path)

        def create(temporary: str) -> None:
            try:
                os.link(temporary, target)
            except FileExistsError as error:
                raise ConditionFailedError(f"{self.where(path)}: already exists") from error
            os.unlink(temporary)

        def replace(temporary: str) -> None:
            with FileStore._lock, _exclusive_lock(f"{os.path.dirname(target)}/{TEMPORARY_PREFIX}lock"):
                if not self.exists(path) or self.stat(path).version != version:
                    raise ConditionFailedError(f"{self.where(path)}: was changed by another writer")
                os.replace(temporary, target)

        return self._publish(path, [data], create if version is None else replace)

    def _publish(self, path: str, parts: Iterable[Buffer], publish: Callable[[str], None]) -> ObjectInfo:
        target = self._full(path)
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{name}-{secrets.token_hex(6)}")
        if self.is_link(path):
            raise StoreError(
                f"{self.where(path)}: is a symbolic link or lies behind one; not written, since its target may belong to others"
            )
        with _os_errors(self.where(path)):
            self._make_folders(folder)
            try:
                with open(temporary, "wb", buffering=0) as file:
                    _write_through(file.fileno(), parts)
                publish(temporary)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            _fsync_folder(folder)
        return self.stat(path)

    def _make_folders(self, folder: str) -> None:
        """Create `folder`, and make the whole path to it durable, so that a power cut cannot lose it.

        Whoever made a folder that exists need not have synced its name.
        """
        missing, at = [], folder
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for path in reversed(missing):
            try:
                os.mkdir(path)
            except FileExistsError as error:
                if not os.path.isdir(path):
                    raise AlreadyExistsError(f"{redact(path)}: is a file where a folder is needed") from error
        self._durable.difference_update(missing)
        while folder not in self._durable and (parent := os.path.dirname(folder)) != folder:
            is_ours = folder.startswith(self._root + os.sep) or folder in missing
            with nullcontext() if is_ours else suppress(OSError):
                _fsync_folder(parent)
            self._durable.add(folder)
            folder = parent

    def folders(self, prefix: str = "") -> list[str]:
        try:
            with _os_errors(self.where(prefix)), os.scandir(self._folder(prefix)) as entries:
                return sorted(entry.name for entry in entries if not _is_loop(entry) and entry.is_dir())
        except NotFoundError:
            return []

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from (entry for entry in self._all(prefix) if not _is_temporary(entry.path))

    def leftovers(self, prefix: str = "") -> Iterator[tuple[ObjectInfo, str]]:
        for entry in self._all(prefix):
            folder, _, name = entry.path.rpartition("/")
            if (match := _TEMPORARY.fullmatch(name)) and not entry.is_link:
                yield entry, f"{folder}/{match.group(1)}"

    def _all(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._folder(prefix)
        yield from self._below(folder, "" if folder == self._root else os.path.relpath(folder, self._root) + "/")

    def _below(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """The files of a folder, then those of its subfolders, with one `stat` per file: there may be tens of thousands."""
        try:
            with _os_errors(redact(folder)), os.scandir(folder) as found:
                entries = sorted((entry for entry in found if not _is_loop(entry)), key=lambda entry: entry.name)
        except NotFoundError:
            return
        subfolders = []
        for entry in entries:
            if entry.is_dir():
                subfolders.extend([entry] * (not entry.is_symlink()))
            else:
                path = prefix + entry.name
                try:
                    info = entry.stat()
                except FileNotFoundError:
                    continue
                except OSError:
                    with _os_errors(self.where(path)):
                        raise
                if stat.S_ISREG(info.st_mode):
                    yield _entry(path, info, is_link=entry.is_symlink())
        for entry in subfolders:
            yield from self._below(entry.path, f"{prefix}{entry.name}/")

    def stat(self, path: str) -> ObjectInfo:
        with _os_errors(self.where(path)):
            info = os.stat(self._full(path))
            if not stat.S_ISREG(info.st_mode):
                raise NotFoundError(f"{self.where(path)}: not a file")
        return _entry(path, info)

    def is_link(self, path: str) -> bool:
        parts = check_relative(path).split("/")
        return any(os.path.islink(os.path.join(self._root, *parts[: depth + 1])) for depth in range(len(parts)))

    def is_taken(self, path: str) -> bool:
        return os.path.lexists(self._full(path))

    def delete(self, paths: Iterable[str]) -> None:
        touched = set()
        for path in paths:
            full = self._full(path)
            with _os_errors(self.where(path)):
                self._unlink(path)
            touched.add(os.path.dirname(full))
        for folder in sorted(touched, key=len, reverse=True):
            # What goes first (a commit) must not come back after a power cut, when what goes next (its data) does not.
            with suppress(FileNotFoundError):
                _fsync_folder(folder)
            self._remove_empty(folder)

    def _unlink(self, path: str) -> None:
        """Remove a file, opening folder by folder so that no link is followed, even one that appears meanwhile."""
        *folders, name = check_relative(path).split("/")
        try:
            with ExitStack() as opened:
                folder = _open_folder(self._root, None, opened, flags=0)
                for part in folders:
                    folder = _open_folder(part, folder, opened, flags=os.O_NOFOLLOW)
                if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
                    raise self._refused(path)
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.is_link(path):
                raise self._refused(path) from error
            raise

    def _refused(self, path: str) -> StoreError:
        return StoreError(
            f"{self.where(path)}: is a symbolic link or lies behind one; not deleted, since its target may belong to others"
        )

    def _remove_empty(self, folder: str) -> None:
        while folder.startswith(self._root + os.sep):
            lock_file = Path(folder, f"{TEMPORARY_PREFIX}lock")
            try:
                if os.listdir(folder) == [lock_file.name]:
                    lock_file.unlink(missing_ok=True)
                os.rmdir(folder)
            except OSError:
                return
            self._durable.discard(folder)
            folder = os.path.dirname(folder)

    def honours_conditions(self) -> bool:
        return True

    def free_bytes(self) -> int:
        """Bytes free on the disk of this folder, or of its nearest parent that exists."""
        folder = self._root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free


class _OpenFile:
    """An open local file, read with `pread`."""

    def __init__(self, store: FileStore, path: str, full: str) -> None:
        self._store, self._path, self._full = store, path, full

    def __enter__(self) -> _OpenFile:
        try:
            self.descriptor = os.open(self._full, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
            info = os.fstat(self.descriptor)
        except OSError:
            with _os_errors(self._store.where(self._path)):
                raise
        if not stat.S_ISREG(info.st_mode):
            os.close(self.descriptor)
            raise NotFoundError(f"{self._store.where(self._path)}: not a file")
        self.size_bytes = info.st_size
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def __call__(self, start: int, length: int) -> bytes:
        try:
            data = os.pread(self.descriptor, max(length, 0), start)
        except OSError:
            with _os_errors(self._store.where(self._path)):
                raise
        if len(data) >= length:
            return data
        return Store.read(
            self._store, self._path, start, length
        )  # retry a short read, or raise the error for a short file


def _is_loop(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to itself, which is neither file nor folder."""
    try:
        entry.is_dir()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def _open_folder(name: str, within: int | None, opened: ExitStack, *, flags: int) -> int:
    """A descriptor of a folder, closed with `opened`."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=within)
    opened.callback(os.close, descriptor)
    return descriptor


def _entry(path: str, info: os.stat_result, *, is_link: bool = False) -> ObjectInfo:
    version = f"{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}"
    return ObjectInfo(path=path, size_bytes=info.st_size, modified_s=info.st_mtime, version=version, is_link=is_link)


class _os_errors:  # noqa: N801  (a context manager reads as a verb)
    """Translate OSError to a StoreError that names the URL."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, OSError):
            return
        text = f"{self._where}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise NotFoundError(f"{self._where}: no such file or folder") from error
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(text) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise PermissionDeniedError(text) from error
        raise StoreError(text) from error


class _exclusive_lock:  # noqa: N801
    """Advisory lock between processes of one machine, held while a file is compared and replaced."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        import fcntl  # POSIX only, like this class

        self._file = open(self._path, "a")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _write_through(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write `parts` and fsync them, with writeback running while more parts arrive."""
    written = begun = 0
    for batch in _batches(parts):
        while batch:
            count = os.writev(descriptor, batch)
            batch, written = _after(batch, count), written + count
            if written - begun >= WRITE_BEHIND_BYTES:
                _begin_writeback(descriptor, begun, written - begun)
                begun = written
    os.fsync(descriptor)


def _batches(parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Buffers for one `writev` each, up to WRITE_BEHIND_BYTES: several steady parts, or (a piece of) one part that may change.

    Fewer calls are faster: each one releases the GIL and must get it back from a busy training loop.
    """
    batch: list[memoryview] = []
    room = WRITE_BEHIND_BYTES
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            batch.append(rest[:room])
            room, rest = room - len(batch[-1]), rest[room:]
            if room == 0 or len(batch) == MAX_PARTS_A_CALL or not isinstance(parts, Steady):
                yield batch
                batch, room = [], WRITE_BEHIND_BYTES
    if batch:
        yield batch


def _after(batch: list[memoryview], count: int) -> list[memoryview]:
    """The rest of `batch` after its first `count` bytes."""
    for number, view in enumerate(batch):
        if count < len(view):
            return [view[count:], *batch[number + 1 :]]
        count -= len(view)
    return []


def _begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Start writeback: on Linux, DONTNEED starts to write dirty pages and keeps those in flight (mm/fadvise.c)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _fsync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
