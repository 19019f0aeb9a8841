"""Plan the export of a checkpoint, of any mesh and store, to a complete Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from titan_ckpt.arguments import check_whole
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.converters.hf.assets import (
    CONFIG,
    README,
    Carried,
    carry,
    clean_settings,
    complete,
    is_carried,
    model_card,
    source_name,
    why_left_out,
)
from titan_ckpt.converters.hf.checkpoint import STORED_COPIES, USER_KEY, HfCheckpoint
from titan_ckpt.converters.hf.config import Config, encode_config, hf_config, parse_config, spec_from_hf
from titan_ckpt.converters.hf.digests import DIGESTS
from titan_ckpt.converters.hf.folder import INDEX, SINGLE, SUFFIX, encode_index
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.contract import check_floats, check_tensors, main_dtype
from titan_ckpt.converters.models.families import HEAD, copies, expected_tensors
from titan_ckpt.converters.models.spec import ModelSpec, spec_of
from titan_ckpt.converters.models.tensor_names import (
    Layout,
    Named,
    RowOrder,
    find_layout,
    is_ahead,
    is_computed,
    is_weight,
    name_in,
)
from titan_ckpt.converters.models.transforms import target_dtype, transform
from titan_ckpt.errors import LoadContractError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import Manifest, TensorEntry
from titan_ckpt.rewrite.plan import Literal, Region, RewriteSource, Segment, TargetFile, source_of
from titan_ckpt.rewrite.selection import Overflows
from titan_ckpt.sharding.placement import Box, Shape

if TYPE_CHECKING:
    from titan_ckpt.converters.hf.peft_adapter import Adapter  # needs torch, which a plan does not

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTensor:
    """One tensor of the export: its source entry, names and dtype."""

    named: Named
    entry: TensorEntry
    dtype: str

    @property
    def box(self) -> Box:
        """Its box in the checkpoint's tensor."""
        return self.named.stacked.box if self.named.stacked else Box.whole(self.entry.global_shape)

    @property
    def shape(self) -> Shape:
        """Its shape in the exported file."""
        return self.named.stacked.shape if self.named.stacked else self.entry.global_shape

    @property
    def size_bytes(self) -> int:
        """Bytes in the exported file."""
        return prod(self.shape) * ELEMENT_SIZE[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """`weights`: files to stream. `small`: the other files by name. `last`: the files that complete the model, written last.

    `left_out`: buffers of the checkpoint that readers compute, and modules that predict further tokens. `not_carried`: its files,
    and settings in them, that are not exported, with the reason. `overflows` is filled by the run.
    """

    spec: ModelSpec
    layout: Layout
    tensors: tuple[ExportTensor, ...]
    weights: tuple[TargetFile, ...]
    small: Mapping[str, bytes]
    last: Mapping[str, bytes]
    tied_head: str | None
    adapter: Adapter | None
    left_out: list[str]
    not_carried: Mapping[str, str]
    overflows: Overflows

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files that are written."""
        return tuple(sorted([*(file.path for file in self.weights), *self.small, *self.last, DIGESTS]))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def plan_export(
    checkpoint: Checkpoint,
    *,
    dtype: str | None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    config: Config | None = None,
    adapter: Adapter | None = None,
) -> ExportPlan:
    """Plan the export. `config` is a config.json for checkpoints without a model config; `adapter` is merged into the weights."""
    check_whole(max_shard_bytes, "max_shard_bytes", at_least=1)
    manifest = checkpoint.manifest
    carried = _assets(checkpoint)
    base, removed = _base_config(checkpoint, config, carried)
    spec = _spec(checkpoint, base, is_given=config is not None)
    layout = find_layout(manifest.by_fqn, str(checkpoint))
    found = _find_tensors(checkpoint, layout, spec)
    names = [*expected_tensors(spec), *_stored_copies(checkpoint, spec)]
    original = copies(spec)
    tensors = tuple(_export_tensor(found[original.get(name, name)], name, manifest, dtype) for name in names)
    if adapter is not None:
        adapter.check({tensor.named.hf: tensor.shape for tensor in tensors if tensor.named.stacked is None})
    shards, overflows = _shards(tensors, max_shard_bytes), Overflows()
    dtype_now = main_dtype((tensor.dtype, tensor.size_bytes) for tensor in tensors)
    is_as_imported = dtype is None and config is None and manifest.user.get(USER_KEY, {}).get("dtype") == dtype_now
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    new_config = hf_config(_stated(spec, base, manifest), base=base, dtype=None if is_as_imported else dtype_now)
    last = {CONFIG: encode_config(new_config)}
    if len(shards) > 1:
        weight_map = {t.named.hf: file for file, shard in shards.items() for t in shard}
        last = {INDEX: encode_index(weight_map, size_bytes, parameters)} | last
    return ExportPlan(
        spec=spec,
        layout=layout,
        tensors=tensors,
        weights=tuple(_target_file(file, shard, spec, adapter, overflows) for file, shard in shards.items()),
        small=_small_files(checkpoint, carried.files, spec, tensors),
        last=last,
        tied_head=found[HEAD].ours if spec.tied_embeddings and HEAD in found else None,
        adapter=adapter,
        left_out=sorted(fqn for fqn in manifest.by_fqn if is_computed(fqn) or (spec.ahead is None and is_ahead(fqn))),
        not_carried=dict(carried.left_out) | {f"{CONFIG}: {key}": why for key, why in removed.items()},
        overflows=overflows,
    )


def _spec(checkpoint: Checkpoint, base: Config | None, *, is_given: bool) -> ModelSpec:
    """The model's spec, without modules that predict further tokens if the checkpoint lacks them."""
    if base is not None and (is_given or "model" not in checkpoint.manifest.config):
        spec = spec_from_hf(base, "--config" if is_given else f"{checkpoint} {CONFIG}")
    else:
        spec = spec_of(checkpoint.manifest.config, str(checkpoint))
    return spec if any(map(is_ahead, checkpoint.manifest.by_fqn)) else replace(spec, ahead=None)


def _stated(spec: ModelSpec, base: Config | None, manifest: Manifest) -> ModelSpec:
    """`spec` with the modules that an imported config.json names though its files lack them: it stays as it was."""
    if base is None or spec.ahead is not None or USER_KEY not in manifest.user:
        return spec
    return replace(spec, ahead=spec_from_hf(base, CONFIG).ahead)


def _base_config(
    checkpoint: Checkpoint, given: Config | None, carried: Carried
) -> tuple[Config | None, dict[str, str]]:
    """The config.json to start from, `given` or the checkpoint's, and what was removed from a given one."""
    if given is not None:
        return clean_settings(given)
    if CONFIG not in carried.files:
        return None, {}
    return parse_config(carried.files[CONFIG], f"{checkpoint} {CONFIG}"), {}


def _stored_copies(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """Copies to write: those of the files that were imported; else those of modules that predict, which readers want."""
    imported = checkpoint.manifest.user.get(USER_KEY, {})
    with_head = imported.get("stored_tied_head", False)
    return [
        name for name in copies(spec) if (with_head if name == HEAD else name in imported.get(STORED_COPIES, (name,)))
    ]


def _find_tensors(checkpoint: Checkpoint, layout: Layout, spec: ModelSpec) -> dict[str, Named]:
    """Map Hugging Face's names to the checkpoint's; check that exactly these are present, in their shapes."""
    tensors = checkpoint.manifest.by_fqn
    wanted = [name_in(layout, name, spec) for name in expected_tensors(spec)]
    wanted += [name_in(layout, HEAD, spec)] if spec.tied_embeddings else []
    found = {named.hf: named for named in wanted if named.ours in tensors}
    shapes = {name: _shape(named, tensors[named.ours], str(checkpoint)) for name, named in found.items()}
    known = {named.ours for named in wanted}
    extra = {fqn: tensors[fqn].global_shape for fqn in tensors if is_weight(fqn, layout) and fqn not in known}
    check_tensors(shapes | extra, spec, where=str(checkpoint))
    check_floats({named.ours: tensors[named.ours].dtype for named in found.values()}, where=str(checkpoint))
    return found


def _shape(named: Named, entry: TensorEntry, where: str) -> Shape:
    """The tensor's shape in Hugging Face's files."""
    if named.stacked is None:
        return entry.global_shape
    if entry.global_shape != named.stacked.whole:
        raise LoadContractError(
            f"{where}: {entry.fqn} has shape {entry.global_shape}, the config wants all experts in {named.stacked.whole}"
        )
    return named.stacked.shape


def _export_tensor(stored: Named, name: str, manifest: Manifest, dtype: str | None) -> ExportTensor:
    named = stored if stored.hf == name else Named(name, stored.ours, RowOrder.KEPT)
    entry = manifest.by_fqn[named.ours]
    return ExportTensor(named=named, entry=entry, dtype=target_dtype(name, entry.dtype, dtype))


def _shards(tensors: Iterable[ExportTensor], max_shard_bytes: int) -> dict[str, list[ExportTensor]]:
    """Distribute tensors over files in the model's order; returns file name -> tensors.

    Within a file, wider elements come first (for alignment), then names: the safetensors library's order, so that an imported
    model exports to the same bytes.
    """
    shards: list[list[ExportTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.size_bytes
    ordered = [sorted(shard, key=lambda tensor: (-ELEMENT_SIZE[tensor.dtype], tensor.named.hf)) for shard in shards]
    if len(ordered) == 1:
        return {SINGLE: ordered[0]}
    return {f"model-{n:05d}-of-{len(ordered):05d}{SUFFIX}": shard for n, shard in enumerate(ordered, 1)}


def _target_file(
    path: str, shard: Sequence[ExportTensor], spec: ModelSpec, adapter: Adapter | None, overflows: Overflows
) -> TargetFile:
    header = encode_header([(t.named.hf, t.dtype, t.shape) for t in shard], {"format": "pt"})
    segments: list[Segment] = [Literal(header)]
    for tensor in shard:
        name, dtype = tensor.named.hf, tensor.entry.dtype
        is_adapted = adapter is not None and name in adapter.factors
        step = transform(
            tensor.named.transform,
            tensor=name,
            to_trainer=False,
            head_dim=spec.head_dim,
            dtype=dtype,
            target_dtype=tensor.dtype,
            overflows=overflows,
            merge=adapter.merge(name, dtype, tensor.dtype, overflows) if adapter and is_adapted else None,
        )
        segments.append(Region(tensor=tensor.entry.fqn, box=tensor.box, transform=step, key=name))
    return TargetFile(path=path, segments=tuple(segments))


def export_source(checkpoint: Checkpoint, plan: ExportPlan) -> RewriteSource:
    """The source of exactly the tensors that `plan` reads, with every payload located."""
    fqns = dict.fromkeys(tensor.entry.fqn for tensor in plan.tensors) | (
        {plan.tied_head: None} if plan.tied_head else {}
    )
    source = source_of(checkpoint, fqns)
    return replace(source, tensors={fqn: source.tensors[fqn] for fqn in fqns})


def _small_files(
    checkpoint: Checkpoint, files: Mapping[str, bytes], spec: ModelSpec, tensors: Sequence[ExportTensor]
) -> dict[str, bytes]:
    """All small files but config.json, which is written anew."""
    card = model_card(
        files.get(README),
        source=source_name(checkpoint.url, checkpoint.manifest.step),
        manifest=checkpoint.manifest,
        spec=spec,
        dtype=main_dtype((tensor.dtype, tensor.size_bytes) for tensor in tensors),
        num_parameters=sum(prod(tensor.shape) for tensor in tensors),
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
    )
    kept = {name: data for name, data in files.items() if name != CONFIG}
    return complete(kept, spec, str(checkpoint)) | {README: card}


def _assets(checkpoint: Checkpoint) -> Carried:
    """The checkpoint's assets that are exported; the others are not even read."""
    names = checkpoint.manifest.assets
    carried = carry({name: checkpoint.asset(name) for name in sorted(names) if is_carried(name)}, str(checkpoint))
    others = {name: why_left_out(name) for name in sorted(names) if not is_carried(name)}
    in_place = checkpoint.model.left_out if isinstance(checkpoint, HfCheckpoint) else {}
    return Carried(files=carried.files, left_out={**in_place, **others, **carried.left_out})
