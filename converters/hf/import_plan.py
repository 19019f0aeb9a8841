"""Plan the import of a Hugging Face model to a checkpoint that any mesh loads: data files and their manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.converters.hf.checkpoint import USER_KEY, import_record
from titan_ckpt.converters.hf.folder import HfModel
from titan_ckpt.converters.models.contract import (
    check_dtypes,
    check_floats,
    check_tensors,
    warn_of_other_dtypes,
)
from titan_ckpt.converters.models.families import EMBEDDING, HEAD, expected_tensors
from titan_ckpt.converters.models.spec import ModelSpec, spec_to_config
from titan_ckpt.converters.models.tensor_names import (
    LAYOUTS,
    MODEL_PREFIX,
    TITAN,
    Layout,
    Stacked,
    name_in,
)
from titan_ckpt.converters.models.transforms import target_dtype, transform
from titan_ckpt.errors import PlanError
from titan_ckpt.format.digest import digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, ChunkTable, FileEntry, Manifest, TensorEntry
from titan_ckpt.format.names import data_file, step_folder
from titan_ckpt.format.torch_blob import align, envelope
from titan_ckpt.rewrite.execute import FileResult
from titan_ckpt.rewrite.plan import Literal, Region, Segment, TargetFile, Transform
from titan_ckpt.rewrite.selection import Overflows
from titan_ckpt.sharding.placement import Box, Shape

MAX_CHUNK_BYTES = 64 << 20
MAX_DATA_FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTensor:
    """A source tensor of `shape`, and the checkpoint tensor that it becomes, or becomes a part of."""

    fqn: str
    source: str
    dtype: str
    shape: Shape
    transform: Transform | None
    stacked: Stacked | None

    @property
    def global_shape(self) -> Shape:
        """The shape of the checkpoint's tensor."""
        return self.stacked.whole if self.stacked else self.shape

    def place(self, box: Box) -> Box:
        """Translate a box of the source tensor to the checkpoint's tensor."""
        if self.stacked is None:
            return box
        at = self.stacked.box.offsets
        offsets = (a + b for a, b in zip(at[1:], box.offsets, strict=True))
        return Box((at[0], *offsets), (1, *box.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChunk:
    """A chunk and its blob's file number and offset in bytes."""

    tensor: ImportTensor
    box: Box
    file: int
    offset: int

    @property
    def key(self) -> str:
        """Key of its digest."""
        return f"{self.tensor.fqn}{list(self.box.offsets)}"


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """Data files in the order of the source's bytes, and the chunks in them. `overflows` is filled by the run."""

    model: HfModel
    spec: ModelSpec
    layout: Layout
    step: int
    attempt: str
    chunks: tuple[PlacedChunk, ...]
    files: tuple[TargetFile, ...]
    overflows: Overflows

    @property
    def left_out(self) -> list[str]:
        """Source tensors that are not imported."""
        return self.model.left_out_tensors

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(c.box.sizes) * ELEMENT_SIZE[c.tensor.dtype] for c in self.chunks)


def plan_import(model: HfModel, *, dtype: str | None, step: int, attempt: str, layout: str = TITAN) -> ImportPlan:
    """Plan the import; makes every check except that of a tied head's values."""
    if layout not in LAYOUTS:
        raise PlanError(f"--layout {layout!r} is unknown; choose from {', '.join(LAYOUTS)}")
    spec = model.spec
    found = {name: tensor.shape for name, tensor in model.weights.items()}
    check_tensors(found, spec, where=str(model.store))
    dtypes = {name: model.tensors[name].dtype for name in found}
    check_floats(dtypes, where=str(model.store))
    warn_of_other_dtypes(dtypes.values(), model.declared_dtype, where=str(model.store))
    overflows = Overflows()
    tensors = list(_tensors(model, spec, LAYOUTS[layout], dtype, overflows))
    check_dtypes(((tensor.fqn, tensor.dtype) for tensor in tensors), where=str(model.store))
    chunks, files = _place(tensors, step, attempt)
    return ImportPlan(
        model=model,
        spec=spec,
        layout=LAYOUTS[layout],
        step=step,
        attempt=attempt,
        chunks=chunks,
        files=files,
        overflows=overflows,
    )


def _tensors(
    model: HfModel, spec: ModelSpec, layout: Layout, dtype: str | None, overflows: Overflows
) -> Iterator[ImportTensor]:
    """The checkpoint's tensors in the order of the source's bytes."""
    expected = expected_tensors(spec)
    for name, stored in model.tensors.items():
        if name not in expected:
            continue
        kept = target_dtype(name, stored.dtype, dtype)
        named = [name_in(layout, name, spec)]
        if name == EMBEDDING and spec.tied_embeddings and layout.stores_tied_head:
            named.append(name_in(layout, HEAD, spec))
        for names in named:
            step = transform(
                names.transform, tensor=names.ours, to_trainer=True, head_dim=spec.head_dim, dtype=stored.dtype,
                target_dtype=kept, overflows=overflows,
            )  # fmt: skip
            yield ImportTensor(
                fqn=names.ours, source=name, dtype=kept, shape=stored.shape, transform=step, stacked=names.stacked
            )


def _place(
    tensors: Sequence[ImportTensor], step: int, attempt: str
) -> tuple[tuple[PlacedChunk, ...], tuple[TargetFile, ...]]:
    chunks: list[PlacedChunk] = []
    files: list[list[Segment]] = [[]]
    at = 0
    for tensor in tensors:
        for box in _row_blocks(tensor):
            placed = tensor.place(box)
            around = envelope(tensor.dtype, placed.sizes)
            if files[-1] and at + around.length > MAX_DATA_FILE_BYTES:
                files.append([])
                at = 0
            chunk = PlacedChunk(tensor=tensor, box=placed, file=len(files) - 1, offset=at)
            end = align(at + around.length)
            padding = bytes(end - at - around.length)
            region = Region(tensor=tensor.source, box=box, transform=tensor.transform, key=chunk.key)
            files[-1] += [Literal(around.prefix), region, Literal(around.suffix + padding)]
            chunks.append(chunk)
            at = end
    targets = [
        TargetFile(path=f"{step_folder(step)}/{data_file(attempt, 0, n)}", segments=tuple(s))
        for n, s in enumerate(files)
    ]
    return tuple(chunks), tuple(targets)


def _row_blocks(tensor: ImportTensor) -> Iterator[Box]:
    """Blocks of rows of at most MAX_CHUNK_BYTES, so that a partial read verifies little more than it needs."""
    if not tensor.shape or 0 in tensor.shape:
        yield Box.whole(tensor.shape)
        return
    row_bytes = prod(tensor.shape[1:]) * ELEMENT_SIZE[tensor.dtype]
    step = max(1, MAX_CHUNK_BYTES // row_bytes)
    for row in range(0, tensor.shape[0], step):
        rest = (0,) * (len(tensor.shape) - 1)
        yield Box((row, *rest), (min(step, tensor.shape[0] - row), *tensor.shape[1:]))


def import_manifest(
    plan: ImportPlan, results: Sequence[FileResult], *, created: str, versions: Mapping[str, str]
) -> Manifest:
    """The manifest of the written files."""
    chunks = sorted(plan.chunks, key=lambda chunk: (chunk.tensor.fqn, chunk.box.offsets))
    frames = [envelope(chunk.tensor.dtype, chunk.box.sizes) for chunk in chunks]
    table = ChunkTable(
        file=_column([chunk.file for chunk in chunks]),
        offset=_column([chunk.offset for chunk in chunks]),
        length=_column([around.length for around in frames]),
        payload_offset=_column([len(around.prefix) for around in frames]),
        payload_length=_column([around.payload_length for around in frames]),
        codec=_column([0] * len(chunks)),
        box_offsets=_column([n for chunk in chunks for n in chunk.box.offsets]),
        box_sizes=_column([n for chunk in chunks for n in chunk.box.sizes]),
        digests=b"".join(results[chunk.file].digests[chunk.key] for chunk in chunks),
    )
    return Manifest(
        step=plan.step,
        attempt=plan.attempt,
        kind=CheckpointKind.MODEL,
        created=created,
        versions=versions,
        mesh=None,
        pipeline=None,
        tensors=_entries(chunks),
        chunks=table,
        codecs=(RAW,),
        objects=(),
        files=tuple(
            FileEntry(path=data_file(plan.attempt, 0, n), size_bytes=result.size_bytes, digest=result.digest)
            for n, result in enumerate(results)
        ),
        config={"model": spec_to_config(plan.spec)},
        assets={name: digest(data).hex() for name, data in plan.model.assets.items()},
        user={USER_KEY: import_record(plan.model)},
    )


def _column(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def _entries(chunks: Sequence[PlacedChunk]) -> tuple[TensorEntry, ...]:
    counts: dict[str, int] = {}
    tensors: dict[str, ImportTensor] = {}
    for chunk in chunks:
        counts[chunk.tensor.fqn] = counts.get(chunk.tensor.fqn, 0) + 1
        tensors[chunk.tensor.fqn] = chunk.tensor
    entries, first = [], 0
    for fqn, tensor in tensors.items():
        entries.append(
            TensorEntry(
                fqn=fqn,
                dtype=tensor.dtype,
                global_shape=tensor.global_shape,
                placements={},
                stages=None,
                first_chunk=first,
                num_chunks=counts[fqn],
            )
        )
        first += counts[fqn]
    return tuple(entries)


def state_paths(plan: ImportPlan) -> dict[str, tuple[str, ...]]:
    """Path of each FQN in a nested state dict: below `model` in our layout, at the top in torchtitan's."""
    if plan.layout.name != TITAN:
        return {}
    return {chunk.tensor.fqn: ("model", chunk.tensor.fqn.removeprefix(MODEL_PREFIX)) for chunk in plan.chunks}
