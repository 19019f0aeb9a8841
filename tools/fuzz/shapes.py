"""Inputs of any size: for each family, ways to make n bytes of one kind of content, to see how the time to read them grows."""

# ruff: noqa: E501  (tables of what is repeated)
from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import zstandard

Shape: TypeAlias = Callable[[int], bytes]
"""About n bytes; at least, it grows in proportion to n."""

# ---------------------------------------------------------------------------------------------------------- JSON

BIG_VALUES: Mapping[str, Callable[[int], Any]] = {
    "ones": lambda n: [1] * (n // 2),
    "numbers": lambda n: list(range(n // 7)),
    "numbers downwards": lambda n: list(range(n // 7, 0, -1)),
    "large numbers": lambda n: [(1 << 62) + i for i in range(n // 20)],
    "floats": lambda n: [0.1 * i for i in range(n // 19)],
    "texts": lambda n: [f"name{i}" for i in range(n // 12)],
    "equal texts": lambda n: ["model.layers.0.weight"] * (n // 24),
    "empty lists": lambda n: [[]] * (n // 3),
    "pairs": lambda n: [[i, i + 1] for i in range(n // 14)],
    "lists of texts": lambda n: [["tp", 0]] * (n // 9),
    "nulls": lambda n: [None] * (n // 5),
    "empty objects": lambda n: [{}] * (n // 3),
    "objects": lambda n: [{"id": i, "content": f"t{i}"} for i in range(n // 30)],
    "keys": lambda n: {f"key{i}": i for i in range(n // 16)},
    "keys of objects": lambda n: {f"key{i}": {"a": i} for i in range(n // 22)},
    "keys with one beginning": lambda n: {"a" * 200 + str(i): 1 for i in range(n // 210)},
    "long text": lambda n: "a" * n,
    "long text of spaces": lambda n: " " * n,
    "long number in text": lambda n: "9" * n,
    "brackets in text": lambda n: "[" * n,
    "numbers in text": lambda n: "[" + "1, " * (n // 3) + "2]",
    "escapes": lambda n: "\x1b" * (n // 6),
    "not ASCII": lambda n: "\u00e9\u4e2d" * (n // 12),
    "long key": lambda n: {"k" * n: 1},
    "deep lists": lambda n: _nested(min(n // 2, 300)),
    "shape of many dimensions": lambda n: {"dtype": "F32", "shape": [1] * (n // 2), "data_offsets": [0, 4]},
    "frames": lambda n: [{"name": f"f{i}", "filename": "a.py", "line": i} for i in range(n // 45)],
    "one column": lambda n: {"count": n, "zstd": base64.b64encode(zstandard.compress(bytes(8 * n))).decode()},
    "calls": lambda n: [["/srv/train.py", i, "step"] for i in range(n // 28)],
    "many words": lambda n: "all_reduce " * (n // 11),
}


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def document_shapes(seeds: list[Any], encode: Callable[[Any], bytes]) -> Iterator[tuple[str, Shape]]:
    """Each value of BIG_VALUES in each different place of some documents; and entries of their lists and tables repeated."""
    done: set[str] = set()
    for seed in seeds:
        for path in _paths(seed):
            name = ".".join("*" if isinstance(part, int) else str(part)[:40] for part in path)
            if name in done:
                continue
            done.add(name)
            for kind, make in BIG_VALUES.items():
                yield f"{name or 'document'}: {kind}", _put_shape(seed, path, make, encode)
            yield f"{name or 'document'}: repeated", _repeat_shape(seed, path, encode)


def _paths(value: Any, most: int = 40) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for path in found:
        inner = _at(value, path)
        inside = (
            list(inner)[:12]
            if isinstance(inner, dict)
            else range(min(2, len(inner)))
            if isinstance(inner, list)
            else ()
        )
        found += [(*path, part) for part in inside][: max(0, most - len(found))]
    return found


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def _put_shape(seed: Any, path: tuple[Any, ...], make: Callable[[int], Any], encode: Callable[[Any], bytes]) -> Shape:
    return lambda n: encode(_replaced(seed, path, make(n)))


def _repeat_shape(seed: Any, path: tuple[Any, ...], encode: Callable[[Any], bytes]) -> Shape:
    """The value at `path` over and over: a list's entries, an object's under other names, a text's letters, a number as a list."""
    found = _at(seed, path)

    def make(n: int) -> bytes:
        times = max(1, n // max(1, len(json.dumps(found, default=str))))
        if isinstance(found, dict):
            value: Any = {f"{key}{i}": inner for i in range(times) for key, inner in found.items()}
        else:
            value = found * times if isinstance(found, list | str) else [found] * times
        return encode(_replaced(seed, path, value))

    return make


# ------------------------------------------------------------------------------------------------------- pickles

_OPCODE_RUNS: Mapping[str, tuple[bytes, bytes, bytes]] = {
    "empty lists": (b"", b"]", b""),
    "marks": (b"", b"(", b""),
    "mark and list": (b"", b"(l", b""),
    "marks, then one list each": (b"", b"(]", b"e"),
    "tuples of one": (b"N", b"\x85", b""),
    "tuples of doubles": (b"N", b"2\x86", b""),
    "memoized": (b"]", b"\x94", b""),
    "memoized texts": (b"", b"X\x01\x00\x00\x00aq\x01", b""),
    "one memo": (b"]q\x00", b"h\x00", b""),
    "memo by lines": (b"]", b"p1\ng1\n", b""),
    "dict of numbers": (b"}(", b"K\x01K\x01", b"u"),
    "dict of big numbers": (b"}(", b"\x8a\x09\x01\x02\x03\x04\x05\x06\x07\x08\x09N", b"u"),
    "dict of floats": (b"}(", b"G\x7f\xf8\x00\x00\x00\x00\x00\x00N", b"u"),
    "set of lists": (b"\x8f(", b"N", b"\x90"),
    "one into a list": (b"]", b"Na", b""),
    "one into a dict": (b"}", b"X\x01\x00\x00\x00aNs", b""),
    "popped": (b"N", b"N0", b""),
    "popped to the mark": (b"N", b"(N1", b""),
    "short lines": (b"N", b"I1\n0", b""),
    "long digits": (b"L", b"9", b"L\n"),
    "digits of I": (b"I", b"9", b"\n"),
    "digits of F": (b"F", b"9", b"\n"),
    "a long name": (b"c", b"a", b"\nb\n"),
    "many names": (b"N", b"0ca\nb\n", b""),
    "instances": (b"N", b"0ctorch\nSize\n)R", b""),
    "reduced": (b"ctorch\nSize\n", b")R", b""),
    "built": (b"N", b"}b", b""),
    "frames": (b"N", b"\x95\x00\x00\x00\x00\x00\x00\x00\x00", b""),
    "protocols": (b"N", b"\x80\x02", b""),
    "references": (b"N", b"0NQ", b""),
    "raw text": (b"V", b"\\u0041", b"\n"),
    "text in quotes": (b"S'", b"a", b"'\n"),
    "big integer": (b"\x8b\xff\xff\x00\x00", b"\x7f", b""),
}


def pickle_shapes() -> Iterator[tuple[str, Shape]]:
    """Runs of one opcode or two."""
    for name, (head, run, tail) in _OPCODE_RUNS.items():
        yield f"opcodes: {name}", _opcodes(head, run, tail)


def _opcodes(head: bytes, run: bytes, tail: bytes) -> Shape:
    def make(n: int) -> bytes:
        count = n // len(run)
        return b"\x80\x02" + head + run * count + tail * (count if run == b"(]" else 1) + b"."

    return make


def pickled(value: Any) -> bytes:
    """As torch writes it."""
    return pickle.dumps(value, protocol=2)


# ---------------------------------------------------------------------------------------------------------- text

_BEGINNINGS = (
    "", "[rank0]: ", "2026-01-31 23:59:59,123 ", "W0131 23:59:59.123456 17 torch/x.py:1] ", '  File "', "Traceback (most recent call last):\n",
    "srun: error: node1: task 3: ", "2026-01-31T23:59:59.123456789Z stdout F ", "2026-01-31T23:59:59.123456789Z stdout P ", '{"log":"',
    "Thread 0x00007f (most recent call first):\n", "[E ProcessGroupNCCL.cpp:1] [PG 0 Rank 3] ", "Fatal Python error: ",
    "key=", "https://user:", "Authorization: Bearer ", "step 3 loss ", "torch.distributed.DistBackendError: ", "-----BEGIN PRIVATE KEY-----\n",
)  # fmt: skip
_RUNS = (
    *(chr(code) for code in (0, 9, 13, 27, *range(32, 127), 0x85, 0xA0, 0xE9, 0x2028, 0x1F600)),
    "a ", "a=", "a: ", "a.", "a,", "a/", "://", "a@", '\\"', "\\n", "[a", "(a", "\x1b[31m", "\x1b[", "0:", "00:00:00 ", "2026-01-01 ", "rank", "rank 0 ",
    "[rank0]: ", "error: ", "Rank 1 ", "step 1 ", "loss ", "File \"a\", line 1, in f ", "Thread 1 ", "key=a ", "token: ", "Bearer ", "AKIA", "eyJ",
    "-----BEGIN ", "'a': ", '"a": "', "%41", "https://a:", "a=b&", "sk-", "Timeout(ms)=", "SeqNum=", "exitcode: ", "pid: ", "in ", "task 1: ", "1, ",
    "1-", "...", "ERROR ", "\r10%|", "| 1/2 [", "\\x1b", "node1: ",
)  # fmt: skip


def text_shapes() -> Iterator[tuple[str, Shape]]:
    """One long line of each run after each beginning; and the same as many lines."""
    for beginning in _BEGINNINGS:
        for run in _RUNS:
            what = f"{beginning!r} + {run!r}"
            yield f"{what} in one line", repeated(run.encode(), beginning.encode())
    for beginning in _BEGINNINGS:
        for run in _RUNS[::6]:
            line = f"{beginning}{run * 3}\n"
            yield f"{line!r} repeated", repeated(line.encode())


def repeated(run: bytes, beginning: bytes = b"") -> Shape:
    """`run` over and over, after `beginning`."""
    return lambda n: beginning + run * (n // len(run))


# ------------------------------------------------------------------------------------------------------- archives


def archive_shapes() -> Iterator[tuple[str, Shape]]:
    """ZIP archives of many records, of one record listed many times, of records whose CRC is wrong."""
    yield "records", lambda n: _archive(n // 140)
    yield "records of one name", lambda n: _archive(n // 140, name="archive/data/0")
    yield "records with a wrong CRC", lambda n: _archive(n // 140, crc=7)
    yield "one record listed many times", lambda n: _overlapping(n, 7)
    yield "a long comment", lambda n: _archive(3) + bytes(min(n, 65_000))


def _archive(count: int, *, name: str = "", crc: int | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(max(1, count)):
            info = zipfile.ZipInfo(name or f"archive/data/{number}")
            archive.NameToInfo.clear()  # no warning for a name that is there twice
            archive.writestr(info, b"12345678")
        if crc is not None:
            for info in archive.filelist:
                info.CRC = crc
    return out.getvalue()


def _overlapping(n: int, crc: int) -> bytes:
    """Half of the bytes are one record, half a directory that lists it over and over."""
    half = n // 2
    name = b"archive/data/0"
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, crc, half, half, len(name), 0) + name + bytes(half)
    entry = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, half, half, len(name), 0, 0, 0, 0, 0, 0
    ) + name  # fmt: skip
    count = min(half // len(entry), 60_000)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, count * len(entry), len(local), 0)
    return local + entry * count + end
