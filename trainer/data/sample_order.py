"""The order of samples: a pure function of (seed, position), in constant time and memory.

A position counts samples over the whole run and all ranks. The mixture is interleaved in blocks of `BLOCK` positions: in each
block, source k has exactly its share of the slots, shuffled anew. A source's samples are taken epoch after epoch, each epoch in a
new permutation. Permutations are Feistel networks over sample numbers: no tables, and any position costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from titan_ckpt.errors import DataError

BLOCK = 1024
ROUNDS = 6
_MASK = (1 << 64) - 1
_HELD_OUT_KEY = 0x5EED


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Sample `index` of source `source`, in that source's epoch `epoch`."""

    source: int
    index: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """Number of samples of a source, how many are held out, and its weight in the mixture."""

    num_samples: int
    num_held_out: int = 0
    weight: float = 1.0

    @property
    def num_training(self) -> int:
        """Samples of one epoch."""
        return self.num_samples - self.num_held_out


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of a mixture's training samples."""

    sources: tuple[SourceSize, ...]
    seed: int
    shuffle: bool = True
    _ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for number, source in enumerate(self.sources):
            if source.num_training < 1:
                raise DataError(
                    f"data: source {number} has {source.num_samples} samples, of which {source.num_held_out} are held out; "
                    "nothing is left to train on: give it more text, or lower data.seq_len"
                )
        object.__setattr__(self, "_ends", tuple(accumulate(shares([source.weight for source in self.sources]))))

    def at(self, position: int) -> SampleRef:
        """The sample at `position`.

        >>> order = SampleOrder((SourceSize(num_samples=3),), seed=1)
        >>> sorted(order.at(p).index for p in range(3)), order.at(3 * 10**9).epoch
        ([0, 1, 2], 1000000000)
        """
        source, number = self._draw(position)
        size = self.sources[source]
        epoch, step = divmod(number, size.num_training)
        if self.shuffle:
            step = permuted(step, size.num_training, mix(self.seed, source, epoch))
        return SampleRef(source, _kept(size, step), epoch)

    def held_out(self, source: int, number: int) -> SampleRef:
        """Held-out sample `number` of a source; the same for every seed."""
        size = self.sources[source]
        return SampleRef(source, permuted(number, size.num_samples, _HELD_OUT_KEY), 0)

    def _draw(self, position: int) -> tuple[int, int]:
        """The source at `position` and how many samples of it came before."""
        if len(self.sources) == 1:
            return 0, position
        block, slot = divmod(position, BLOCK)
        place = permuted(slot, BLOCK, mix(self.seed, -1, block))
        source = next(k for k, end in enumerate(self._ends) if place < end)
        start = self._ends[source - 1] if source else 0
        return source, block * (self._ends[source] - start) + place - start


def _kept(size: SourceSize, step: int) -> int:
    return permuted(size.num_held_out + step, size.num_samples, _HELD_OUT_KEY) if size.num_held_out else step


def shares(weights: Sequence[float]) -> list[int]:
    """Slots per block for each weight, by the largest remainder method; at least 1.

    >>> shares([1.0]), shares([3.0, 1.0]), shares([1.0, 1e-9])
    ([1024], [768, 256], [1023, 1])
    """
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: max(0, BLOCK - sum(counts))]:
        counts[k] += 1
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return counts


def permuted(number: int, size: int, key: int) -> int:
    """Image of `number` under a pseudo-random permutation of range(size) selected by `key`.

    A Feistel network over the next even number of bits, iterated until the result is in range (cycle walking: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for step in range(ROUNDS):
            left, right = right, left ^ (_hash(right + (step << 32) ^ key) & mask)
        number = (left << half) | right
        if number < size:
            return number


def mix(*numbers: int) -> int:
    """Hash several numbers into one of 64 bits."""
    state = 0
    for number in numbers:
        state = _hash(state ^ (number & _MASK))
    return state


def _hash(number: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
