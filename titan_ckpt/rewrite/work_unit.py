"""The bounded units of a schedule: what to read, what to verify, what to write where. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.rewrite.plan import Region, SourceChunk
from titan_ckpt.sharding.placement import Box, Shape

ChunkKey = tuple[str, int]
"""A tensor's name and the index of one of its chunks."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read `length` bytes of an object from `start` to position `at` of the unit's buffer."""

    object: int
    start: int
    length: int
    at: int


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """Copy a box of elements: its start `at` in the buffer, its strides there (bytes), its box in the strip that it goes to."""

    at: int
    strides: Shape
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCheck:
    """Hash the next `length` bytes of a chunk's payload, at `at` of the buffer; after the last, compare with `chunk.digest`."""

    key: ChunkKey
    chunk: SourceChunk
    at: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class WriteLiteral:
    """Append these bytes to file number `file` of the group."""

    file: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRegion:
    """Append `part` of `region` to file number `file` of the group.

    `copies` assemble `strip`, a box around `part` (larger only if a transform needs whole groups of rows); it is transformed,
    then cropped to `part`.
    """

    file: int
    region: Region
    dtype: str
    strip: Box
    part: Box
    copies: tuple[BoxCopy, ...]


@dataclass(frozen=True, slots=True)
class EndRegion:
    """`region` of file number `file` is complete."""

    file: int
    region: Region


Action = WriteLiteral | WriteRegion | EndRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Read requests that fit a buffer, then the checks and actions on what they read; each file's actions are in order."""

    reads: tuple[ReadRequest, ...]
    checks: tuple[DigestCheck, ...]
    actions: tuple[Action, ...]
    buffer_bytes: int
