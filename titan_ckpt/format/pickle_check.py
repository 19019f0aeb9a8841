"""Scan the opcodes of a pickle without executing them, so that a small file cannot make the unpickler exhaust memory.

CPython's unpickler allocates whatever memo index or bytearray size a pickle contains. In a genuine pickle neither is larger than
the file.
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
# Bytes to the next opcode if this one needs no check, else 0.
_STEPS = [width + 1 if width >= 0 and code not in (_STOP, _LONG_BINPUT) else 0 for code, width in enumerate(_WIDTHS)]
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = frozenset(b"ci")


def check_pickle(data: bytes, *, where: str) -> None:
    """DamagedError for a pickle that is truncated, has unknown opcodes, or requests more memory than the file's length."""
    at, end, steps = 0, len(data), _STEPS
    while at < end:
        if step := steps[data[at]]:
            at += step
            continue
        code = data[at]
        if code == _STOP:
            return
        if code != _LONG_BINPUT:
            at = _after(data, at, code, _WIDTHS[code], where)
        elif int.from_bytes(data[at + 1 : at + 5], "little") > end:
            raise DamagedError(f"{where}: byte {at} requests more memory than the file's length; nothing was loaded")
        else:
            at += 5
    raise DamagedError(f"{where}: the pickle is truncated after {end} bytes")


def _after(data: bytes, at: int, code: int, width: int, where: str) -> int:
    """Offset of the opcode after the one at `at`."""
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
    raise DamagedError(f"{where}: byte {at} is not an opcode, or reaches past the end; nothing was loaded")


def _is_beyond(index: bytes, end: int) -> bool:
    return not index.isdigit() or len(index) > 12 or int(index) > end
