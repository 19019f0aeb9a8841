"""Byte-range requests of a load: neighbours are read together, straight into their destinations where the store can. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from titan_ckpt.store.base import Store

SMALL_BYTES = 1 << 20
GAP_BYTES = 64 << 10
GROUP_BYTES = 8 << 20


def host_memory(num_bytes: int) -> memoryview:
    """A buffer of any contents."""
    return memoryview(np.empty(num_bytes, dtype=np.uint8))  # type: ignore[arg-type]  # a Buffer from Python 3.12 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One range of one file, which has a part of the tensor `fqn`. `target` is filled in place if given; `done` gets the bytes.

    `source` fills the buffer instead of the store if the file has the bytes encoded. `allocate` makes the buffer.
    """

    fqn: str

    path: str
    start: int
    length: int
    target: memoryview | None
    done: Callable[[memoryview], None]
    source: Callable[[memoryview], None] | None
    allocate: Callable[[int], memoryview] = host_memory


def fetch(store: Store, group: list[Request]) -> None:
    """Read one group with one request: straight into the targets, or several through one scratch buffer."""
    first = group[0]
    if len(group) == 1:
        memory = first.target if first.target is not None else first.allocate(first.length)
        if first.source is not None:
            first.source(memory)
        else:
            store.read_into(first.path, first.start, memory)
        first.done(memory)
        return
    if store.is_scattering and all(read.start + read.length <= after.start for read, after in pairwise(group)):
        _fetch_scattered(store, group)
        return
    scratch = first.allocate(_end(group) - first.start)
    store.read_into(first.path, first.start, scratch)
    for read in group:
        data = scratch[read.start - first.start :][: read.length]
        if read.target is not None:
            read.target[:] = data
        read.done(data)


def _fetch_scattered(store: Store, group: list[Request]) -> None:
    """Read a group without overlaps, each request into its own memory; what lies between them is dropped."""
    at, buffers, filled = group[0].start, list[memoryview](), list[memoryview]()
    for read in group:
        memory = read.target if read.target is not None else read.allocate(read.length)
        buffers += [host_memory(read.start - at)] * (read.start > at) + [memory]
        filled.append(memory)
        at = read.start + read.length
    store.read_scattered(group[0].path, group[0].start, buffers)
    for read, memory in zip(group, filled, strict=True):
        read.done(memory)


def grouped(reads: Iterable[Request], store: Store) -> list[list[Request]]:
    """Group requests of a file that overlap, and neighbours: small ones, or any of a store that scatters; others stay alone."""
    groups: list[list[Request]] = []
    for read in sorted(reads, key=lambda read: (read.path, read.start)):
        if groups and _is_near(groups[-1], read, is_any_size=store.is_scattering):
            groups[-1].append(read)
        else:
            groups.append([read])
    return groups


def _is_near(group: list[Request], read: Request, *, is_any_size: bool) -> bool:
    last, gap = group[-1], read.start - _end(group)
    is_possible = last.source is read.source is None and last.path == read.path and gap <= GAP_BYTES
    is_worth_it = gap < 0 or is_any_size or max(last.length, read.length) <= SMALL_BYTES
    return is_possible and is_worth_it and read.start + read.length - group[0].start <= GROUP_BYTES


def _end(group: list[Request]) -> int:
    return max(read.start + read.length for read in group)
