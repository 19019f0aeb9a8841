"""Mutations by structure: of JSON documents, pickles, text, and plain bytes. Each takes a seeded random source."""

from __future__ import annotations

import json
import pickletools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, TypeAlias

Mutation: TypeAlias = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
"""Random source, the input to change, and others of the same family to borrow from."""

MOST_BYTES = 1 << 20
LARGE = 100_000
MOST_OPCODES = 30_000


def mutate_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Flip, cut, insert, repeat, exchange with another input."""
    broken = bytearray(data or b"x")
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(broken) + 1)
        end = min(len(broken), at + rng.choice((1, 1, 2, 4, 8, 64)))
        kind = rng.randrange(7)
        if kind == 0 and at < len(broken):
            broken[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 1:
            del broken[at:end]
        elif kind == 2:
            broken[at:at] = rng.choice(_PIECES)
        elif kind == 3:
            broken[at:at] = broken[at:end] * rng.choice((1, 3, 100, 5000))
        elif kind == 4:
            del broken[at:]
        elif kind == 5:
            broken[at:end] = rng.choice((0, 1, 0xFF, 0x7F)).to_bytes(1, "little") * (end - at)
        elif others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            broken[at:at] = other[start : start + rng.choice((4, 64, 1000))]
        broken = (broken or bytearray(b"x"))[:MOST_BYTES]
    return bytes(broken)


_PIECES = (
    b"\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0" * 64, b'"', b"{}", b"[", b"]", b"-1", b"1e999", b"NaN", b"null", b"9" * 30,
    b"\n", b"\r\n", b"\xed\xa0\x80", b"\\ud800", b"\x1b[31m", b" " * 200, b"a" * 3000, b"../../x", b"\xf0\x9f\x98\x80",
    b"9" * 5000,
)  # fmt: skip


def mutate_text(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change lines: repeat, join, swap, exchange words and numbers, make them very long."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind == 0:
            lines[at] = lines[at][:1000] * rng.choice((2, 30, 1000))
        elif kind == 1:
            words = lines[at].split(b" ")
            words[rng.randrange(len(words))] = rng.choice((*_PIECES, *words))
            lines[at] = b" ".join(words)
        elif kind == 2 and lines[at]:
            start = rng.randrange(len(lines[at]))
            piece = lines[at][start : start + rng.choice((1, 2, 8, 30))]
            lines[at] = lines[at][:start] + piece * rng.choice((2, 100, 20_000)) + lines[at][start:]
        elif kind == 3:
            lines[at:at] = [line[:1000] for line in lines[max(0, at - 3) : at + 1]] * rng.choice((1, 10, 200))
        elif kind == 4:
            del lines[at : at + rng.choice((1, 5, 50))]
        elif kind == 5:
            lines[at] = bytes(_digit(rng, byte) for byte in lines[at])
        elif kind == 6 and others:
            other = rng.choice(others).split(b"\n")
            lines[at:at] = [rng.choice(other)]
        else:
            lines[at] = mutate_bytes(rng, lines[at], ())
        data = b"\n".join(lines)[: rng.choice((MOST_BYTES, LARGE, LARGE, LARGE))]
        lines = data.split(b"\n")
    return data


def _digit(rng: random.Random, byte: int) -> int:
    return rng.choice(b"0123456789-.") if 48 <= byte <= 57 and rng.random() < 0.3 else byte


# ---------------------------------------------------------------------------------------------------------- JSON


class _Pairs(list[tuple[str, Any]]):
    """An object as pairs, so that a key may be there twice."""


def mutate_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a document: types, values, keys, sizes, depth; sometimes its text."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, others)
    try:
        tree = json.loads(data, object_pairs_hook=_Pairs)
        donors = [json.loads(rng.choice(others), object_pairs_hook=_Pairs)] if others else [tree]
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data, others)
    root = [tree]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change(rng, root, donors[0])
    try:
        return json_text(root[0]).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):
        return data


def _change(rng: random.Random, root: list[Any], donor: Any) -> None:
    places = _places(root)
    holder, at = rng.choice(places) if rng.random() < 0.5 else _walk(rng, root)
    kind = rng.randrange(10)
    if kind <= 2:
        _put(holder, at, _nasty(rng))
    elif kind == 3:
        if len(root) < 2 and holder is root:
            return
        del holder[at]
    elif kind == 4:
        holder.insert(at, holder[at])
    elif kind == 5:
        _put(holder, at, _get(*rng.choice(places)))
    elif kind == 6:
        _put(holder, at, _get(*rng.choice(_places([donor]))))
    elif kind == 7:
        _put(holder, at, _near(rng, _get(holder, at)))
    elif isinstance(holder, _Pairs):
        name, value = holder[at]
        holder[at] = (rng.choice(("", "\ud800", "a" * 500, "__metadata__", name + "x", *(n for n, _ in holder))), value)
    else:
        holder[at:at] = [holder[at]] * rng.choice((1, 1, 5, 70))
    if not root:
        root.append(None)


def _walk(rng: random.Random, root: list[Any]) -> tuple[Any, int]:
    """A place near the top as likely as one of thousands in a long list."""
    holder, at = root, 0
    while rng.random() < 0.8 and isinstance(inner := _get(holder, at), list) and inner:
        holder, at = inner, rng.randrange(len(inner))
    return holder, at


def _near(rng: random.Random, value: Any) -> Any:
    """Another value like this one: the next number, the same of another type, inside a list, without it."""
    if value in (None, True, False, "") and not isinstance(value, float):
        return rng.choice((0, 1, "", [value]))
    if isinstance(value, int):
        return rng.choice(
            (
                value + 1,
                value - 1,
                2 * value,
                -value,
                float(value) if abs(value) < 1 << 60 else 0.0,
                str(value)[:99],
                [value],
            )
        )
    if isinstance(value, _Pairs):
        return [inner for _, inner in value]
    if isinstance(value, list):
        return rng.choice(
            (value[:-1], value + value[-1:], value[::-1], _Pairs((str(n), v) for n, v in enumerate(value)), value[:1])
        )
    return (
        rng.choice((value + value, value[:-1], value[1:], value.upper(), [value], value + "\0"))
        if isinstance(value, str)
        else [value]
    )


def _places(root: list[Any]) -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []
    inside: list[Any] = [root]
    while inside and len(found) < 4000:
        holder = inside.pop()
        found += ((holder, at) for at in range(len(holder)))
        inside += (
            value for value in (_get(holder, at) for at in range(len(holder))) if isinstance(value, list) and value
        )
    return found


def _get(holder: Any, at: int) -> Any:
    return holder[at][1] if isinstance(holder, _Pairs) else holder[at]


def _put(holder: Any, at: int, value: Any) -> None:
    holder[at] = (holder[at][0], value) if isinstance(holder, _Pairs) else value


class _Raw(str):
    """Text that goes into the document as it is."""

    __slots__ = ()


def _nasty(rng: random.Random) -> Any:
    if rng.random() < 0.02:
        depth = rng.choice((70, 900, 100_000))
        return _Raw("[" * depth + "]" * depth)
    if rng.random() < 0.02:
        return [rng.choice((0, 1, -1, "", [], _Pairs()))] * rng.choice((70, 70, 3000))
    if rng.random() < 0.02:
        many = range(rng.choice((70, 3000)))
        return rng.choice(
            (list(many), _Pairs((f"k{n}", n) for n in many), [f"name{n}" for n in many], [[n] for n in many])
        )
    return rng.choice(_VALUES)


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 63, 64, 65, 255, 65_536, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18,
    10**400, 0.5, -0.0, 1e308, 1.5e300, _Raw("1e999"), _Raw("NaN"), _Raw("-Infinity"), _Raw("9" * 5000), "", "a", "0", "-1",
    "null", "\ud800", "\0", "\x1b[2J", "../../x", "/etc/passwd", "a" * 5000, "\u202e", [], [[]], [None], [1, 2], _Pairs(),
    _Pairs([("a", 1)]), "F32", "float32",
)  # fmt: skip


def json_text(root: Any) -> str:
    """The document, cut after MOST_BYTES: a list that holds the same one many times over stands for more than memory holds."""
    parts: list[str] = []
    size, inside = 0, [iter([root])]
    while inside and size < MOST_BYTES:
        for value in inside[-1]:
            if isinstance(value, list):
                inside.append(_opened(value))
                break
            parts.append(_scalar(value))
            size += len(parts[-1])
        else:
            inside.pop()
    return "".join(parts)[:MOST_BYTES]


def _opened(values: list[Any]) -> Iterator[Any]:
    is_object = isinstance(values, _Pairs)
    yield _Raw("{" if is_object else "[")
    for number, value in enumerate(values):
        if number:
            yield _Raw(",")
        if is_object:
            yield _Raw(f"{_scalar(value[0])}:")
        yield value[1] if is_object else value
    yield _Raw("}" if is_object else "]")


def _scalar(value: Any) -> str:
    if type(value) is str:
        return encode_basestring_ascii(value)
    if type(value) is int:
        return str(value) if -(1 << 64) < value < 1 << 64 else "1" + "0" * min(4200, value.bit_length() // 3)
    return str(value) if type(value) is _Raw else json.dumps(value)


# ------------------------------------------------------------------------------------------------------- pickles

_OPCODES = tuple(opcode.code.encode("latin1") for opcode in pickletools.opcodes)
_TRICKS = (
    b"h\x00h\x00\x86q\x00", b"\x85" * 50, b"(" * 30, b"2\x86", b"0", b"}", b"]", b"N", b")\x81", b"R", b"b", b"s", b"u", b"e",
    b"a", b"h\x01", b"t",
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"X\x04\x00\x00\x00echoq\x01", b"\x8b\xff\x00\x00\x00" + b"\xff" * 255, b"Q", b"P0\n",
    b"\x8a\xff" + b"\x7f" * 255, b"r\xff\xff\x00\x00", b"p99999\n", b"\x94", b"\x90", b"\x8f", b"\x91",
    b"J\xff\xff\xff\x7f", b"K\x00",
    b"X\x03\x00\x00\x00\xed\xa0\x80", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"l", b"d", b"1", b"\x88",
)  # fmt: skip


_PUSHES = (
    b"N", b"\x88", b"\x89", b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"G?\xf0\x00\x00\x00\x00\x00\x00",
    b"]", b"}", b")",
    b"X\x00\x00\x00\x00", b"X\x05\x00\x00\x00../..", b"C\x01a", b"\x8a\x40" + b"\x7f" * 64,
)  # fmt: skip
_PLAIN = frozenset(b"NKMJGhj\x88\x89]})X\x8a")
# What leaves the stack as it was, and can stand anywhere.
_NEUTRAL = (
    b"}(" + b"N" + b"2\x86" * 60 + b"Nu0", b"\x8f(" + b"N" + b"2\x86" * 60 + b"\x900", b"Np150000000\n0", b"Nr\xd1\xf0\xfa\x080",
    b"(" + b"]" * 60_000 + b"1", b"N" + b"\x85" * 50_000 + b"0", b"V\\ud800\n0", b"I" + b"9" * 5000 + b"\n0", b"cos\nsystem\n0",
    b"c" + b"a" * 10_000 + b"\nb\n0",
)  # fmt: skip


def mutate_pickle(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a pickle opcode by opcode: drop, repeat, swap, exchange arguments and values, add what unpicklers stumble over."""
    kind = rng.random()
    if kind < 0.1:
        return mutate_bytes(rng, data, others)
    opcodes = opcodes_of(data)
    if len(opcodes) < 3:
        return mutate_bytes(rng, data, others)
    return _other_values(rng, opcodes) if kind < 0.55 else _other_opcodes(rng, opcodes, others)


def _other_values(rng: random.Random, opcodes: list[bytes]) -> bytes:
    """A pickle that is still well-formed: some values are others, of another type, or come from elsewhere in it."""
    plain = [at for at, opcode in enumerate(opcodes) if opcode and opcode[0] in _PLAIN]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not plain or rng.random() < 0.1:
            opcodes.insert(rng.randrange(1, len(opcodes)), rng.choice(_NEUTRAL))
            break
        at = rng.choice(plain)
        other = rng.choice(_PUSHES) if rng.random() < 0.5 else opcodes[rng.choice(plain)]
        opcodes[at] = other * min(rng.choice((1, 1, 1, 1, 1, 1, 2, 100, 5000)), MOST_BYTES // len(other) + 1)
    return _joined(opcodes)


def _other_opcodes(rng: random.Random, opcodes: list[bytes], others: Sequence[bytes]) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4, 10))):
        at = rng.randrange(1, len(opcodes))
        kind = rng.randrange(7)
        if kind == 0:
            del opcodes[at : at + rng.choice((1, 1, 3))]
        elif kind == 1:
            end = at + rng.choice((1, 2, 5, 20))
            opcodes[at:at] = opcodes[at:end] * rng.choice((1, 1, 2, 30, 1000))
        elif kind == 2:
            opcodes[at:at] = [rng.choice(_TRICKS)] * rng.choice((1, 1, 1, 2, 2, 40, 2000))
        elif kind == 3:
            other = rng.randrange(1, len(opcodes))
            opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
        elif kind == 4:
            opcodes[at] = rng.choice(opcodes)
        elif kind == 5 and len(opcodes[at]) > 1:
            opcodes[at] = opcodes[at][:1] + mutate_bytes(rng, opcodes[at][1:], ())
        else:
            donors = opcodes_of(rng.choice(others)) if others else opcodes
            start = rng.randrange(len(donors) + 1)
            opcodes[at:at] = donors[start : start + rng.choice((1, 5, 50))]
        opcodes = opcodes[:MOST_OPCODES] if len(opcodes) > 1 else [b"\x80\x02", b"N", b"."]
    return _joined(opcodes)


def _joined(opcodes: Iterable[bytes]) -> bytes:
    """The opcodes as one pickle, up to MOST_BYTES."""
    data = bytearray()
    for opcode in opcodes:
        data += opcode[: MOST_BYTES - len(data)]
    return bytes(data)


def opcodes_of(data: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments, up to the first that is damaged."""
    starts: list[int] = []
    try:
        starts += (position for _, _, position in pickletools.genops(data) if position is not None)
    except Exception:  # noqa: BLE001  (pickletools raises whatever a broken argument makes it)
        starts.append(len(data))
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
