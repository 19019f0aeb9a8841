"""Resharding without a process group: plan, inspect, run on any number of machines, resume after an interruption.

    plan = plan_reshard(open_checkpoint("s3://bucket/run@1200"), MeshSpec.parse("pp=2,dp_shard=8,tp=4"))
    run_plan(plan, "s3://bucket/run-64")

Each target rank's file gets a record beside it with its digests; the commit is written once all records exist. An interrupted
run leaves files with records, which the next run of the same job verifies and keeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from titan_ckpt.arguments import check_callable, check_flag, check_json, check_type
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.commit_proved import commit_checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.nesting import nesting
from titan_ckpt.checkpoint.open import as_checkpoint, open_checkpoint
from titan_ckpt.checkpoint.other_run import refuse_other_run
from titan_ckpt.checkpoint.uncompressed import decoded
from titan_ckpt.errors import AlreadyExistsError, DamagedError, UsageError
from titan_ckpt.format.commit import find_commit, found_before
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.foreign_blob import check_records
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, FileEntry, Manifest, ObjectEntry
from titan_ckpt.format.names import ASSETS, data_file, step_folder
from titan_ckpt.format.torch_blob import envelope
from titan_ckpt.location import StrPath, check_writable, is_inside
from titan_ckpt.resharding.file_groups import group_ranks, spread
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.target import Placer, TargetLayout, TargetPlacement, lay_out, stages_for
from titan_ckpt.resharding.workers import JobFiles, Workers
from titan_ckpt.rewrite.execute import Execution, FileResult, IoCounts
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.rewrite.plan import (
    FileGroup,
    Literal,
    Region,
    RewriteSource,
    Segment,
    SourceTensor,
    TargetFile,
    source_of,
)
from titan_ckpt.rewrite.selection import Selection, select
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box
from titan_ckpt.store.base import Store, check_free
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store
from titan_ckpt.version import __version__

DEFAULT_MEMORY = 512_000_000
_ANY_ATTEMPT = "a-00000000T000000Z-00000000"
_OBJECT = "object:"


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Everything a reshard will do. `job` is a digest of the request; a later run finds its files by it."""

    checkpoint: Checkpoint
    selection: Selection
    target: TargetLayout
    placed: Mapping[str, TargetPlacement]
    source_files: tuple[FileEntry, ...]
    source_objects: tuple[ObjectEntry, ...]
    job: str

    @property
    def step(self) -> int:
        """The source's step, which a reshard keeps."""
        return self.checkpoint.step

    @cached_property
    def source(self) -> RewriteSource:
        """The source's tensors under their new names; its values appear as tensors of bytes."""
        source = source_of(self.checkpoint, {item.source_fqn for item in self.selection.items})
        tensors = {item.fqn: source.tensors[item.source_fqn] for item in self.selection.items}
        numbers = {path: number for number, path in enumerate(source.objects)}
        for entry in self.source_objects:
            whole = SourceTensor.single(
                "uint8",
                (entry.length,),
                object_index=numbers[self.checkpoint.path(entry.file)],
                start=entry.offset,
                digest=entry.digest,
            )
            tensors[_OBJECT + entry.fqn] = whole
        return RewriteSource(objects=source.objects, tensors=tensors)

    def file_groups(self, max_files: int) -> list[list[int]]:
        """Target ranks in groups of at most `max_files` that are written together."""
        sources = [self.source.tensors[tensor.fqn] for tensor in self.target.tensors]
        return group_ranks(self.target, sources, max_files=max_files)

    def file(self, rank: int, attempt: str) -> TargetFile:
        """The target file of a rank."""
        path = f"{step_folder(self.step)}/{data_file(attempt, rank)}"
        return TargetFile(path=path, segments=tuple(_merged(self._segments(rank))))

    def file_group(self, ranks: Iterable[int], attempt: str) -> FileGroup:
        """The target files of several ranks."""
        return FileGroup(files=tuple(self.file(rank, attempt) for rank in ranks))

    def _segments(self, rank: int) -> Iterator[Segment]:
        table, end = self.target.table, 0
        for row in self.target.rows_of(rank).tolist():
            tensor = self.target.tensor_of(row)
            box = self.target.box(row)
            around = envelope(tensor.dtype, box.sizes)
            offset = int(table.offset[row])
            yield Literal(b"\0" * (offset - end) + around.prefix)
            yield Region(tensor=tensor.fqn, box=box, transform=self.selection.transforms.get(tensor.fqn), key=str(row))
            yield Literal(around.suffix)
            end = offset + int(table.length[row])
        if rank == 0:
            for entry in self.target.objects:
                name = _OBJECT + entry.fqn
                yield Region(tensor=name, box=Box((0,), (entry.length,)), key=name)


def plan_reshard(
    checkpoint: Checkpoint | StrPath,
    mesh: MeshSpec | str,
    *,
    rules: Sequence[PlacementRule] = (),
    selection: Selection | None = None,
    stages_per_rank: int | None = None,
    storage_options: Options = None,
) -> ReshardPlan:
    """Plan to rewrite `checkpoint` (open, or `URL[@STEP]`) for `mesh` (or its text, `pp=2,tp=4`); reads no tensor.

    PlanError if a cut on the new mesh is unknown; DamagedError if the source's chunks do not tile
    its tensors. `rules` override how tensors are cut
    (`resharding.placement_rules`); `selection` picks tensors, names and dtypes (`rewrite.selection`).
    """
    check_type(rules, "rules", tuple, list, hint="a sequence of placement rules")
    mesh = mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(mesh)
    with using(storage_options, checkpoint):
        checkpoint = as_checkpoint(checkpoint)
    checkpoint.prove_coverage()
    for name in ("training", "config", "user"):
        check_json(getattr(checkpoint.manifest, name), f"{checkpoint}: {name}")
    source_files = checkpoint.manifest.files
    checkpoint = decoded(checkpoint)
    manifest = checkpoint.manifest
    selection = selection or select(manifest)
    stages = stages_for(manifest, mesh, stages_per_rank=stages_per_rank)
    placer = Placer(source=manifest.mesh, target=mesh, rules=tuple(rules), stages=stages)
    by_fqn = manifest.by_fqn
    chosen = [(item.entry, placer.place(by_fqn[item.source_fqn])) for item in selection.items]
    objects = tuple(entry for entry in manifest.objects if selection.keeps_object(entry.fqn))
    target = lay_out(chosen, objects, mesh, data_file(_ANY_ATTEMPT, 0))
    asked = {
        "source": [checkpoint.url, checkpoint.step, manifest.attempt, manifest.created],
        "mesh": str(mesh),
        "tensors": [[e.fqn, e.dtype, [[a, s.dim] for a, s in p.placements.items()], p.stages] for e, p in chosen],
        "objects": [entry.fqn for entry in objects],
    }
    return ReshardPlan(
        checkpoint=checkpoint,
        selection=selection,
        target=target,
        placed={entry.fqn: placed for entry, placed in chosen},
        source_files=source_files,
        source_objects=objects,
        job=digest(json.dumps(asked).encode()).hex(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """The result of a run. `checkpoint` is None on workers that do not commit; `kept_files` were complete from an earlier run;
    `overflowed` names tensors, of those this worker wrote, with values that the new dtype cannot hold."""

    checkpoint: Checkpoint | None
    traffic: IoCounts
    num_files: int
    kept_files: int
    wall_s: float
    overflowed: tuple[str, ...]


def run_plan(
    plan: ReshardPlan, url: StrPath, *, store: Store | None = None, memory_bytes: int = DEFAULT_MEMORY,
    is_checked: bool = True, on_progress: Callable[[int], None] | None = None, workers: Workers | None = None,
    storage_options: Options = None,
) -> ReshardReport:  # fmt: skip
    """Write the plan's checkpoint at `url` and commit it; nothing is visible there before the commit.

    `memory_bytes` bounds all buffers; `on_progress` receives the size of each part written; `is_checked` verifies the source's
    digests. Every worker calls this; worker 0 commits. AlreadyExistsError if `url` has this step; DamagedError if the source's
    bytes do not match their digests or change during the run.
    """
    check_type(plan, "plan", ReshardPlan, hint="what plan_reshard(...) returns")
    check_type(workers, "workers", Workers, or_none=True, hint="Workers(count=2, index=0)")
    check_flag(is_checked, "is_checked")
    check_callable(on_progress, "on_progress", or_none=True)
    started, workers = time.monotonic(), workers or Workers()
    with using(storage_options, url if store is None else store):
        store = store or open_store(url)
    num_files = -(-len(plan.target.ranks_with_files()) // workers.count)
    budget = Budget.of(memory_bytes, plan.checkpoint.store, store, num_files=num_files)
    check_destination(plan, url, store)
    mine = spread(plan.file_groups(budget.max_open_files), workers.count, workers.index)
    files = JobFiles(store, plan.step, plan.job)
    attempt = files.found()
    finished = files.finished(attempt, [rank for group in mine for rank in group]) if attempt else {}
    todo = [[rank for rank in group if rank not in finished] for group in mine]
    _check_space(plan, store, [rank for group in todo for rank in group])
    attempt = attempt or files.begun(workers, {"source": str(plan.checkpoint), "mesh": str(plan.target.mesh)})
    before = _versions(plan)
    if is_checked and workers.index == 0:
        _check_values(plan)
    execution = Execution(
        source=plan.source, source_store=plan.checkpoint.store, target_store=store, budget=budget, is_checked=is_checked,
        on_progress=on_progress,
    )  # fmt: skip
    for results in execution.run(plan.file_group(ranks, attempt) for ranks in todo if ranks):
        for result in results:
            files.write(result)
    _check_unchanged(plan, before)
    checkpoint = _commit(plan, files, url, attempt, workers) if workers.index == 0 else None
    return ReshardReport(
        checkpoint=checkpoint,
        traffic=execution.traffic,
        num_files=sum(map(len, todo)),
        kept_files=len(finished),
        wall_s=time.monotonic() - started,
        overflowed=tuple(sorted(plan.selection.overflows.names)),
    )


def check_destination(plan: ReshardPlan, url: StrPath, store: Store) -> None:
    """Refuse a destination that cannot be addressed, lies inside the source, already has this step, or is another run."""
    check_writable(url)
    if is_inside(url, plan.checkpoint.url) and not is_inside(plan.checkpoint.url, url):
        raise UsageError(f"the destination {store} lies inside the source {plan.checkpoint}; give a URL beside it")
    found_before(store, plan.step)
    if find_commit(store, plan.step) is not None:
        raise AlreadyExistsError(f"{store}@{plan.step} exists already; give another URL, or remove that step first")
    refuse_other_run(plan.checkpoint, store)


def _check_values(plan: ReshardPlan) -> None:
    """DamagedError if a value of a checkpoint without digests is damaged: its copy would get a digest."""
    source = plan.checkpoint
    for entry in plan.source_objects if source.manifest.kind == CheckpointKind.FOREIGN else ():
        damages, _ = check_records(source.store, source.path(entry.file), entry.offset, entry.length)
        if damages:
            raise DamagedError(f"{source}: value {entry.fqn!r}: {damages[0].message}")


def _check_space(plan: ReshardPlan, store: Store, ranks: list[int]) -> None:
    if ranks:
        check_free(store, lambda: int(plan.target.file_bytes()[ranks].sum()))


def _versions(plan: ReshardPlan) -> dict[str, str]:
    """The version of every source file, encoded ones included."""
    store = plan.checkpoint.store
    folders = {path.rpartition("/")[0] for path in plan.source.objects}
    files = {plan.checkpoint.path(file.path) for file in plan.source_files}
    return {e.path: e.version for folder in sorted(folders) for e in store.list(folder) if e.path in files}


def _check_unchanged(plan: ReshardPlan, before: Mapping[str, str]) -> None:
    after = _versions(plan)
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path):
            where = plan.checkpoint.store.where(path)
            raise DamagedError(
                f"{where}: changed while it was read; nothing was committed. Run it again on a source at rest"
            )


def _commit(plan: ReshardPlan, files: JobFiles, url: StrPath, attempt: str, workers: Workers) -> Checkpoint:
    store, records = files.store, files.wait_for(plan.target.ranks_with_files(), attempt, workers)
    assets = dict(_copied_assets(plan, store, attempt))
    manifest = target_manifest(plan, attempt, records, assets)
    commit_checkpoint(store, manifest, dcp_metadata(manifest), replaces=None)
    files.clear(attempt, records.values())
    return open_checkpoint(url, step=plan.step, store=store)


def _copied_assets(plan: ReshardPlan, store: Store, attempt: str) -> Iterator[tuple[str, str]]:
    for name, known in plan.checkpoint.manifest.assets.items():
        store.write(f"{step_folder(plan.step)}/{attempt}/{ASSETS}/{name}", [plan.checkpoint.asset(name)])
        yield name, known


def target_manifest(
    plan: ReshardPlan, attempt: str, records: Mapping[int, FileResult], assets: Mapping[str, str]
) -> Manifest:
    """The target's manifest: the source's training state and config, the target's mesh, chunks and digests."""
    source, target = plan.checkpoint.manifest, plan.target
    numbers = np.zeros(target.mesh.world_size, dtype=np.int64)
    numbers[sorted(records)] = np.arange(len(records))
    digests = np.zeros((len(target.rank), DIGEST_BYTES), dtype=np.uint8)
    of_object: dict[str, bytes] = {}
    for record in records.values():
        for key, value in record.digests.items():
            if key.startswith(_OBJECT):
                of_object[key.removeprefix(_OBJECT)] = value
            else:
                digests[int(key)] = np.frombuffer(value, dtype=np.uint8)
    origin: dict[str, Any] = {"source": str(plan.checkpoint), "mesh": None if source.mesh is None else str(source.mesh)}
    return replace(
        source,
        step=plan.step,
        attempt=attempt,
        kind=CheckpointKind.MODEL
        if plan.selection.is_model_only or source.kind == CheckpointKind.MODEL
        else CheckpointKind.FULL,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={**source.versions, "titan_ckpt": __version__},
        mesh=target.mesh,
        tensors=target.tensors,
        chunks=replace(target.table, file=numbers[np.asarray(target.rank)], digests=digests.tobytes()),
        codecs=(RAW,),
        objects=tuple(
            replace(entry, file=data_file(attempt, 0), digest=of_object[entry.fqn]) for entry in target.objects
        ),
        files=tuple(
            FileEntry(path=data_file(attempt, rank), size_bytes=record.size_bytes, digest=record.digest)
            for rank, record in sorted(records.items())
        ),
        assets=assets,
        user={**source.user, "resharded_from": origin},
        structure=nesting(plan.checkpoint),
    )


def _merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments, with adjacent literals joined."""
    literal = b""
    for segment in segments:
        if isinstance(segment, Literal):
            literal += segment.data
            continue
        if literal:
            yield Literal(literal)
        literal = b""
        yield segment
    if literal:
        yield Literal(literal)


__all__ = ["DEFAULT_MEMORY", "ReshardPlan", "ReshardReport", "Workers", "check_destination", "plan_reshard", "run_plan"]
