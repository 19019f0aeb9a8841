"""The hash of everything that a checkpoint stores: xxh3-128."""

from __future__ import annotations

import xxhash


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `data`, 16 bytes, big-endian as the reference prints it."""
    return xxhash.xxh3_128_digest(data)
