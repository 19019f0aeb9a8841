"""Decompress gzip, zstd, xz and bzip2 files that others wrote: as a stream, up to a size and a ratio.

A genuine log shrinks 5 to 100 times. A file that unpacks to more than UNPACKED_FREE bytes and MAX_RATIO times its own size is
refused; so is one past the caller's own limit. Memory: PIECE_BYTES, and the window of zstd and xz, at most MAX_WINDOW_BYTES.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import zstandard

from titan_ckpt.errors import DamagedError

PACKED = (".gz", ".zst", ".xz", ".bz2")
MAX_RATIO = 200
UNPACKED_FREE = 16 << 20
PIECE_BYTES = 1 << 20
MAX_WINDOW_BYTES = 1 << 27
_FED_BYTES = (
    16 << 10
)  # what follows a member's end is copied: many tiny members must not copy the rest of the file each


class UnpacksTooLargeError(DamagedError):
    """What was unpacked is larger than a genuine file of that size would be, or than the caller takes."""


def unpacked(
    path: str, parts: Iterable[bytes], *, packed_bytes: int, most_bytes: int, where: str = ""
) -> Iterator[bytes]:
    """The content of `path`, which ends in one of PACKED (any other name: the parts unchanged), in pieces.

    `parts` are its `packed_bytes` in order. A truncated file gives what can be read. DamagedError if that is nothing,
    UnpacksTooLargeError past the limits.
    """
    where = where or path
    most = min(most_bytes, UNPACKED_FREE + MAX_RATIO * packed_bytes) if path.endswith(PACKED) else most_bytes
    if path.endswith(".gz"):
        source = _gunzip(parts)
    elif path.endswith(".zst"):
        source = _unzstd(parts)
    elif path.endswith(".xz"):
        source = _streams(parts, lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES))
    elif path.endswith(".bz2"):
        source = _streams(parts, bz2.BZ2Decompressor)
    else:
        source = iter(parts)
    total = 0
    try:
        for piece in source:
            total += len(piece)
            if total > most:
                raise UnpacksTooLargeError(
                    f"{where}: unpacks from {packed_bytes} bytes to more than {most}; unpack it by hand if it is genuine"
                )
            yield piece
    except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError) as error:
        if total == 0:
            raise DamagedError(f"{where}: damaged compression: {error}") from error


def _gunzip(parts: Iterable[bytes]) -> Iterator[bytes]:
    """All members of a gzip file."""
    engine = zlib.decompressobj(wbits=31)
    for part in parts:
        for start in range(0, len(part), _FED_BYTES):
            data, piece = part[start : start + _FED_BYTES], b""
            while data or len(piece) == PIECE_BYTES:  # after a full piece there may be output without input
                piece = engine.decompress(data, PIECE_BYTES)
                yield piece
                data = engine.unconsumed_tail
                if engine.eof:
                    data, engine = engine.unused_data, zlib.decompressobj(wbits=31)


def _streams(
    parts: Iterable[bytes], make: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]
) -> Iterator[bytes]:
    """All streams of an xz or bzip2 file."""
    engine = make()
    for part in parts:
        for start in range(0, len(part), _FED_BYTES):
            data = part[start : start + _FED_BYTES]
            while data or not engine.needs_input:
                yield engine.decompress(data, PIECE_BYTES)
                data = b""
                if engine.eof:
                    data, engine = engine.unused_data, make()


def _unzstd(parts: Iterable[bytes]) -> Iterator[bytes]:
    """All frames of a zstd file."""
    engine = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with engine.stream_reader(
        io.BufferedReader(_Parts(parts), _FED_BYTES), read_across_frames=True, read_size=_FED_BYTES
    ) as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


class _Parts(io.RawIOBase):
    """Parts as a file that can only be read."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = memoryview(part)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
