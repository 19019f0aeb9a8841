"""What a rewriting job reads and writes: source tensors in pieces, target files as lists of segments. No torch, no I/O.

Resharding and both directions of conversion are the same job: a `Source` (tensors, each in pieces that are byte ranges of
objects) becomes `TargetFile`s (literal bytes such as headers, and regions of source tensors in row-major order). `schedule.py`
turns them into bounded units of reads and moves, `execute.py` runs those.

    Source(objects=("model-1.safetensors",), tensors={"lm_head.weight": SourceTensor(...)})
    TargetFile(path="a-.../__0_0.distcp", segments=(
        Literal(frame.prefix), Region(tensor="lm_head.weight", box=Box((0, 0), (512, 256))), Literal(frame.suffix)))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.foreign_blob import locate_payload
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, Chunk, Manifest, TensorEntry
from titan_ckpt.sharding.placement import Box, Shape
from titan_ckpt.sharding.repeating_columns import Column, Int64s

Buffer: TypeAlias = bytes | bytearray | memoryview
LOCATE_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a source tensor that lies row-major in `[start, start + length)` of an object, after `codec`.

    `digest` is xxh3-128 of the decoded payload, None where the writer recorded none (nothing to check then).
    """

    object: int
    start: int
    length: int
    box: Box
    codec: str
    digest: bytes | None


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor and its pieces as columns: boxes `[num_pieces, ndim]`, payload ranges `[num_pieces]`, digests of 16 bytes each.

    `codec` holds indices into `codecs`; `single` builds the common case of a tensor that is one raw piece.
    """

    dtype: str
    global_shape: Shape
    box_offsets: Int64s
    box_sizes: Int64s
    object: Int64s
    start: Int64s
    length: Int64s
    codec: Int64s
    codecs: tuple[str, ...] = (RAW,)
    digests: bytes | memoryview | None = None

    @staticmethod
    def single(
        dtype: str, global_shape: Shape, *, object_index: int, start: int, digest: bytes | None = None
    ) -> SourceTensor:
        """A tensor stored whole and raw, as safetensors files store it."""
        whole = Box.whole(global_shape)
        return SourceTensor(
            dtype=dtype,
            global_shape=global_shape,
            box_offsets=np.array([whole.offsets], dtype=np.int64),
            box_sizes=np.array([whole.sizes], dtype=np.int64),
            object=np.array([object_index], dtype=np.int64),
            start=np.array([start], dtype=np.int64),
            length=np.array([whole.num_elements * ELEMENT_SIZE[dtype]], dtype=np.int64),
            codec=np.zeros(1, dtype=np.int64),
            digests=digest,
        )

    @property
    def num_pieces(self) -> int:
        """Pieces in all."""
        return len(self.object)

    @property
    def size_bytes(self) -> int:
        """Raw bytes of all of it."""
        return Box.whole(self.global_shape).num_elements * self.element_size

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return ELEMENT_SIZE[self.dtype]

    def piece(self, index: int) -> Piece:
        """The `index`-th piece."""
        at = index * DIGEST_BYTES
        digest = None if self.digests is None else bytes(self.digests[at : at + DIGEST_BYTES])
        return Piece(
            object=int(self.object[index]),
            start=int(self.start[index]),
            length=int(self.length[index]),
            box=Box(tuple(self.box_offsets[index].tolist()), tuple(self.box_sizes[index].tolist())),
            codec=self.codecs[int(self.codec[index])],
            digest=digest,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Objects (paths in the source store) and the tensors whose pieces lie in them."""

    objects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]

    @cached_property
    def position(self) -> dict[str, int]:
        """Place of each tensor in the source's own order."""
        return {name: index for index, name in enumerate(self.tensors)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Arithmetic on the way: `apply(raw, box)` gets the little-endian row-major bytes of `box` of the source tensor and returns
    those of the same box in `dtype`.

    It sees a strip of rows at a time. Strips begin and end at multiples of `row_multiple` rows of dimension 0 (or at the
    tensor's end), so a permutation inside heads of 64 rows says `row_multiple=64`; the executor crops what a shard does not hold.
    """

    dtype: str
    apply: Callable[[memoryview, Box], Buffer]
    row_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Segment: a box of a source tensor, row-major, through `transform` if there is one.

    `key` names the digest of the segment's bytes in the result (`FileResult.digests`); None for no digest.
    """

    tensor: str
    box: Box
    transform: Transform | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Literal:
    """Segment: these bytes."""

    data: bytes


Segment: TypeAlias = Literal | Region


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file to write: its path in the target store and its segments from first byte to last."""

    path: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Target files that are written at the same time, so that a source byte they share is read once.

    The regions of every file must come in one common order of tensors (`Source.position`); a wave of one file is free.
    """

    files: tuple[TargetFile, ...]


def source_of(checkpoint: Checkpoint, fqns: Collection[str] | None = None) -> Source:
    """The source that a checkpoint is: its data files, and its tensors (those of `fqns`) with the digests that were recorded.

    A checkpoint of others does not say where in a blob the bytes are: then every blob of these tensors is looked into.
    """
    manifest, digests = checkpoint.manifest, checkpoint.digests
    wanted = [entry for entry in manifest.tensors if fqns is None or entry.fqn in fqns]
    payloads = _payloads(checkpoint, wanted)
    return Source(
        objects=tuple(checkpoint.path(file.path) for file in manifest.files),
        tensors={entry.fqn: _source_tensor(manifest, entry, digests, payloads) for entry in wanted},
    )


def _payloads(checkpoint: Checkpoint, wanted: list[TensorEntry]) -> tuple[Column, Column]:
    """Start in its blob and length of every chunk's payload; those of tensors that are not wanted may be unknown."""
    table = checkpoint.manifest.chunks
    if not len(table) or int(table.payload_offset.min()) >= 0:
        return table.payload_offset, table.payload_length
    starts, lengths = np.array(table.payload_offset), np.array(table.payload_length)
    unknown = [(e, i) for e in wanted for i in range(e.num_chunks) if starts[e.first_chunk + i] < 0]

    def locate(place: tuple[TensorEntry, int]) -> Chunk:
        chunk = checkpoint.manifest.chunk(*place)
        return locate_payload(checkpoint.store, checkpoint.path(chunk.file), chunk)

    with ThreadPoolExecutor(LOCATE_THREADS) as pool:
        for (entry, index), chunk in zip(unknown, pool.map(locate, unknown), strict=True):
            if chunk.strides is not None:
                raise PlanError(
                    f"{entry.fqn}: stored with strides {chunk.strides}, not row-major, which cannot be streamed; save it again "
                    f"after `.contiguous()`"
                )
            starts[entry.first_chunk + index], lengths[entry.first_chunk + index] = (
                chunk.payload_offset,
                chunk.payload_length,
            )
    return starts, lengths


def _source_tensor(
    manifest: Manifest, entry: TensorEntry, digests: bytes | None, payloads: tuple[Column, Column]
) -> SourceTensor:
    table = manifest.chunks
    rows = slice(entry.first_chunk, entry.first_chunk + entry.num_chunks)
    offsets, sizes = manifest.boxes(entry)
    return SourceTensor(
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        box_offsets=offsets,
        box_sizes=sizes,
        object=table.file[rows],
        start=table.offset[rows] + payloads[0][rows],
        length=payloads[1][rows],
        codec=table.codec[rows],
        codecs=manifest.codecs,
        digests=None if digests is None else memoryview(digests)[rows.start * DIGEST_BYTES : rows.stop * DIGEST_BYTES],
    )
