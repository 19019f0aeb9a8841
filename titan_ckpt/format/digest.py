"""Hashes of stored bytes: xxh3-128 of all that titan-ckpt writes, and the CRC-32 that `torch.save` puts beside each record.

Which of the two a digest is, its length tells: 16 or 4 bytes.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import xxhash

CRC_BYTES = 4


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `data`: 16 bytes in the canonical big-endian order."""
    return xxhash.xxh3_128_digest(data)


def crc_digest(crc: int) -> bytes | None:
    """A ZIP record's CRC-32 as a digest; None for 0, which torch writes where it was told to compute none."""
    return crc.to_bytes(CRC_BYTES, "big") if crc else None


def matches(data: bytes | bytearray | memoryview, expected: bytes) -> bool:
    """Whether `data` has the digest `expected`, of either kind."""
    found = hasher(expected)
    found.update(data)
    return found.digest() == expected


class Hasher(Protocol):
    """Takes bytes piece by piece."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take the next bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes so far."""


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(CRC_BYTES, "big")


def hasher(expected: bytes) -> Hasher:
    """A new hasher of the kind of `expected`."""
    return _Crc32() if len(expected) == CRC_BYTES else xxhash.xxh3_128()
