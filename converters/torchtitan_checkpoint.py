"""Read a torchtitan checkpoint in place under our names, to continue training from it without a conversion.

Opening it copies no bytes. Each of our tensors consists of rows of one of theirs: all rows in order, or the halves of each head
taken from their adjacent pairs (llama's q and k), or some heads of a fused projection (the moments of `wqkv`, which torchtitan
splits for weights but not in its optimizer). Every run of rows becomes a chunk with strides, which `load` reads in place.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.uncompressed import decoded
from titan_ckpt.converters.models.contract import check_floats, check_tensors
from titan_ckpt.converters.models.families import EMBEDDING, HEAD, check_spec, expected_tensors
from titan_ckpt.converters.models.spec import ModelSpec, spec_of
from titan_ckpt.converters.models.tensor_names import (
    MODEL_PREFIX,
    TITAN,
    Layout,
    Named,
    find_layout,
    is_weight,
    name_in,
)
from titan_ckpt.errors import LoadContractError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import Chunk, ChunkTable, Manifest, TensorEntry
from titan_ckpt.loading.load import read_tensor
from titan_ckpt.sharding.placement import Box, Shape
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.sharding.repeating_columns import Int64s

log = logging.getLogger(__name__)
_STATE = "optimizer.state."
_COMPARED_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Runs of rows as columns: our `count` rows from `start` on are every `stride`-th of their rows from `source` on."""

    start: Int64s
    source: Int64s
    count: Int64s
    stride: int

    @staticmethod
    def all_of(number: int) -> RowRuns:
        """The same rows in the same order."""
        return RowRuns(np.array([0]), np.array([0]), np.array([number]), 1)

    @staticmethod
    def of_heads(heads: Int64s, head_dim: int, *, from_pairs: bool) -> RowRuns:
        """Our heads in order, each starting at their row in `heads`; `from_pairs` takes even rows, then odd rows."""
        if not from_pairs:
            return RowRuns(np.arange(len(heads)) * head_dim, heads, np.full(len(heads), head_dim), 1)
        half = head_dim // 2
        source = (heads[:, None] + np.arange(2)).reshape(-1)
        return RowRuns(np.arange(len(source)) * half, source, np.full(len(source), half), 2)

    def source_of(self, row: int) -> int:
        """Their row that corresponds to our `row`."""
        run = int(np.searchsorted(self.start, row, side="right")) - 1
        return int(self.source[run] + (row - self.start[run]) * self.stride)


@dataclass(frozen=True, slots=True)
class Origin:
    """One of our tensors, and the entry and rows of theirs that it is read from."""

    fqn: str
    shape: Shape
    entry: TensorEntry
    rows: RowRuns


@dataclass(frozen=True, kw_only=True)
class TorchtitanCheckpoint(Checkpoint):
    """A checkpoint in torchtitan's files; `theirs` is the same checkpoint under torchtitan's names."""

    theirs: Checkpoint
    origins: Mapping[str, Origin]
    _blobs: dict[tuple[str, int], Chunk] = field(default_factory=dict, repr=False)
    _locks: dict[tuple[str, int], Lock] = field(default_factory=dict, repr=False)

    @cached_property
    def digests(self) -> bytes | None:
        """None: chunks here are runs of rows, which have no digests."""
        return None

    def digest_of(self, entry: TensorEntry, chunk: Chunk) -> bytes | None:
        """Their digest, if the chunk is exactly one of theirs."""
        origin = self.origins[entry.fqn]
        source = self._source(origin, chunk)
        is_whole = source.box.sizes == chunk.box.sizes and chunk.strides is None
        return self.theirs.digest_of(origin.entry, self._blob(source)) if is_whole else None

    def _located(self, chunk: Chunk) -> Chunk:
        """Position of these rows in their blob."""
        origin = self.origins[chunk.fqn]
        blob = self._blob(self._source(origin, chunk))
        if not origin.shape:
            return replace(blob, fqn=chunk.fqn)
        strides = blob.strides or row_major(blob.box.sizes)
        row = origin.rows.source_of(chunk.box.offsets[0])
        skipped = (row - blob.box.offsets[0]) * strides[0] * ELEMENT_SIZE[origin.entry.dtype]
        is_dense = blob.strides is None and origin.rows.stride == 1
        return replace(
            chunk,
            payload_offset=blob.payload_offset + skipped,
            payload_length=blob.payload_length - skipped,
            strides=None if is_dense else (strides[0] * origin.rows.stride, *strides[1:]),
            is_conj=blob.is_conj,
            is_neg=blob.is_neg,
        )

    def _source(self, origin: Origin, chunk: Chunk) -> Chunk:
        """Their chunk that contains our rows."""
        row = (origin.rows.source_of(chunk.box.offsets[0]), *chunk.box.offsets[1:]) if origin.shape else ()
        return self.theirs.manifest.chunks_touching(origin.entry, Box(row, (1,) * len(row)))[0]

    def _blob(self, chunk: Chunk) -> Chunk:
        """One of their chunks with its payload located, once."""
        key = (chunk.file, chunk.offset)
        with self._locks.setdefault(key, Lock()):
            if key not in self._blobs:
                self._blobs[key] = self.theirs.locate(chunk, row_major=False)
        return self._blobs[key]


def under_our_names(theirs: Checkpoint, model: Mapping[str, Any]) -> Checkpoint:
    """View torchtitan checkpoint `theirs`, of the model in a config's `[model]`, as one that our trainer loads.

    Kind `full` with weights, step and AdamW's moments if all are present; else kind `model` with the weights alone, and a warning
    that names what is missing. A checkpoint that already has our names is returned unchanged. PlanError for unknown names or a
    family that torchtitan's rules do not cover, LoadContractError for weights of another model.
    """
    layout = find_layout(theirs.manifest.by_fqn, str(theirs))
    if layout.name == TITAN:
        return theirs
    spec = spec_of({"model": model}, str(theirs))
    check_spec(spec)
    shapes = expected_tensors(spec)
    names = {name: name_in(layout, name, spec) for name in shapes}
    _check_weights(theirs, layout, spec, list(names.values()))
    weights = [
        _origin(theirs, MODEL_PREFIX + name, named.ours, shapes[name], _rows(named, spec))
        for name, named in names.items()
    ]
    try:
        moments = [o for name, named in names.items() for o in _moments(theirs, named, shapes[name], spec)]
        training = _training(theirs)
    except LoadContractError as error:
        log.warning("only the weights are taken, and training begins at step 0: %s", error)
        moments, training = [], {}
    return _view(decoded(theirs), [*weights, *moments], training)


def _check_weights(theirs: Checkpoint, layout: Layout, spec: ModelSpec, names: list[Named]) -> None:
    """LoadContractError unless exactly the model's weights exist, in their shapes; a stored tied head must be the embedding."""
    tensors = theirs.manifest.by_fqn
    head, embedding = name_in(layout, HEAD, spec).ours, name_in(layout, EMBEDDING, spec).ours
    known = {named.ours: named.hf for named in names} | {head: HEAD}
    found = {known.get(fqn, fqn): entry.global_shape for fqn, entry in tensors.items() if is_weight(fqn, layout)}
    check_tensors(found, spec, where=str(theirs))
    check_floats({fqn: tensors[fqn].dtype for fqn in tensors if is_weight(fqn, layout)}, where=str(theirs))
    if spec.tied_embeddings and head in tensors and not _are_equal(theirs, head, embedding):
        raise LoadContractError(
            f"{theirs}: the config ties the head to the embedding, but {head} and {embedding} differ; "
            "set model.tied_embeddings = false"
        )


def _are_equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors of one shape are equal; compares a block of rows at a time."""
    rows, columns = checkpoint.manifest.by_fqn[a].global_shape
    step = max(1, _COMPARED_ELEMENTS // columns)
    boxes = [Box((row, 0), (min(step, rows - row), columns)) for row in range(0, rows, step)]
    return all(read_tensor(checkpoint, a, box).equal(read_tensor(checkpoint, b, box)) for box in boxes)


def _rows(named: Named, spec: ModelSpec) -> RowRuns | None:
    """The rows of a weight in torchtitan's tensor; None: all rows in order."""
    if not named.transform:
        return None
    number = spec.n_heads if ".q_proj." in named.hf else spec.n_kv_heads
    return RowRuns.of_heads(np.arange(number) * spec.head_dim, spec.head_dim, from_pairs=True)


def _fused_rows(named: Named, spec: ModelSpec) -> RowRuns:
    """The rows of q, k or v in `wqkv`, which holds for every key head its query heads, the key head and its value head."""
    per_group = spec.n_heads // spec.n_kv_heads
    queries = np.arange(spec.n_heads)
    groups = np.arange(spec.n_kv_heads) * (per_group + 2)
    slots = {
        "q_proj": queries // per_group * (per_group + 2) + queries % per_group,
        "k_proj": groups + per_group,
        "v_proj": groups + per_group + 1,
    }
    heads = slots[named.hf.split(".")[-2]] * spec.head_dim
    return RowRuns.of_heads(heads, spec.head_dim, from_pairs=bool(named.transform))


def _moments(theirs: Checkpoint, named: Named, shape: Shape, spec: ModelSpec) -> Iterator[Origin]:
    """AdamW's state of one weight, stored under the weight's name or fused with its neighbours; LoadContractError if missing."""
    source, whole, rows = named.ours, shape, _rows(named, spec)
    if ".qkv_linear." in source:
        fused = re.sub(r"\.w[qkv]\.", ".wqkv.", source)
        if f"{_STATE}{fused}.exp_avg" in theirs.manifest.by_fqn:
            source, rows = fused, _fused_rows(named, spec)
            whole = ((spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim, *shape[1:])
    ours, source = f"{_STATE}{named.hf}.", f"{_STATE}{source}."
    for name in ("exp_avg", "exp_avg_sq"):
        yield _origin(theirs, ours + name, source + name, shape, rows, whole)
    yield _origin(theirs, ours + "step", source + "step", ())


def _origin(
    theirs: Checkpoint, fqn: str, source: str, shape: Shape, rows: RowRuns | None = None, whole: Shape | None = None
) -> Origin:
    """Match our `fqn` with their `source`, whose shape must be `whole` (default: `shape`)."""
    entry = theirs.manifest.by_fqn.get(source)
    if entry is None:
        raise LoadContractError(f"{theirs}: no tensor {source}, which {fqn} would be read from")
    if entry.global_shape != (whole or shape):
        raise LoadContractError(f"{theirs}: {source}: expected shape {whole or shape}, found {entry.global_shape}")
    return Origin(fqn, shape, entry, rows or RowRuns.all_of(shape[0] if shape else 1))


def _training(theirs: Checkpoint) -> dict[str, Any]:
    """The training state in our manifest's form, without a position in the data: torchtitan's loader has another sample order.

    torchtitan saves the tokens seen by one data rank; the number of data ranks is in the loader's state. Without that the token
    count is 0.
    """
    step = _number(theirs, "train_state.step")
    if step is None:
        raise LoadContractError(f"{theirs}: no value train_state.step")
    tokens, data_ranks = _number(theirs, "train_state.ntokens_seen"), _number(theirs, "dataloader.world_size")
    return {"step": step, "tokens_seen": (tokens or 0) * (data_ranks or 0)}


def _number(checkpoint: Checkpoint, fqn: str) -> int | None:
    """An integer saved as a value or as a tensor; None if the name is missing."""
    if fqn in checkpoint.manifest.by_fqn:
        return int(read_tensor(checkpoint, fqn))
    return int(read_object(checkpoint, fqn)) if fqn in checkpoint.manifest.objects_by_fqn else None


def _view(theirs: Checkpoint, origins: list[Origin], training: Mapping[str, Any]) -> TorchtitanCheckpoint:
    """A checkpoint with the tensors of `origins`."""
    tensors, columns, num_chunks = [], [], 0
    for origin in sorted(origins, key=lambda origin: origin.fqn):
        of_tensor = _chunks(theirs.manifest, origin)
        columns.append(of_tensor)
        tensors.append(
            TensorEntry(
                fqn=origin.fqn, dtype=origin.entry.dtype, global_shape=origin.shape, placements=None, stages=None,
                first_chunk=num_chunks, num_chunks=len(of_tensor.row),
            )
        )  # fmt: skip
        num_chunks += len(of_tensor.row)
    row = np.concatenate([column.row for column in columns])
    offsets = np.concatenate([column.offsets for column in columns])
    sizes = np.concatenate([column.sizes for column in columns])
    stored, unknown = theirs.manifest.chunks, np.full(num_chunks, -1)
    table = ChunkTable(
        file=np.asarray(stored.file)[row], offset=np.asarray(stored.offset)[row], length=np.asarray(stored.length)[row],
        payload_offset=unknown, payload_length=unknown, codec=np.asarray(stored.codec)[row],
        box_offsets=offsets, box_sizes=sizes, digests=None,
    )  # fmt: skip
    manifest = replace(
        theirs.manifest, kind=CheckpointKind.FULL if training else CheckpointKind.MODEL, tensors=tuple(tensors),
        chunks=table, objects=(), training=training,
    )  # fmt: skip
    return TorchtitanCheckpoint(
        store=theirs.store, url=theirs.url, step=theirs.step, folder=theirs.folder, manifest=manifest, theirs=theirs,
        origins={origin.fqn: origin for origin in origins},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ChunkColumns:
    """Chunks of one of our tensors: rows in their chunk table, and the boxes' flat offsets and sizes."""

    row: Int64s
    offsets: Int64s
    sizes: Int64s


def _chunks(manifest: Manifest, origin: Origin) -> _ChunkColumns:
    offsets, sizes = manifest.boxes(origin.entry)
    if not origin.shape:
        return _ChunkColumns(np.arange(1) + origin.entry.first_chunk, np.empty(0, np.int64), np.empty(0, np.int64))
    rows = origin.rows
    begin = offsets[:, :1] - rows.source
    first, last = (np.clip(-(-at // rows.stride), 0, rows.count) for at in (begin, begin + sizes[:, :1]))
    chunk, run = np.nonzero(first < last)
    offsets, sizes = offsets[chunk], sizes[chunk]
    offsets[:, 0] = rows.start[run] + first[chunk, run]
    sizes[:, 0] = (last - first)[chunk, run]
    return _ChunkColumns(chunk + origin.entry.first_chunk, offsets.reshape(-1), sizes.reshape(-1))
