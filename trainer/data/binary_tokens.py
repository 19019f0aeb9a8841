"""Token files of other trainers, read where they lie: nanoGPT's and llm.c's `.bin`, Megatron's `.bin` with `.idx`.

nanoGPT (https://github.com/karpathy/nanoGPT, data/*/prepare.py): ids alone, little-endian, of 2 bytes, or of 4 if the vocabulary
has more than 65,536. llm.c (https://github.com/karpathy/llm.c, dev/data/data_common.py) puts 256 words of 4 bytes before them: a
magic number that tells the size of an id, a version, the number of ids.

Megatron (https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py): the index is the 9 bytes "MMIDIDX"
and two zeros, a version (8 bytes, 1), a code for the ids' type (1 byte), the numbers of sequences and of document bounds (8 bytes
each), then the length of each sequence (4 bytes) and its first byte in `.bin` (8 bytes), and the bounds.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from titan_ckpt.errors import DataError, NotFoundError
from titan_ckpt.location import local_path, redact, scheme
from titan_ckpt.trainer.data.corpus import File, list_files
from titan_ckpt.trainer.data.tokenizer import Tokenizer

LLMC_WORDS = 256
LLMC = {20240520: "<u2", 20240801: "<u4"}  # magic numbers of llm.c
MEGATRON, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
MEGATRON_HEAD = struct.Struct("<9sQBQQ")
SAMPLED = 1 << 20  # bytes at each end of a file that identify it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The ids in one file: `count` of type `dtype` from byte `start` on."""

    file: File
    dtype: str
    start: int
    count: int

    @property
    def mapped(self) -> NDArray[Any] | None:
        """The ids in memory that is mapped, if the file is local."""
        store = self.file.store
        if scheme(store.url) != "file" or not self.count:
            return None
        path = os.path.join(local_path(store.url), self.file.path)
        return np.memmap(path, dtype=self.dtype, mode="r", offset=self.start, shape=(self.count,))


class BinaryTokens:
    """The ids of one or several files, one after another, with random access: what a `TokenSource` reads."""

    def __init__(self, parts: Sequence[_Part], tokenizer: Tokenizer) -> None:
        self._parts, self._maps = parts, [part.mapped for part in parts]
        self._ends = list(accumulate(part.count for part in parts))
        self._vocab_size, self.separator = tokenizer.vocab_size, tokenizer.separator
        self.digest = xxhash.xxh3_128_hexdigest("\n".join(map(_identity, parts)).encode())
        self.read(0, min(len(self), SAMPLED))  # a wrong type is seen at once

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count); DataError for an id that the tokenizer does not have."""
        pieces, end = [], min(start + count, len(self))
        while start < end:
            number = bisect_right(self._ends, start)
            first = start - (self._ends[number] - self._parts[number].count)
            many = min(end - start, self._parts[number].count - first)
            pieces.append(self._read_part(number, first, many))
            start += many
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    def _read_part(self, number: int, first: int, count: int) -> NDArray[np.int64]:
        part, mapped = self._parts[number], self._maps[number]
        if mapped is None:
            width = np.dtype(part.dtype).itemsize
            data = part.file.store.read(part.file.path, part.start + first * width, count * width)
            found = np.frombuffer(data, dtype=part.dtype).astype(np.int64)
        else:
            found = mapped[first : first + count].astype(np.int64)
        wrong = np.flatnonzero((found < 0) | (found >= self._vocab_size))
        if len(wrong):
            raise DataError(
                f"{part.file.where}: token {first + int(wrong[0])} is {found[wrong[0]]}, read as {part.dtype}; the tokenizer "
                f"(data.tokenizer) has ids up to {self._vocab_size - 1}: is it the one that made the file?"
            )
        return found


def _identity(part: _Part) -> str:
    """What tells one file from another without reading all of it: its size, its beginning and its end."""
    store, path, size = part.file.store, part.file.path, part.file.size_bytes
    ends = store.read(path, 0, min(SAMPLED, size)) + store.read(path, max(0, size - SAMPLED), min(SAMPLED, size))
    return f"{part.dtype} {part.start} {part.count} {xxhash.xxh3_128_hexdigest(ends)}"


def open_nanogpt(url: str, tokenizer: Tokenizer) -> BinaryTokens:
    """nanoGPT's or llm.c's files at `url`, in the order of their names; DataError for what cannot be one."""
    parts = [_nanogpt_part(file, tokenizer) for file in _files(url)]
    if not sum(part.count for part in parts):
        raise DataError(f"{redact(url)}: holds no tokens")
    return BinaryTokens(parts, tokenizer)


def _nanogpt_part(file: File, tokenizer: Tokenizer) -> _Part:
    dtype, start = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4", 0
    head = file.store.read(file.path, 0, min(4 * LLMC_WORDS, file.size_bytes))
    words = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    promised = None
    if len(words) == LLMC_WORDS and int(words[0]) in LLMC and not words[3:].any():
        dtype, start, promised = LLMC[int(words[0])], 4 * LLMC_WORDS, int(words[2])
    size, width = file.size_bytes - start, np.dtype(dtype).itemsize
    if size % width or promised not in (None, size // width):
        expected = "a multiple of it" if promised is None else f"{promised * width}, as its header promises"
        raise DataError(f"{file.where}: {size} bytes of ids of {width} bytes each, expected {expected}; is it cut off?")
    return _Part(file=file, dtype=dtype, start=start, count=size // width)


def open_megatron(url: str, tokenizer: Tokenizer) -> BinaryTokens:
    """Megatron's data set with prefix `url`, with or without `.bin` or `.idx`; DataError for an index that is none."""
    prefix = url.removesuffix(".bin").removesuffix(".idx")
    files = {}
    for suffix in (".idx", ".bin"):
        try:
            (files[suffix],) = _files(prefix + suffix)
        except (NotFoundError, DataError) as error:
            raise DataError(f"{redact(url)}: expected {redact(prefix)}.bin and .idx: {error}") from error
    index, data = files[".idx"], files[".bin"]
    if index.size_bytes < MEGATRON_HEAD.size:
        raise DataError(f"{index.where}: {index.size_bytes} bytes: not an index of Megatron")
    head = index.store.read(index.path, 0, MEGATRON_HEAD.size)
    magic, version, code, sequences, bounds = MEGATRON_HEAD.unpack(head)
    if magic != MEGATRON or version != MEGATRON_VERSION or code not in MEGATRON_TYPES:
        raise DataError(
            f"{index.where}: magic {magic!r}, version {version}, type {code}: expected {MEGATRON!r}, {MEGATRON_VERSION}, "
            f"and a type of whole numbers ({', '.join(map(str, MEGATRON_TYPES))})"
        )
    needed = MEGATRON_HEAD.size + 12 * sequences + 8 * bounds
    if index.size_bytes < needed:
        raise DataError(
            f"{index.where}: {index.size_bytes} bytes, but {sequences} sequences need {needed}: is it cut off?"
        )
    lengths = np.frombuffer(index.store.read(index.path, MEGATRON_HEAD.size, 4 * sequences), dtype="<i4")
    dtype, total = MEGATRON_TYPES[code], int(lengths.sum(dtype=np.int64))
    expected = total * np.dtype(dtype).itemsize
    if not total or data.size_bytes != expected:
        raise DataError(f"{data.where}: {data.size_bytes} bytes, but its index promises {expected}")
    return BinaryTokens([_Part(file=data, dtype=dtype, start=0, count=total)], tokenizer)


def _files(url: str) -> list[File]:
    return [file for file in list_files(url) if isinstance(file, File)]
