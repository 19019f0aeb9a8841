"""The few pickle (protocol 2) opcodes we write, as functions that return bytes.

Writing the opcodes ourselves needs no torch, and writes a million records as fast as bytes can be joined.
"""

from __future__ import annotations

import struct

POP = b"0"


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
    """A tuple of values that are given as opcodes."""
    return b"(" + b"".join(items) + b"t"


def get_global(module: str, name: str) -> bytes:
    """A class, function or dtype by its name."""
    return f"c{module}\n{name}\n".encode()


def call_global(module: str, name: str, *arguments: bytes) -> bytes:
    """The result of calling a global."""
    return get_global(module, name) + tuple_of(*arguments) + b"R"


def put(index: int) -> bytes:
    """Remember the top of the stack as `index`."""
    return struct.pack("<cI", b"r", index)


def get(index: int) -> bytes:
    """What was remembered as `index`."""
    return struct.pack("<cI", b"j", index)
