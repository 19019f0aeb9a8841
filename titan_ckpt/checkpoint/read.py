"""Read a range of one chunk, or a box of one tensor, without torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from titan_ckpt.errors import DamagedError, NotFoundError, UsageError
from titan_ckpt.format.codec import PLANES_ZSTD, EncodedPayload, read_raw
from titan_ckpt.format.digest import matches
from titan_ckpt.format.dtypes import ELEMENT_SIZE, Array, shown, storage_dtype
from titan_ckpt.format.manifest import RAW, Chunk, TensorEntry
from titan_ckpt.sharding.placement import Box, strides

if TYPE_CHECKING:
    from titan_ckpt.checkpoint.checkpoint import Checkpoint

THREADS = 8


def read_payload(checkpoint: Checkpoint, chunk: Chunk, itemsize: int, first: int, out: memoryview) -> None:
    """Fill `out` with the raw (decoded) bytes of a chunk, starting at byte `first`."""
    path, start = checkpoint.path(chunk.file), chunk.offset + chunk.payload_offset
    if chunk.codec == RAW:
        checkpoint.store.read_into(path, start + first, out)
    elif chunk.codec == PLANES_ZSTD:
        payload = EncodedPayload(
            path=path,
            start=start,
            length=chunk.payload_length,
            raw_length=chunk.box.num_elements * itemsize,
            itemsize=itemsize,
        )
        read_raw(checkpoint.store, payload, first, out)
    else:
        raise DamagedError(f"{checkpoint}: {chunk.fqn} is stored by the codec {chunk.codec!r}, unknown to this release")


def read_box(checkpoint: Checkpoint, tensor: TensorEntry, box: Box, *, verify: bool = False) -> Array:
    """The stored elements of `box`, in the numpy dtype that can hold them (see `format.dtypes.storage_dtype`).

    Reads only the rows it needs; with `verify`, reads whole chunks and checks their digests. DamagedError if a digest differs,
    or if the chunks do not cover their tensors.
    """
    checkpoint.prove_coverage()
    out = np.empty(box.sizes, dtype=storage_dtype(tensor.dtype))
    parts = [
        (chunk, part)
        for chunk in (checkpoint.manifest.chunks_touching(tensor, box) if box.num_elements else ())
        if (part := chunk.box.intersect(box) if box.sizes else box) is not None
    ]

    def fill(chunk: Chunk, part: Box) -> None:
        located = checkpoint.locate(chunk, row_major=False)
        inner = part.relative_to(located.box)
        out[_slices(part.relative_to(box))] = _read_part(checkpoint, located, tensor, inner, verify=verify)

    with ThreadPoolExecutor(min(THREADS, max(len(parts), 1)), thread_name_prefix="titan-ckpt-read") as pool:
        for _ in pool.map(fill, *zip(*parts, strict=True)) if parts else ():
            pass
    return out


def read_whole(checkpoint: Checkpoint, fqn: str, box: Box | None) -> tuple[str, Array]:
    """The dtype and the verified stored elements of a tensor, or of `box` of it. NotFoundError for an unknown name."""
    entry = checkpoint.manifest.by_fqn.get(fqn)
    if entry is None:
        raise NotFoundError(f"{checkpoint}: no tensor {fqn!r}; `titan-ckpt inspect` lists them")
    if box is not None:
        _check_box(box, entry)
    return entry.dtype, read_box(checkpoint, entry, box or Box.whole(entry.global_shape), verify=True)


def _check_box(box: Box, entry: TensorEntry) -> None:
    """UsageError unless `box` lies inside the tensor."""
    shape = entry.global_shape
    numbers = (*box.offsets, *box.sizes)
    is_whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    has_rank = len(box.offsets) == len(box.sizes) == len(shape)
    if not (is_whole and has_rank and all(o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True))):
        raise UsageError(
            f"{entry.fqn}: {box} is no box of this tensor; give offsets and sizes as whole numbers, inside its shape {shape}"
        )


def _read_part(checkpoint: Checkpoint, chunk: Chunk, tensor: TensorEntry, inner: Box, *, verify: bool) -> Array:
    """The elements `inner` of a chunk, from the shortest byte range that contains them (with `verify`, the whole chunk)."""
    itemsize = ELEMENT_SIZE[tensor.dtype]
    steps = chunk.strides or strides(chunk.box.sizes)
    needed = Box.whole(chunk.box.sizes) if verify else inner
    first = sum(offset * step for offset, step in zip(needed.offsets, steps, strict=True))
    last = first + sum((size - 1) * step for size, step in zip(needed.sizes, steps, strict=True))
    buffer = bytearray((last - first + 1) * itemsize)
    read_payload(checkpoint, chunk, itemsize, first * itemsize, memoryview(buffer))
    if verify:
        _check_digest(checkpoint, chunk, tensor, buffer)
    run = np.frombuffer(buffer, dtype=storage_dtype(tensor.dtype))
    held = np.lib.stride_tricks.as_strided(run, needed.sizes, [step * itemsize for step in steps], writeable=False)
    part = held[_slices(inner)] if verify else held
    return (
        shown(part, tensor.dtype, is_conj=chunk.is_conj, is_neg=chunk.is_neg) if chunk.is_conj or chunk.is_neg else part
    )


def _check_digest(checkpoint: Checkpoint, chunk: Chunk, tensor: TensorEntry, data: bytearray) -> None:
    expected = checkpoint.digest_of(tensor, chunk)
    if expected is None or matches(data, expected):
        return
    start = chunk.offset + chunk.payload_offset
    raise DamagedError(
        f"{checkpoint.store.where(checkpoint.path(chunk.file))}: {tensor.fqn}: bytes {start} to {start + len(data)} are not what "
        f"was saved (digest differs); `titan-ckpt verify --data` lists all damage"
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
