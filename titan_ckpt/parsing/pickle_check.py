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
MAX_MEMOIZED = 16
"""Memoized pairs of anything and a text, which may hold each other: the last is hashed in at most twice as many steps."""
FREE_CONTAINERS = 100_000
BYTES_PER_CONTAINER = 6

_TUPLES = frozenset(b"t\x85\x86\x87")
_TUPLE, _PUTS = rb"[t\x85-\x87]", rb"[qrp\x94]"
_LEAF = rb"(?:h.|j....)"
_NUMBER = (
    rb"(?:K.|M..|J....|G.{8}|\x8a(?:\x00|" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (8, *range(1, 8))) + rb"))(?!"
    + _PUTS + rb")"
)  # fmt: skip


def _run(put: bytes) -> re.Pattern[bytes]:
    """Opcodes that need no look: pushes, the filling of lists and dicts, tuples of two memoized values before `put`."""
    is_no_put = rb"(?!" + _PUTS + rb")"  # of a value that has one, which might be a tuple
    many = _LEAF + rb"++(?:\x86" + put + rb"|" + is_no_put + rb")"
    leaves = _LEAF + rb"(?:[N\x88\x89]|" + many + rb"|" + _NUMBER + rb"|" + is_no_put + rb")"  # often key and value
    return re.compile(rb"(?:" + leaves + rb"|[N\x88\x89\]})(eaus]++|q.|" + _NUMBER + rb")*+", re.DOTALL)


_RUN = _run(rb"(?!" + _PUTS + rb")")  # unmemoized: hashed once each
# Memoized, as torch writes each operation's group: with an index that fits the file, or one that asks for 1 MB at most.
_MEMOIZED = ((1 << 18, rb"(?:q.|r..[\x00-\x03]\x00)"), (0, rb"(?:q.|r..\x00\x00)"))
_RUNS = [(least, _run(rb"(?:(?!" + _PUTS + rb")|" + put + rb")")) for least, put in _MEMOIZED]
_AFTER_TEXT = {ord("q"): 2, ord("r"): 5}  # where a pair ends that a memoized text does
_MADE = re.compile(rb"\x86[qrp\x94]")  # where a tuple of two may be made that is memoized
_PARTS = re.compile(rb"(?:h(.)|j(....))(?:h(.)|j(....))\Z", re.DOTALL)
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
    most = sum(data.count(code, 0, end) for code in b"]}(\x85\x86\x87") + 4 * data.count(0x8F, 0, end)
    if most <= FREE_CONTAINERS:  # single bytes are counted faster than pairs
        return end
    found = sum(data.count(opcode, 0, end) for opcode in _CONTAINERS)
    if found > FREE_CONTAINERS + end // BYTES_PER_CONTAINER:
        raise DamagedError(f"{where}: {found} lists, dicts and tuples in {end} bytes; nothing was loaded")
    return end


def _end_if_plain(data: bytes, where: str, errors: str) -> int | None:
    """The end of a plain pickle; None for one that must be followed opcode by opcode."""
    at, tuples, memoized, text_end, end = 0, 0, 0, -1, len(data)
    run, most = _run_of(data)
    while at < end:
        at = run.match(data, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if at >= end:
            break
        code = data[at]
        if code in _TEXT_BYTES:
            at = text_end = skip_text(data, at, _TEXT_BYTES[code], where, errors)
        elif code == ord("r"):
            at = skip_put(data, at, where)
        elif code == 0x80:
            at += 2
        elif code == 0x94 and run is _RUN:
            at += 1
        elif code == ord("."):
            return at + 1
        elif code in _TUPLES and tuples < most and data[at + 1 : at + 2] not in (b"q", b"r", b"p", b"\x94"):
            at, tuples = at + 1, tuples + 1
        elif (
            code == 0x86
            and memoized < MAX_MEMOIZED
            and run is not _RUN
            and at - text_end == _AFTER_TEXT.get(data[text_end])
        ):
            at, memoized = at + 1, memoized + 1
        else:
            return None
    raise DamagedError(f"{where}: the pickle is truncated after {end} bytes")


def _run_of(data: bytes) -> tuple[re.Pattern[bytes], int]:
    """What needs no look, and how many tuples of other things may be there: memoized pairs, too, where none holds what may be
    a memoized tuple, by any reading of the bytes, and so grows with each that refers to it."""
    if data[1:2] >= b"\x04":  # whose pickles number what they memoize themselves
        return _RUN, MAX_TUPLES
    before = {data[max(made.start() - 10, 0) : made.start()] for made in _MADE.finditer(data)}
    found = [match for text in before for match in (_PARTS.search(text, start) for start in range(len(text))) if match]
    parts = {index for match in found for index in match.groups() if index}
    puts = [b"r" + index.ljust(4, b"\0") for index in parts]
    puts += [b"q" + index[:1] for index in parts if not index[1:].strip(b"\0")]
    if any(data[match.start() - 1] in _TUPLES for put in puts for match in re.finditer(re.escape(put), data)):
        return _RUN, MAX_TUPLES
    return next(run for least, run in _RUNS if len(data) >= least), 0


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
