"""Units of bounded size that a schedule is made of: what to read, what to check, what to write where. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.rewrite.plan import Piece, Region
from titan_ckpt.sharding.placement import Box, Shape

PieceKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Read:
    """One request: `length` bytes of an object from `start`, to go to `at` in the unit's slab."""

    object: int
    start: int
    length: int
    at: int


@dataclass(frozen=True, slots=True)
class Move:
    """A box of elements: where it starts in the slab and its strides there (bytes), and its place in the strip it goes to."""

    at: int
    strides: Shape
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The next `length` bytes of a piece's payload stand at `at`; `is_last`: the digest must be `piece.digest` now."""

    key: PieceKey
    piece: Piece
    at: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Put:
    """File `file` of the wave gets these literal bytes next."""

    file: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """File `file` of the wave gets `part` of `region` next. `strip` (a box around `part`, larger only where a transform needs
    whole groups of rows) is filled by `moves`, transformed, and cropped to `part`."""

    file: int
    region: Region
    dtype: str
    strip: Box
    part: Box
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class End:
    """`region` of file `file` is complete."""

    file: int
    region: Region


Action = Put | Fill | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Reads that fit a slab, the checks and then the actions that use them, each file's actions in order."""

    reads: tuple[Read, ...]
    checks: tuple[Check, ...]
    actions: tuple[Action, ...]
    slab_bytes: int
