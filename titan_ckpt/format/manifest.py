"""The index of a checkpoint: which bytes of which file hold which box of which tensor. No I/O.

`Manifest` is the content of `manifest.json`; `manifest_json` has the JSON form. The chunk table is a set of numpy columns: a
large checkpoint has a million chunks, and to create that many Python objects would take longer than to read the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.structure import Structure
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box, Placements, Shape
from titan_ckpt.sharding.repeating_columns import Column, Int64s

DIGEST_BYTES = 16
RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor and its rows in the chunk table.

    `placements` is None if unknown (a foreign checkpoint). `stages` are the `pp` coordinates that hold the tensor, None for all.
    """

    fqn: str
    dtype: str
    global_shape: Shape
    placements: Placements | None
    stages: tuple[int, ...] | None
    first_chunk: int
    num_chunks: int

    @property
    def size_bytes(self) -> int:
        """Raw bytes of the whole tensor."""
        return Box.whole(self.global_shape).num_elements * ELEMENT_SIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One stored box of a tensor.

    The blob is `[offset, offset + length)` of the file, in the format that plain DCP reads. `payload_offset` is relative to the
    blob; `payload_length` is as stored, after `codec`. `digest` is xxh3-128 of the raw (decoded) payload; of a located
    foreign chunk the CRC-32 of its record (`format.digest`), None if torch wrote none. All sizes are in bytes. `strides` (in
    elements) are set if a foreign dense tensor is not row-major; `is_conj` and `is_neg` if its values are the conjugates, the
    negatives, of those stored.
    """

    fqn: str
    box: Box
    file: str
    offset: int
    length: int
    payload_offset: int
    payload_length: int
    codec: str
    digest: bytes | None
    strides: Shape | None = None
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """A value that is not a tensor, stored as one blob by `torch.save`. `digest` is xxh3-128 of the blob."""

    fqn: str
    file: str
    offset: int
    length: int
    digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A data file, `path` relative to the step's folder. `digest` is xxh3-128 of the file, None if unknown."""

    path: str
    size_bytes: int
    digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """One row per chunk, tensor by tensor. Boxes are ragged: a tensor of `d` dimensions with `n` chunks has `n * d` values.

    Columns are arrays, or in very long tables `SharedColumn`, which stores repeated blocks once.
    """

    file: Column
    offset: Column
    length: Column
    payload_offset: Column
    payload_length: Column
    codec: Column
    box_offsets: Column
    box_sizes: Column
    digests: bytes | None

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a tool needs to know about a checkpoint, without torch and pickle.

    `structure` is the nesting of the saved state, None in checkpoints of releases that did not record it.
    """

    step: int
    attempt: str
    kind: str
    created: str
    versions: Mapping[str, str]
    mesh: MeshSpec | None
    pipeline: Mapping[str, Any] | None
    tensors: tuple[TensorEntry, ...]
    chunks: ChunkTable
    codecs: tuple[str, ...]
    objects: tuple[ObjectEntry, ...]
    files: tuple[FileEntry, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    assets: Mapping[str, str] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    structure: Structure | None = None

    @cached_property
    def by_fqn(self) -> dict[str, TensorEntry]:
        """Tensors by name."""
        return {tensor.fqn: tensor for tensor in self.tensors}

    @cached_property
    def objects_by_fqn(self) -> dict[str, ObjectEntry]:
        """Non-tensor values by name."""
        return {entry.fqn: entry for entry in self.objects}

    @cached_property
    def _first_coordinate(self) -> Int64s:
        """Offset of each tensor's boxes in the ragged box columns."""
        widths = [tensor.num_chunks * len(tensor.global_shape) for tensor in self.tensors]
        return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)]).astype(np.int64)

    @cached_property
    def _tensor_index(self) -> dict[str, int]:
        return {tensor.fqn: index for index, tensor in enumerate(self.tensors)}

    def boxes(self, tensor: TensorEntry) -> tuple[Int64s, Int64s]:
        """(offsets, sizes) of a tensor's chunks, each `[num_chunks, ndim]`."""
        start = int(self._first_coordinate[self._tensor_index[tensor.fqn]])
        ndim = len(tensor.global_shape)
        stop = start + tensor.num_chunks * ndim
        shape = (tensor.num_chunks, ndim)
        return self.chunks.box_offsets[start:stop].reshape(shape), self.chunks.box_sizes[start:stop].reshape(shape)

    def chunk(self, tensor: TensorEntry, index: int) -> Chunk:
        """The `index`-th chunk of a tensor."""
        offsets, sizes = self.boxes(tensor)
        row, table = tensor.first_chunk + index, self.chunks
        start = row * DIGEST_BYTES
        return Chunk(
            fqn=tensor.fqn,
            box=Box(tuple(offsets[index].tolist()), tuple(sizes[index].tolist())),
            file=self.files[int(table.file[row])].path,
            offset=int(table.offset[row]),
            length=int(table.length[row]),
            payload_offset=int(table.payload_offset[row]),
            payload_length=int(table.payload_length[row]),
            codec=self.codecs[int(table.codec[row])],
            digest=None if table.digests is None else table.digests[start : start + DIGEST_BYTES],
        )

    def chunks_of(self, tensor: TensorEntry) -> Iterator[Chunk]:
        """All chunks of a tensor."""
        return (self.chunk(tensor, index) for index in range(tensor.num_chunks))

    def chunks_touching(self, tensor: TensorEntry, box: Box) -> list[Chunk]:
        """The chunks that overlap `box`."""
        offsets, sizes = self.boxes(tensor)
        starts = np.maximum(offsets, np.array(box.offsets, dtype=np.int64))
        ends = np.minimum(offsets + sizes, np.array(box.offsets, dtype=np.int64) + np.array(box.sizes, dtype=np.int64))
        hits = np.flatnonzero((starts < ends).all(axis=1)) if offsets.shape[1] else np.arange(tensor.num_chunks)
        return [self.chunk(tensor, int(index)) for index in hits]

    @property
    def size_bytes(self) -> int:
        """Raw bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)
