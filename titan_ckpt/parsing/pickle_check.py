"""Check a pickle before it is unpickled: no code runs here, and none of the unpickler's loops is left without a bound.

What CPython's unpickler does without a limit, in C, where no signal is answered: it allocates the memo index or the length that a
pickle names; it hashes tuples of tuples (a memo makes 300 bytes into 2**60 items, a long chain ends the C stack); it compares
colliding keys. So lengths must fit the file, containers be in proportion to it, texts be UTF-8, keys of dicts and members of sets
be texts, 64-bit numbers, instances, or few small tuples.

Most pickles pass by regular expression, at 10 ns per opcode, because they have no memoized tuple and no operation on the stack
but pushes (Flight Recorder dumps). The others are followed opcode by opcode (`pickle_stack`), at about 0.3 us.
Opcodes: the docstrings of CPython's `pickletools`.
"""

from __future__ import annotations

import re

from titan_ckpt.errors import DamagedError
from titan_ckpt.parsing.pickle_stack import walk

MAX_TUPLES = 64
"""Tuples of other things than memoized texts: so deep can tuples be nested without a look at them."""
FREE_CONTAINERS = 100_000
BYTES_PER_CONTAINER = 6

_TUPLES = frozenset(b"t\x85\x86\x87")
_TUPLE, _PUTS = rb"[t\x85-\x87]", rb"[qrp\x94]"
_LEAF = rb"(?:h.|j....)"
_NUMBER = rb"(?:K.|M..|J....|G.{8}|\x8a(?:\x00|" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 9)) + rb"))"
# Opcodes that need no look: pushes, the filling of lists and dicts, unmemoized tuples of two memoized values.
_RUN = re.compile(
    rb"(?:[N\x88\x89\]})(eaus]|q.|" + _LEAF + _LEAF + rb"\x86(?!" + _PUTS + rb")|" + _LEAF + rb"|" + _NUMBER
    + rb"(?!" + _PUTS + rb"))*+",
    re.DOTALL,
)  # fmt: skip
_TEXT_BYTES = {ord("X"): 4, 0x8C: 1, 0x8D: 8}
_CONTAINERS = (b"]", b"}", b"\x85", b"\x86", b"\x87", b"(t", b"(l", b"(d", *[b"\x8f"] * 4)


def check_pickle(data: bytes, *, where: str, are_surrogates_allowed: bool = False) -> int:
    """The end of the pickle that `data` begins with. DamagedError if it is damaged or asks for more than its length allows.

    Text with half of a surrogate pair, which could not be printed, is refused unless `are_surrogates_allowed`.
    """
    errors = "surrogatepass" if are_surrogates_allowed else "strict"
    end = _end_if_plain(data, where, errors)
    if end is None:
        end = walk(data, where, errors)
    if end * len(_CONTAINERS) <= FREE_CONTAINERS:  # so few bytes cannot hold more
        return end
    found = sum(data.count(opcode, 0, end) for opcode in _CONTAINERS)
    if found > FREE_CONTAINERS + end // BYTES_PER_CONTAINER:
        raise DamagedError(f"{where}: {found} lists, dicts and tuples in {end} bytes; nothing was loaded")
    return end


def _end_if_plain(data: bytes, where: str, errors: str) -> int | None:
    """The end of a plain pickle; None for one that must be followed opcode by opcode."""
    at, tuples, end = 0, 0, len(data)
    while at < end:
        at = _RUN.match(data, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if at >= end:
            break
        code = data[at]
        if code in _TEXT_BYTES:
            at = skip_text(data, at, _TEXT_BYTES[code], where, errors)
        elif code == ord("r"):
            at = skip_put(data, at, where)
        elif code == 0x80:
            at += 2
        elif code == 0x94:
            at += 1
        elif code == ord("."):
            return at + 1
        elif code in _TUPLES and tuples < MAX_TUPLES and data[at + 1 : at + 2] not in (b"q", b"r", b"p", b"\x94"):
            at, tuples = at + 1, tuples + 1
        else:
            return None
    raise DamagedError(f"{where}: the pickle is truncated after {end} bytes")


def skip_text(data: bytes, at: int, length_bytes: int, where: str, errors: str) -> int:
    """Offset after the text at `at`, which must be UTF-8; `errors` as of `bytes.decode`."""
    start = at + 1 + length_bytes
    stop = start + int.from_bytes(data[at + 1 : start], "little")
    if stop > len(data):
        raise DamagedError(f"{where}: byte {at} is not an opcode, or reaches past the end; nothing was loaded")
    try:
        data[start:stop].decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where}: the text at byte {start} is not UTF-8; nothing was loaded") from error
    return stop


def skip_put(data: bytes, at: int, where: str) -> int:
    """Offset after a LONG_BINPUT: the unpickler makes room for as many memo entries as its index says."""
    if int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
        raise DamagedError(f"{where}: byte {at} requests more memory than the file's length; nothing was loaded")
    return at + 5
