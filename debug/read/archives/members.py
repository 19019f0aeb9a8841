"""The regular files of a tar or zip archive, streamed. Links, devices and names that lead elsewhere are only counted.

Tar is read from its blocks (POSIX `ustar` and `pax`, GNU's long names), so that no header makes us hold more than
MOST_HEADER_BYTES. Zip is read by `zipfile`, whose directory of members may have MOST_DIRECTORY_BYTES.
"""

from __future__ import annotations

import io
import lzma
import re
import stat
import tarfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from titan_ckpt.errors import DamagedError

Read = Callable[[int, int], bytes]  # (start, length)
MOST_HEADER_BYTES = 1 << 20
MOST_DIRECTORY_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
MOST_LEVELS = 64  # of folders in a member's name
_BLOCK = tarfile.BLOCKSIZE
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_OF_MACOS = re.compile(r"(?:^|/)(?:__MACOSX/|\._|\.DS_Store$)")  # attributes of files, which macOS packs beside them
_PAX = re.compile(rb"(?:^|\n)\d{1,9} (path|size|mtime)=([^\n]{0,65536})(?=\n)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A regular file of an archive. `pieces` is its content, to be read before the next member is asked for."""

    path: str
    size_bytes: int
    modified_s: float
    pieces: Iterator[bytes]


def tar_members(pieces: Iterable[bytes], left_out: Counter[str]) -> Iterator[Member]:
    """The files of a tar stream, unpacked. DamagedError if it is none or, after what came before, is damaged or cut off."""
    source, said = _Stream(pieces), dict[bytes, bytes]()
    while (block := source.take(_BLOCK)).strip(b"\0"):
        header = _header(block, is_first=source.position == _BLOCK)
        if header.type in _NAMES:
            said |= _said(header.type, source.take(_bounded(header.size)))
            source.skip(-header.size % _BLOCK)
            continue
        size = _number(said.get(b"size"), header.size)
        end = source.position + size + -size % _BLOCK
        name = said[b"path"].decode("utf-8", "replace") if b"path" in said else header.name
        path = _safe_path(name, left_out) if header.isreg() else None
        if header.issym() or header.islnk():
            left_out["links"] += 1
        if path is not None:
            modified_s = _time(_number(said.get(b"mtime"), int(header.mtime)))
            yield Member(path=path, size_bytes=size, modified_s=modified_s, pieces=source.pieces(size))
        source.skip(end - source.position)
        said = {}
    if not block:
        raise DamagedError("cut off; the members before the cut were read")


def _header(block: bytes, *, is_first: bool) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except (tarfile.HeaderError, ValueError) as error:
        what = "no tar archive" if is_first else "a damaged tar header; the members before it were read"
        raise DamagedError(f"{what} ({error})") from error
    if header.size < 0:
        raise DamagedError("a tar header with a negative size")
    return header


def _bounded(size: int) -> int:
    if size > MOST_HEADER_BYTES:
        raise DamagedError(f"a name or header of {size} bytes in a tar archive")
    return size


def _said(kind: bytes, data: bytes) -> dict[bytes, bytes]:
    """What a header says of the next one: GNU's long name, or pax's path, size and time."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {b"path": data.rstrip(b"\0")}
    return {} if kind == tarfile.GNUTYPE_LONGLINK else dict(_PAX.findall(data))


def _number(text: bytes | None, default: int) -> int:
    try:
        return default if text is None else max(0, int(float(text)))
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"{text!r} in place of a number in a tar archive") from error


def zip_members(read: Read, size_bytes: int, left_out: Counter[str]) -> Iterator[Member]:
    """The files of a zip archive. DamagedError if it is none, or is damaged (after what came before)."""
    try:
        with zipfile.ZipFile(_Object(read, size_bytes)) as archive:
            for info in archive.infolist():
                is_link = stat.S_ISLNK(info.external_attr >> 16)
                left_out["links"] += is_link
                left_out["encrypted"] += info.flag_bits & 1
                if not info.filename or info.is_dir() or is_link or info.flag_bits & 1:
                    continue
                if (name := _safe_path(info.filename, left_out)) is not None:
                    with archive.open(info) as file:
                        yield Member(
                            path=name, size_bytes=info.file_size, modified_s=_zip_time(info),
                            pieces=_pieces(file, name),
                        )  # fmt: skip
    except _OF_ZIP as error:
        raise DamagedError(f"no zip archive that can be read: {error}") from error


_OF_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    OSError,
)


def _pieces(file: IO[bytes], name: str) -> Iterator[bytes]:
    """A member's content; its reader takes it, so `zip_members` does not see what goes wrong."""
    try:
        while piece := file.read(PIECE_BYTES):
            yield piece
    except _OF_ZIP as error:
        raise DamagedError(f"a damaged member of a zip archive, {name}: {error}") from error


def _zip_time(info: zipfile.ZipInfo) -> float:
    try:
        return _time(time.mktime((*info.date_time, 0, 0, -1)))
    except (ValueError, OverflowError):
        return 0.0


def _time(seconds: float) -> float:
    return min(max(0.0, seconds), 4e9)


def _safe_path(name: str, left_out: Counter[str]) -> str | None:
    """The member's path within the archive; None for what is no evidence, or would stand outside."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if name.startswith(("/", "\\")) or ".." in parts or "\0" in name:
        left_out["names that lead out of it"] += 1
        return None
    if len(parts) > MOST_LEVELS:
        left_out[f"files below more than {MOST_LEVELS} folders"] += 1
        return None
    path = "/".join(parts)
    return None if not path or _OF_MACOS.search(path) else path


class _Stream:
    """Pieces as a stream that knows its position."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""
        self.position = 0

    def take(self, size: int) -> bytes:
        """Exactly so many bytes; b"" at the end of the stream. DamagedError if it ends between."""
        return b"".join(self.pieces(size, is_end_allowed=True))

    def skip(self, size: int) -> None:
        """Pass over bytes."""
        for _ in self.pieces(size):
            pass

    def pieces(self, size: int, *, is_end_allowed: bool = False) -> Iterator[bytes]:
        """The next `size` bytes. DamagedError if the stream ends before."""
        begin = self.position
        while (left := size - (self.position - begin)) > 0:
            if not self._rest:
                self._rest = next(self._pieces, b"")
                if not self._rest:
                    if is_end_allowed and self.position == begin:
                        return
                    raise DamagedError("cut off; the members before the cut were read")
            piece, self._rest = self._rest[:left], self._rest[left:]
            self.position += len(piece)
            yield piece


class _Object(io.RawIOBase):
    """An archive as a seekable file. A read of more than MOST_DIRECTORY_BYTES is refused: only a zip's directory is read
    at once."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read, self._size_bytes = read, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size_bytes - self._at)
        length = left if size < 0 else min(size, left)
        if length > MOST_DIRECTORY_BYTES:
            raise DamagedError(f"a zip archive whose directory of members has {length} bytes")
        data = self._read(self._at, length) if length else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
