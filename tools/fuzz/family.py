"""What one family of inputs is: its seeds, how they are mutated, what reads them, and what that may raise, take and hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_ckpt.errors import TitanError
from tools.fuzz.mutate import Mutation

LONGEST_S, LONGEST_S_PER_MB = 0.25, 5.0
MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`bound`: bytes of memory that an input of n bytes may take by what the reader states; MOST_BYTES are granted beside.
    `size`: the bytes that the reader gets of an input."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Mutation
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (TitanError,)
    bound: Callable[[int], int] = lambda size: 64 * size
    size: Callable[[bytes], int] = len


def longest_s(size: int) -> float:
    """CPU seconds that reading `size` bytes may take."""
    return max(LONGEST_S, LONGEST_S_PER_MB * size / 1e6)
