"""Long integer columns that store repeated blocks once.

In a table of 31 million chunks, thousands of tensors of the same shape and placement have equal boxes, sizes and ranks. A
`SharedColumn` has one block per tensor, and equal blocks are one array, so that memory grows with distinct blocks only.
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
    """Concatenated blocks that read like one array; `np.asarray` copies them into one."""

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
            raise ValueError("a SharedColumn cannot become one array without a copy")
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._blocks]).astype(dtype or np.int64, copy=False)

    def min(self, *, initial: int = _LARGEST) -> int:
        """The smallest value or `initial`, whichever is smaller."""
        return min([initial, *(int(block.min()) for block in self._distinct() if len(block))])

    def max(self, *, initial: int = -_LARGEST) -> int:
        """The largest value or `initial`, whichever is larger."""
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
    """`values` in blocks of these lengths, equal blocks stored once."""
    known: dict[bytes, Int64s] = {}
    blocks, start = [], 0
    for length in lengths:
        block = values[start : start + length]
        start += length
        key = block.tobytes()
        blocks.append(known[key] if key in known else known.setdefault(key, block.copy()))
    return SharedColumn(blocks)
