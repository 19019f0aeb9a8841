"""`export_hf`: plan, stream, publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan_ckpt.checkpoint import foreign_formats
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import as_checkpoint
from titan_ckpt.checkpoint.uncompressed import decoded
from titan_ckpt.converters.hf.config import Config
from titan_ckpt.converters.hf.digests import DIGESTS, ModelDigests, WeightFile, encode_digests, small_files
from titan_ckpt.converters.hf.export_plan import DEFAULT_SHARD_BYTES, ExportPlan, export_source, plan_export
from titan_ckpt.converters.hf.publish import publish
from titan_ckpt.converters.hf.stream import OnBytes, stream, tensor_digests
from titan_ckpt.converters.models.averages import averaged
from titan_ckpt.converters.models.families import EMBEDDING, expected_tensors
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.converters.models.tensor_names import LAYOUTS, MODEL_PREFIX, TITAN, name_in
from titan_ckpt.errors import LoadContractError
from titan_ckpt.format.digest import digest
from titan_ckpt.location import StrPath, url_text
from titan_ckpt.rewrite.execute import FileResult
from titan_ckpt.rewrite.plan import Literal, RewriteSource
from titan_ckpt.store.clients.options import Options, using

if TYPE_CHECKING:
    from titan_ckpt.converters.hf.peft_adapter import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export. `digests`: xxh3-128 of every tensor's bytes as written, by Hugging Face name; `overflowed`: tensors
    with values that `dtype` cannot hold."""

    url: str
    files: tuple[str, ...]
    size_bytes: int
    digests: Mapping[str, bytes]
    overflowed: tuple[str, ...]


def export_hf(
    checkpoint: Checkpoint | StrPath,
    dst: StrPath,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    config: Config | None = None,
    merge_lora: StrPath | None = None,
    ema: bool = False,
    on_progress: OnBytes | None = None,
    storage_options: Options = None,
) -> ExportReport:
    """Write the model of a checkpoint (`URL[@STEP]` or an open one) as a Hugging Face folder or prefix `dst`, which must be new.

    `dtype` casts every floating-point tensor (default: keep). `config` is a config.json for checkpoints without a model config;
    `merge_lora` is the folder of a PEFT adapter to merge into the weights. `ema` takes the averages of the weights that a run
    with `optimizer.ema_decay` keeps. `dst` appears only when complete; optimizer state is
    never read.
    """
    with using(storage_options, checkpoint, dst, merge_lora):
        opened = as_checkpoint(checkpoint)
        opened = of_averages(opened) if ema else opened
        adapter = None if merge_lora is None else read_adapter(merge_lora)
        plan = plan_export(opened, dtype=dtype, max_shard_bytes=max_shard_bytes, config=config, adapter=adapter)
        return run_export(opened, plan, dst, on_progress=on_progress)


def of_averages(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the averages in place of the weights; LoadContractError if it has none."""
    return replace(checkpoint, manifest=averaged(checkpoint.manifest, str(checkpoint)))


def read_adapter(url: StrPath) -> Adapter:
    """Read the PEFT adapter in a folder or prefix."""
    from titan_ckpt.converters.hf.peft_adapter import open_adapter  # torch, only where values change

    return open_adapter(url)


def run_export(
    checkpoint: Checkpoint, plan: ExportPlan, dst: StrPath, *, on_progress: OnBytes | None = None
) -> ExportReport:
    """Run `plan` and publish the result at `dst`."""
    checkpoint = decoded(checkpoint)
    source = export_source(checkpoint, plan)
    _check_tied_head(checkpoint, plan, source)
    _check_base(checkpoint, plan)
    with publish(dst, size_bytes=plan.size_bytes) as target:
        results = stream(source, checkpoint.store, target, plan.weights, on_progress=on_progress)
        digests = {DIGESTS: encode_digests(_digests(plan, results))}
        for name, data in (*plan.small.items(), *digests.items(), *plan.last.items()):
            target.write(name, [data])
    return ExportReport(
        url=url_text(dst),
        files=plan.names,
        size_bytes=plan.size_bytes,
        digests={name: value for result in results for name, value in result.digests.items()},
        overflowed=tuple(sorted(plan.overflows.names)),
    )


def _check_base(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """LoadContractError if an adapter that records which weights it was trained on is merged into others."""
    if plan.adapter is None or not plan.adapter.base_digest:
        return
    from titan_ckpt.loading.values_digest import stored_values_digest  # torch, which an adapter needs anyway

    named = foreign_formats.name_torchtitan(checkpoint, spec_to_config(plan.spec))
    names = {name_in(LAYOUTS[TITAN], name, plan.spec).ours for name in expected_tensors(plan.spec)}
    found = stored_values_digest(named, sorted(names), prefix=MODEL_PREFIX)
    if found != plan.adapter.base_digest:
        raise LoadContractError(
            f"{plan.adapter.where}: was trained on weights with the values {plan.adapter.base_digest}, but {checkpoint} has "
            f"{found}. Merge it into the weights that it was trained on, in whichever format these are; PEFT's merge_and_unload "
            "merges it into others"
        )


def _digests(plan: ExportPlan, results: Sequence[FileResult]) -> ModelDigests:
    """The digests of all files that are exported."""
    weights = {}
    for file, result in zip(plan.weights, results, strict=True):
        header = file.segments[0]
        assert isinstance(header, Literal)
        weights[file.path] = WeightFile(
            size_bytes=result.size_bytes,
            header_bytes=len(header.data),
            header=digest(header.data),
            tensors=result.digests,
        )
    return ModelDigests(weights=weights, files=small_files({**plan.small, **plan.last}))


def _check_tied_head(checkpoint: Checkpoint, plan: ExportPlan, source: RewriteSource) -> None:
    """LoadContractError if a stored tied head differs from the embedding; one of them would be lost silently."""
    if plan.tied_head is None:
        return
    embedding = next(tensor.entry.fqn for tensor in plan.tensors if tensor.named.hf == EMBEDDING)
    digests = tensor_digests(source, checkpoint.store, [embedding, plan.tied_head])
    if len(set(digests.values())) > 1:
        raise LoadContractError(
            f"{checkpoint}: the config ties the head to the embedding, but {plan.tied_head} and {embedding} differ; "
            "pass --config with tie_word_embeddings false to keep both"
        )
