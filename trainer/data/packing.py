"""Packing: which sequences share a sample, by best fit of the longest first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], size: int) -> list[list[int]]:
    """Bins of sequences with at most `size` tokens together; each sequence goes where it leaves the least room.

    The sequences of a bin, and the bins, are in the order of the data. A length above `size` is the caller's mistake.

    >>> pack(np.array([3, 5, 2, 6]), 8)
    [[0, 1], [2, 3]]
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # bins by the tokens that still fit
    rooms = 0  # bit r is set if a bin has room r
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, place = size, len(bins)
            bins.append([])
        bins[place].append(number)
        with_room[room - length].append(place)
        rooms |= 1 << (room - length)
    return sorted(sorted(members) for members in bins)
