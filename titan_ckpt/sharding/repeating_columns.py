"""Long integer columns in which whole stretches repeat, each stretch held once. No torch, no I/O.

A table of 31 million chunks says the same boxes, sizes and ranks for thousands of tensors of one shape and cut. A `SharedColumn`
column has one block per tensor and equal blocks are one array, so that memory follows what differs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
_LARGEST = 2**63 - 1


class SharedColumn:
    """Blocks one after another, read as one array; `np.asarray` makes it one."""

    __slots__ = ("_blocks", "_starts")

    def __init__(self, blocks: Sequence[Int64s]) -> None:
        self._blocks = tuple(blocks)
        self._starts = [0, *accumulate(map(len, self._blocks))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, at: slice) -> Int64s: ...
    @overload
    def __getitem__(self, at: SupportsIndex) -> np.int64: ...
    def __getitem__(self, at: slice | SupportsIndex) -> Int64s | np.int64:
        if isinstance(at, slice):
            return self._range(*at.indices(len(self)))
        index = at.__index__()
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)}")
        block, offset = self._find(index % len(self))
        value: np.int64 = self._blocks[block][offset]
        return value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a column in blocks becomes one array only by a copy")
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._blocks]).astype(dtype or np.int64, copy=False)

    def min(self, *, initial: int = _LARGEST) -> int:
        """The smallest value; `initial` where there is none smaller."""
        return min([initial, *(int(block.min()) for block in self._distinct() if len(block))])

    def max(self, *, initial: int = -_LARGEST) -> int:
        """The largest value; `initial` where there is none larger."""
        return max([initial, *(int(block.max()) for block in self._distinct() if len(block))])

    def _distinct(self) -> Iterable[Int64s]:
        return {id(block): block for block in self._blocks}.values()

    def _find(self, index: int) -> tuple[int, int]:
        block = bisect_right(self._starts, index) - 1
        return block, index - self._starts[block]

    def _range(self, start: int, stop: int, step: int) -> Int64s:
        if stop <= start:
            return np.zeros(0, dtype=np.int64)
        first, offset = self._find(start)
        last, _ = self._find(stop - 1)
        inside = self._blocks[first] if first == last else np.concatenate(self._blocks[first : last + 1])
        return inside[offset : offset + stop - start : step]


Column: TypeAlias = Int64s | SharedColumn


def shared_column(values: Int64s, lengths: Iterable[int]) -> SharedColumn:
    """The same values in blocks of these lengths, equal ones held once."""
    known: dict[bytes, Int64s] = {}
    blocks, start = [], 0
    for length in lengths:
        block = values[start : start + length]
        start += length
        key = block.tobytes()
        blocks.append(known[key] if key in known else known.setdefault(key, block.copy()))
    return SharedColumn(blocks)
