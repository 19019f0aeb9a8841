"""The hash of all bytes in a checkpoint: xxh3-128."""

from __future__ import annotations

import xxhash


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `data`: 16 bytes in the canonical big-endian order."""
    return xxhash.xxh3_128_digest(data)
