"""The input and output of a rewrite: source tensors in chunks, target files as lists of segments. No torch, no I/O.

Resharding and both directions of conversion are one job: a `RewriteSource` (tensors, whose chunks are byte ranges of objects)
becomes `TargetFile`s (literal bytes such as headers, and regions of source tensors in row-major order). `schedule.py` turns them
into units of bounded size, `execute.py` runs those.

    RewriteSource(objects=("model-1.safetensors",), tensors={"lm_head.weight": SourceTensor(...)})
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
from titan_ckpt.format.digest import CRC_BYTES
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, Chunk, Manifest, TensorEntry
from titan_ckpt.sharding.placement import Box, Shape
from titan_ckpt.sharding.repeating_columns import Column, Int64s
from titan_ckpt.store.base import Buffer as Buffer

LOCATE_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChunk:
    """A box of a source tensor, stored row-major in bytes `[start, start + length)` of an object, encoded by `codec`.

    `digest` is xxh3-128 of the decoded payload, in foreign checkpoints its CRC-32 (`format.digest`), None if none is recorded.
    """

    object: int
    start: int
    length: int
    box: Box
    codec: str
    digest: bytes | None


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor and its chunks as columns: boxes `[num_chunks, ndim]`, payload ranges `[num_chunks]`, digests of equal length.

    `codec` holds indices into `codecs`. Digests are 16 bytes each, or CRC-32s of 4 bytes, of which 0 stands for none.
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
        """A tensor stored as one raw chunk, as in safetensors files."""
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
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.object)

    @property
    def size_bytes(self) -> int:
        """Decoded bytes of the whole tensor."""
        return Box.whole(self.global_shape).num_elements * self.element_size

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return ELEMENT_SIZE[self.dtype]

    def chunk(self, index: int) -> SourceChunk:
        """The `index`-th chunk."""
        length = len(self.digests or ()) // self.num_chunks
        digest = None if self.digests is None else bytes(self.digests[index * length : (index + 1) * length])
        return SourceChunk(
            object=int(self.object[index]),
            start=int(self.start[index]),
            length=int(self.length[index]),
            box=Box(tuple(self.box_offsets[index].tolist()), tuple(self.box_sizes[index].tolist())),
            codec=self.codecs[int(self.codec[index])],
            digest=None if length == CRC_BYTES and not any(digest or b"") else digest,
        )


@dataclass(frozen=True, kw_only=True)
class RewriteSource:
    """Objects (paths in the source store) and the tensors stored in them."""

    objects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each tensor in the source's order."""
        return {name: index for index, name in enumerate(self.tensors)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Arithmetic on a tensor in transit: `apply(raw, box)` takes the little-endian row-major bytes of `box` of the source tensor
    and returns the bytes of the same box in `dtype`.

    It gets a strip of rows at a time. Strips begin and end at multiples of `row_multiple` rows of dimension 0 (or at the tensor's
    end): a permutation inside heads of 64 rows sets `row_multiple=64`. The executor crops rows that the target does not hold.
    """

    dtype: str
    apply: Callable[[memoryview, Box], Buffer]
    row_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Segment: a box of a source tensor, row-major, passed through `transform` if given.

    `key` names the digest of the segment's bytes in `FileResult.digests`; None: no digest.
    """

    tensor: str
    box: Box
    transform: Transform | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Literal:
    """Segment: literal bytes."""

    data: bytes


Segment: TypeAlias = Literal | Region


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file to write: its path in the target store and its segments in file order."""

    path: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Target files written at the same time, so that a source byte they share is read once.

    Every file must list its regions in the source's order of tensors (`RewriteSource.position`), unless it is alone.
    """

    files: tuple[TargetFile, ...]


def source_of(checkpoint: Checkpoint, fqns: Collection[str] | None = None) -> RewriteSource:
    """A checkpoint as a source: its data files and its tensors (those in `fqns`), with their recorded digests.

    A foreign checkpoint does not record where in a blob the payload is; then every blob of these tensors is inspected.
    """
    checkpoint.prove_coverage()
    manifest = checkpoint.manifest
    wanted = [entry for entry in manifest.tensors if fqns is None or entry.fqn in fqns]
    payloads = _payloads(checkpoint, wanted)
    return RewriteSource(
        objects=tuple(checkpoint.path(file.path) for file in manifest.files),
        tensors={entry.fqn: _source_tensor(manifest, entry, payloads) for entry in wanted},
    )


@dataclass(frozen=True, slots=True)
class _Payloads:
    """Every chunk payload's start in its blob, its length and its digest; may be unknown for unwanted tensors."""

    starts: Column
    lengths: Column
    digests: bytes | None
    digest_bytes: int


def _payloads(checkpoint: Checkpoint, wanted: list[TensorEntry]) -> _Payloads:
    table = checkpoint.manifest.chunks
    if not len(table) or int(table.payload_offset.min()) >= 0:
        return _Payloads(table.payload_offset, table.payload_length, checkpoint.digests, DIGEST_BYTES)
    starts, lengths = np.array(table.payload_offset), np.array(table.payload_length)
    crcs = np.zeros((len(table), CRC_BYTES), dtype=np.uint8)
    unknown = [(e, i) for e in wanted for i in range(e.num_chunks) if starts[e.first_chunk + i] < 0]

    def locate(place: tuple[TensorEntry, int]) -> Chunk:
        return checkpoint.locate(checkpoint.manifest.chunk(*place), row_major=False)

    with ThreadPoolExecutor(LOCATE_THREADS) as pool:
        for (entry, index), chunk in zip(unknown, pool.map(locate, unknown), strict=True):
            if chunk.strides is not None:
                raise PlanError(
                    f"{entry.fqn}: stored with strides {chunk.strides}, not row-major, which cannot be streamed; save it again "
                    f"after `.contiguous()`"
                )
            if chunk.is_conj or chunk.is_neg:
                raise PlanError(
                    f"{entry.fqn}: stored as a view, to be computed when it is read, which cannot be streamed; save it again "
                    f"after `.resolve_conj().resolve_neg()`"
                )
            row = entry.first_chunk + index
            starts[row], lengths[row] = chunk.payload_offset, chunk.payload_length
            if chunk.digest is not None:
                crcs[row] = np.frombuffer(chunk.digest, dtype=np.uint8)
    return _Payloads(starts, lengths, crcs.tobytes(), CRC_BYTES)


def _source_tensor(manifest: Manifest, entry: TensorEntry, payloads: _Payloads) -> SourceTensor:
    table, digests, each = manifest.chunks, payloads.digests, payloads.digest_bytes
    rows = slice(entry.first_chunk, entry.first_chunk + entry.num_chunks)
    offsets, sizes = manifest.boxes(entry)
    return SourceTensor(
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        box_offsets=offsets,
        box_sizes=sizes,
        object=table.file[rows],
        start=table.offset[rows] + payloads.starts[rows],
        length=payloads.lengths[rows],
        codec=table.codec[rows],
        codecs=manifest.codecs,
        digests=None if digests is None else memoryview(digests)[rows.start * each : rows.stop * each],
    )
