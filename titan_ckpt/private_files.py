"""Files of this user alone, created, replaced and read without following what somebody else planted.

A folder that a job writes to may be writable for others. A link or pipe that waits there under a name we are about to use would
make us write into a file of the user's, or wait for ever; a link among the files we publish would publish what it points to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import weakref
from pathlib import Path

from titan_ckpt.errors import AlreadyExistsError, StoreError

TEMPORARY = ".tmp-"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PrivateFolder:
    """A folder whose files are made with mode 0600, whole or not at all; a new folder has mode 0700.

    Holds a descriptor of the folder: replacing the folder by a link later leads nowhere else.
    """

    def __init__(self, path: Path, *, descriptor: int | None = None) -> None:
        """Open the folder `path`, made where it is missing, or take the `descriptor` of it that is open."""
        if descriptor is None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path, self._descriptor = path, descriptor
        weakref.finalize(self, os.close, self._descriptor)  # not before: another thread may be writing

    def inside(self, name: str) -> PrivateFolder:
        """The folder `name` in this one, made where it is missing. OSError if something else is there, be it a link."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._descriptor)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return PrivateFolder(self.path / name, descriptor=os.open(name, flags, dir_fd=self._descriptor))

    def move(self, name: str, folder: PrivateFolder) -> None:
        """Move the regular file `name` of this user into `folder`; anything else stays. Replaces only a file of this user."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            folder._check_replaceable(name, found.st_uid)
            os.replace(name, name, src_dir_fd=self._descriptor, dst_dir_fd=folder._descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Put `content` at `name`, by one rename and without fsync: the process may die next, the machine rarely does."""
        descriptor, temporary = self._create()
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)
            self._publish(descriptor, temporary, name)
        finally:
            os.close(descriptor)

    def create(self, name: str, size_bytes: int = 0) -> int:
        """A new file of `size_bytes` zeros at `name`; returns its descriptor, open for reading and writing."""
        descriptor, temporary = self._create()
        try:
            if size_bytes:  # reserved, since writing into a mapped file on a full disk ends the process (SIGBUS)
                os.posix_fallocate(descriptor, 0, size_bytes)
            self._publish(descriptor, temporary, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str) -> bytes:
        """The content of a file; StoreError if it is not a regular file with one name."""
        with open(_open_regular(name, self._descriptor, str(self.path / name)), "rb") as file:
            return file.read()

    def remove(self, name: str, descriptor: int | None = None) -> None:
        """Remove `name` if it is a regular file, and the one that `descriptor` has open where that is given."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and (descriptor is None or os.path.samestat(found, os.fstat(descriptor))):
                os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return

    def _create(self) -> tuple[int, str]:
        temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
        return os.open(temporary, _CREATE, 0o600, dir_fd=self._descriptor), temporary

    def _publish(self, descriptor: int, temporary: str, name: str) -> None:
        """Rename over `name`, which replaces a link rather than follow it; refused unless it is a file of the same owner."""
        try:
            self._check_replaceable(name, os.fstat(descriptor).st_uid)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            os.unlink(temporary, dir_fd=self._descriptor)
            raise

    def _check_replaceable(self, name: str, owner: int) -> None:
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise AlreadyExistsError(
                f"{self.path / name} is not written: {_kind(found)} is there, which is not ours; remove it"
            )


def open_regular(path: Path) -> int:
    """A descriptor to read the regular file `path`; StoreError for links, hard links, pipes, sockets and devices."""
    return _open_regular(str(path), None, str(path))


def _open_regular(name: str, folder: int | None, shown: str) -> int:
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{shown} is a symbolic link, which is not followed") from error
        raise StoreError(f"{shown}: {error.strerror}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise StoreError(f"{shown} is {_kind(found)}, which is not read")
    return descriptor


def _kind(found: os.stat_result) -> str:
    names = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file with several names" if found.st_nlink > 1 else "a file of another user"),
    )
    return next((name for is_one, name in names if is_one(found.st_mode)), "a device")
