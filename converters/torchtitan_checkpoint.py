"""A checkpoint of torchtitan's as one under our names, read where it lies: train on from it without converting it.

No byte is moved to open it. A tensor of ours is one of theirs by rows: all of them in order, or the halves of each head out of
their neighbouring pairs (llama's q and k), or some heads of a fused projection (the moments of `wqkv`, which torchtitan splits
among the weights but not in its optimizer). Every such run of rows becomes a chunk with strides, which `load` reads in place.
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
from titan_ckpt.checkpoint.uncompressed import decoded
from titan_ckpt.converters.models.contract import check_tensors
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
from titan_ckpt.loading.load import read_object, read_tensor
from titan_ckpt.sharding.placement import Box, Shape
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.sharding.repeating_columns import Int64s

log = logging.getLogger(__name__)
_STATE = "optimizer.state."
_COMPARED_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Runs of rows, a column each: `count` rows of ours from `start` on are every `stride`-th of theirs from `source` on."""

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
        """Our heads in order, each at the row of theirs that `heads` names; `from_pairs` takes even rows, then odd ones."""
        if not from_pairs:
            return RowRuns(np.arange(len(heads)) * head_dim, heads, np.full(len(heads), head_dim), 1)
        half = head_dim // 2
        source = (heads[:, None] + np.arange(2)).reshape(-1)
        return RowRuns(np.arange(len(source)) * half, source, np.full(len(source), half), 2)

    def source_of(self, row: int) -> int:
        """Their row that is our `row`."""
        run = int(np.searchsorted(self.start, row, side="right")) - 1
        return int(self.source[run] + (row - self.start[run]) * self.stride)


@dataclass(frozen=True, slots=True)
class Origin:
    """A tensor of ours and what it is made of: an entry of theirs, and its rows."""

    fqn: str
    shape: Shape
    entry: TensorEntry
    rows: RowRuns


@dataclass(frozen=True, kw_only=True)
class TorchtitanCheckpoint(Checkpoint):
    """A checkpoint whose files are torchtitan's; `theirs` is the same under torchtitan's names."""

    theirs: Checkpoint
    origins: Mapping[str, Origin]
    _blobs: dict[tuple[str, int], Chunk] = field(default_factory=dict, repr=False)
    _locks: dict[tuple[str, int], Lock] = field(default_factory=dict, repr=False)

    @cached_property
    def digests(self) -> bytes | None:
        """None: there are as many chunks here as runs of rows."""
        return None

    def digest_of(self, entry: TensorEntry, chunk: Chunk) -> bytes | None:
        """Theirs, where the chunk is the whole of one of theirs as it lies."""
        origin = self.origins[entry.fqn]
        source = self._source(origin, chunk)
        is_whole = source.box.sizes == chunk.box.sizes and chunk.strides is None
        return self.theirs.digest_of(origin.entry, source) if is_whole else None

    def _located(self, chunk: Chunk) -> Chunk:
        """Where in the blob of theirs these rows lie."""
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
        )

    def _source(self, origin: Origin, chunk: Chunk) -> Chunk:
        """Their chunk that the rows of ours are in."""
        row = (origin.rows.source_of(chunk.box.offsets[0]), *chunk.box.offsets[1:]) if origin.shape else ()
        return self.theirs.manifest.chunks_touching(origin.entry, Box(row, (1,) * len(row)))[0]

    def _blob(self, chunk: Chunk) -> Chunk:
        """A chunk of theirs with its payload's place, looked for once."""
        key = (chunk.file, chunk.offset)
        with self._locks.setdefault(key, Lock()):
            if key not in self._blobs:
                self._blobs[key] = self.theirs.locate(chunk, row_major=False)
        return self._blobs[key]


def under_our_names(theirs: Checkpoint, model: Mapping[str, Any]) -> Checkpoint:
    """torchtitan's checkpoint `theirs` of the model that a config's `[model]` describes, ready to be loaded by our trainer.

    Weights, and the step and AdamW's moments where all of them are there (kind `full`); else the weights alone (kind `model`),
    and a warning says what is missing. A checkpoint that has our names already is returned as it is. PlanError for names that are
    nobody's and for a family that torchtitan's rules do not cover, LoadContractError for the weights of another model.
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
    """All weights of the model, no others, in their shapes; a tied head that is stored too must be the embedding."""
    tensors = theirs.manifest.by_fqn
    head, embedding = name_in(layout, HEAD, spec).ours, name_in(layout, EMBEDDING, spec).ours
    known = {named.ours: named.hf for named in names} | {head: HEAD}
    found = {known.get(fqn, fqn): entry.global_shape for fqn, entry in tensors.items() if is_weight(fqn, layout)}
    check_tensors(found, spec, where=str(theirs))
    if spec.tied_embeddings and head in tensors and not _are_equal(theirs, head, embedding):
        raise LoadContractError(
            f"{theirs}: the config ties the head to the embedding, but {head} and {embedding} differ; "
            "set model.tied_embeddings = false"
        )


def _are_equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors of one shape are, compared a band of rows at a time."""
    rows, columns = checkpoint.manifest.by_fqn[a].global_shape
    band = max(1, _COMPARED_ELEMENTS // columns)
    boxes = [Box((row, 0), (min(band, rows - row), columns)) for row in range(0, rows, band)]
    return all(read_tensor(checkpoint, a, box).equal(read_tensor(checkpoint, b, box)) for box in boxes)


def _rows(named: Named, spec: ModelSpec) -> RowRuns | None:
    """How the rows of a weight lie in torchtitan's; None: as in ours."""
    if not named.transform:
        return None
    number = spec.n_heads if ".q_proj." in named.hf else spec.n_kv_heads
    return RowRuns.of_heads(np.arange(number) * spec.head_dim, spec.head_dim, from_pairs=True)


def _fused_rows(named: Named, spec: ModelSpec) -> RowRuns:
    """How the rows of q, k or v lie in `wqkv`: for every key head its query heads, itself, and its value head."""
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
    """AdamW's state of one weight, kept under the weight's own name or with its fused neighbours; LoadContractError for none."""
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
    """`whole` is the shape that theirs must have, where it holds more than ours."""
    entry = theirs.manifest.by_fqn.get(source)
    if entry is None:
        raise LoadContractError(f"{theirs}: no tensor {source}, which {fqn} would be read from")
    if entry.global_shape != (whole or shape):
        raise LoadContractError(f"{theirs}: {source}: expected shape {whole or shape}, found {entry.global_shape}")
    return Origin(fqn, shape, entry, rows or RowRuns.all_of(shape[0] if shape else 1))


def _training(theirs: Checkpoint) -> dict[str, Any]:
    """The training state as our manifests hold it, without a position in the data: torchtitan's loader has another order.

    torchtitan saves the tokens that one data rank has seen, and how many of these there were with the loader's state: without
    that the count is 0.
    """
    step = _number(theirs, "train_state.step")
    if step is None:
        raise LoadContractError(f"{theirs}: no value train_state.step")
    tokens, data_ranks = _number(theirs, "train_state.ntokens_seen"), _number(theirs, "dataloader.world_size")
    return {"step": step, "tokens_seen": (tokens or 0) * (data_ranks or 0)}


def _number(checkpoint: Checkpoint, fqn: str) -> int | None:
    """A whole number, saved as a value or as a tensor; None where there is none of that name."""
    if fqn in checkpoint.manifest.by_fqn:
        return int(read_tensor(checkpoint, fqn))
    return int(read_object(checkpoint, fqn)) if fqn in checkpoint.manifest.objects_by_fqn else None


def _view(theirs: Checkpoint, origins: list[Origin], training: Mapping[str, Any]) -> TorchtitanCheckpoint:
    """The checkpoint whose tensors are `origins`."""
    tensors, columns, num_chunks = [], [], 0
    for origin in sorted(origins, key=lambda origin: origin.fqn):
        of_tensor = _chunks(theirs.manifest, origin)
        columns.append(of_tensor)
        tensors.append(
            TensorEntry(
                fqn=origin.fqn, dtype=origin.entry.dtype, global_shape=origin.shape, placements=None, stages=None,
                first_chunk=num_chunks, num_chunks=len(of_tensor[0]),
            )
        )  # fmt: skip
        num_chunks += len(of_tensor[0])
    row, offsets, sizes = (np.concatenate(column) for column in zip(*columns, strict=True))
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


def _chunks(manifest: Manifest, origin: Origin) -> tuple[Int64s, Int64s, Int64s]:
    """The chunks of a tensor of ours: rows of their chunk table, and flat offsets and sizes of the boxes."""
    offsets, sizes = manifest.boxes(origin.entry)
    if not origin.shape:
        return np.arange(1) + origin.entry.first_chunk, np.empty(0, np.int64), np.empty(0, np.int64)
    rows = origin.rows
    begin = offsets[:, :1] - rows.source
    first, last = (np.clip(-(-at // rows.stride), 0, rows.count) for at in (begin, begin + sizes[:, :1]))
    chunk, run = np.nonzero(first < last)
    offsets, sizes = offsets[chunk], sizes[chunk]
    offsets[:, 0] = rows.start[run] + first[chunk, run]
    sizes[:, 0] = (last - first)[chunk, run]
    return chunk + origin.entry.first_chunk, offsets.reshape(-1), sizes.reshape(-1)
