"""Walk the opcodes of a pickle without executing them, so that a small file cannot make the unpickler take all memory.

CPython's unpickler makes room for a memo index, and for a bytearray, of whatever size the pickle says. An honest pickle never
speaks of more than its own length.
"""

from __future__ import annotations

import pickletools

from titan_ckpt.errors import DamagedError

_STOP, _PUT, _LONG_BINPUT = ord("."), ord("p"), ord("r")
_UNKNOWN = -9
# Bytes of each opcode's argument; below 0: a line, or preceded by its own length (see `pickletools`).
_WIDTHS = [_UNKNOWN] * 256
for _opcode in pickletools.opcodes:
    _WIDTHS[ord(_opcode.code)] = 0 if _opcode.arg is None else _opcode.arg.n
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = frozenset(b"ci")


def check_pickle(data: bytes, *, where: str) -> None:
    """DamagedError for a pickle that is cut off, has unknown opcodes, or speaks of more than it has bytes."""
    at, end, widths = 0, len(data), _WIDTHS
    while at < end:
        code = data[at]
        if code == _STOP:
            return
        width = widths[code]
        if width >= 0:
            if code == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") > end:
                raise DamagedError(f"{where}: byte {at} asks for more memory than the file explains; it was not loaded")
            at += 1 + width
        else:
            at = _after(data, at, code, width, where)
    raise DamagedError(f"{where}: the pickle is cut off after {end} bytes")


def _after(data: bytes, at: int, code: int, width: int, where: str) -> int:
    """Where the opcode after the one at `at` begins."""
    if width == pickletools.UP_TO_NEWLINE:
        line_end = data.find(b"\n", at)
        if code in _TWO_LINES and line_end >= 0:
            line_end = data.find(b"\n", line_end + 1)
        if line_end >= 0 and not (code == _PUT and _is_beyond(data[at + 1 : line_end], len(data))):
            return line_end + 1
    elif width != _UNKNOWN:
        size = _LENGTH_BYTES[width]
        length = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        if length <= len(data) - at:
            return at + 1 + size + length
    raise DamagedError(f"{where}: byte {at} is no opcode, or one that reaches past the end; it was not loaded")


def _is_beyond(index: bytes, end: int) -> bool:
    return not index.isdigit() or len(index) > 12 or int(index) > end
