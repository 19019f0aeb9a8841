"""The pickle (protocol 2) opcodes that we write, as functions that return bytes.

This needs no torch, and writes a million records as fast as bytes can be joined.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POP = b"0"
FEW_ROWS = 16  # up to here `bytes.join` is faster than numpy


def INT(value: int) -> bytes:  # noqa: N802  (named like the opcode family)
    """An integer of any size."""
    if 0 <= value <= 0xFF:
        return struct.pack("<cB", b"K", value)
    if -(1 << 31) <= value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return struct.pack("<cB", b"\x8a", len(raw)) + raw


def text(value: str) -> bytes:
    """A str."""
    raw = value.encode()
    return struct.pack("<cI", b"X", len(raw)) + raw


def tuple_of(*items: bytes) -> bytes:
    """A tuple; `items` are given as opcodes."""
    return b"(" + b"".join(items) + b"t"


def get_global(module: str, name: str) -> bytes:
    """A class, function or dtype by name."""
    return f"c{module}\n{name}\n".encode()


def call_global(module: str, name: str, *arguments: bytes) -> bytes:
    """The result of calling a global."""
    return get_global(module, name) + tuple_of(*arguments) + b"R"


def put(index: int) -> bytes:
    """Store the top of the stack in the memo at `index`."""
    return struct.pack("<cB", b"q", index) if index < 256 else struct.pack("<cI", b"r", index)


def get(index: int) -> bytes:
    """The memo's value at `index`."""
    return struct.pack("<cB", b"h", index) if index < 256 else struct.pack("<cI", b"j", index)


def ints(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """A column of integers: one row of opcodes each, all of one width."""
    if values.size == 0 or (int(values.max()) < 1 << 31 and int(values.min()) >= -(1 << 31)):
        return _column(b"J", values.astype("<i4"))
    return _column(b"\x8a\x08", values.astype("<i8"))


def gets(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """A column of references to memo values."""
    return _column(b"j", indices.astype("<u4"))


def rows(count: int, pieces: Sequence[bytes | npt.NDArray[np.uint8]]) -> bytes:
    """`count` records: bytes in `pieces` are part of every record, a column gives each record its own row."""
    if count <= FEW_ROWS:
        return b"".join(p if isinstance(p, bytes) else p[row].tobytes() for row in range(count) for p in pieces)
    columns, shared = [], b""
    for piece in pieces:
        if isinstance(piece, bytes):
            shared += piece
        else:
            columns += [_repeated(shared, count), piece]
            shared = b""
    return np.concatenate([*columns, _repeated(shared, count)], axis=1).tobytes()


def _repeated(piece: bytes, count: int) -> npt.NDArray[np.uint8]:
    return np.broadcast_to(np.frombuffer(piece, dtype=np.uint8), (count, len(piece)))


def _column(opcode: bytes, values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    width = len(opcode)
    column = np.empty((len(values), width + values.dtype.itemsize), dtype=np.uint8)
    column[:, :width] = np.frombuffer(opcode, dtype=np.uint8)
    column[:, width:] = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return column
