"""A read-only view of a store in which packed tensors are plain ones, multiplied out while they are read.

A file keeps its bytes, and after the last come the plain tensors made from what it holds. So offsets of other tensors stay, and a
plain tensor is read as any other: in ranges, by several threads, in memory that does not grow with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titan_ckpt.checkpoint.uncompressed import DecodedStore
from titan_ckpt.converters.quantised.formats import (
    ROUND,
    VALUES_PER_SCALE,
    Bytes,
    check_float_scales,
    check_power_scales,
    float4_columns,
    float8_rows,
)
from titan_ckpt.errors import StoreError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.store.base import ObjectInfo, Store

KEPT_EXPERTS = 4  # of MXFP4: threads that write the parts of one expert read it once
AT_ONCE = 1 << 20  # elements that are multiplied out together: their float32 values take four times as many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Bytes of a file that hold one tensor of this shape."""

    path: str
    offset: int
    shape: Shape


class PackedReader:
    """Reads packed bytes of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read_again = lru_cache(maxsize=2 * KEPT_EXPERTS)(self.read)  # values and scales

    def read(self, stored: Stored, start: int, shape: Shape) -> Bytes:
        """Bytes of `stored` from its byte `start` on, as an array of `shape`. `read_again` keeps those that were read last."""
        content = np.empty(shape, dtype=np.uint8)
        self._store.read_into(stored.path, stored.offset + start, content.reshape(-1).data)
        return content


class Packed(Protocol):
    """A tensor that is made from packed ones."""

    @property
    def values(self) -> Stored:
        """Where the packed values are."""

    @property
    def shape(self) -> Shape:
        """Shape of the plain tensor."""

    def pieces(self, reader: PackedReader, start: int, stop: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
        """Rows `start` to `stop` of the plain tensor in `dtype`, its leading dimensions flattened, a few at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Blocks:
    """A matrix of block-FP8."""

    name: str
    values: Stored
    scales: Stored
    block: tuple[int, int]

    @property
    def shape(self) -> Shape:
        """Shape of the plain tensor."""
        return self.values.shape

    def pieces(self, reader: PackedReader, start: int, stop: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
        """Rows of the plain tensor, a few at a time."""
        columns, width = self.shape[1], self.scales.shape[1]
        packed = reader.read(self.values, start * columns, (stop - start, columns))
        first, last = start // self.block[0], -(-stop // self.block[0])
        raw = reader.read(self.scales, first * width * 4, (last - first, width * 4))
        scales = check_float_scales(raw.view("<f4"), self.name)
        at_once = max(1, AT_ONCE // max(1, columns))
        for row in range(0, stop - start, at_once):
            first_row = start - first * self.block[0] + row
            part = packed[row : row + at_once]
            yield float8_rows(part, scales, first_row=first_row, block=self.block, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Groups:
    """Matrices of MXFP4, one for each expert: [E, R, G, 16] and [E, R, G], read as [E, 32 G, R].

    Rows of the plain tensor are columns of the stored one, so some of them need all bytes of their expert.
    """

    name: str
    values: Stored
    scales: Stored

    @property
    def shape(self) -> Shape:
        """Shape of the plain tensor."""
        experts, rows, groups = self.scales.shape
        return experts, groups * VALUES_PER_SCALE, rows

    def pieces(self, reader: PackedReader, start: int, stop: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
        """Rows of the plain tensor, experts one after another, whole groups of a few at a time."""
        _, rows, groups = self.scales.shape
        columns, width = groups * VALUES_PER_SCALE, VALUES_PER_SCALE // 2
        at_once = max(1, AT_ONCE // (VALUES_PER_SCALE * max(1, rows)))
        while start < stop:
            expert, row = divmod(start, columns)
            packed = reader.read_again(self.values, expert * rows * groups * width, (rows, groups, width))
            scales = reader.read_again(self.scales, expert * rows * groups, (rows, groups))
            check_power_scales(scales, self.name)
            first = row // VALUES_PER_SCALE
            plain = float4_columns(packed[:, first : first + at_once], scales[:, first : first + at_once])
            piece = plain[row - first * VALUES_PER_SCALE :][: stop - start]
            yield ROUND[dtype](piece)
            start += len(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A packed tensor as bytes `[offset, offset + length)` of the view of a file."""

    packed: Packed
    dtype: str
    offset: int

    @property
    def length(self) -> int:
        """Its bytes."""
        return prod(self.packed.shape) * ELEMENT_SIZE[self.dtype]


class DequantisedStore(DecodedStore):
    """`tensors`: the plain tensors after the end of each file, in order of offset without gaps."""

    def __init__(self, store: Store, tensors: Mapping[str, Sequence[Plain]]) -> None:
        super().__init__(store, {})
        self._tensors, self._reader = tensors, PackedReader(store)
        self._starts = {path: [tensor.offset for tensor in found] for path, found in tensors.items()}

    def stat(self, path: str) -> ObjectInfo:
        """Size and version of the view of a file."""
        entry = self._store.stat(path)
        return replace(entry, size_bytes=entry.size_bytes + sum(t.length for t in self._tensors.get(path, ())))

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the file, or of the plain tensors after it."""
        starts = self._starts.get(path)
        if not starts or start + len(buffer) <= starts[0]:
            self._store.read_into(path, start, buffer)
            return
        if start < starts[0]:
            self._store.read_into(path, start, buffer[: starts[0] - start])
            buffer, start = buffer[starts[0] - start :], starts[0]
        while len(buffer):
            tensor = self._tensors[path][bisect_right(starts, start) - 1]
            count = min(len(buffer), tensor.offset + tensor.length - start)
            if count <= 0:
                raise StoreError(f"{self.where(path)}: {len(buffer)} bytes wanted beyond the last tensor")
            _fill(self._reader, tensor, start - tensor.offset, buffer[:count])
            buffer, start = buffer[count:], start + count


def _fill(reader: PackedReader, tensor: Plain, start: int, buffer: memoryview) -> None:
    """Bytes of a plain tensor from `start` on."""
    row_bytes = tensor.packed.shape[-1] * ELEMENT_SIZE[tensor.dtype]
    first, stop = start // row_bytes, -(-(start + len(buffer)) // row_bytes)
    skipped = start - first * row_bytes
    for piece in tensor.packed.pieces(reader, first, stop, tensor.dtype):
        content = piece.reshape(-1).view(np.uint8).data[skipped:][: len(buffer)]
        buffer[: len(content)] = content
        buffer, skipped = buffer[len(content) :], 0
