"""Resharding without a process group: plan it, look at it, run it on any number of machines, and go on where it stopped.

    plan = plan_reshard(open_checkpoint("s3://bucket/run@1200"), MeshSpec.parse("pp=2,dp_shard=8,tp=4"))
    run_plan(plan, "s3://bucket/run-64")

Each target rank's file is written whole, with a record beside it that carries its digests; the commit is written when all
records are there. A run that was stopped leaves files with records, which the next run of the same job verifies and keeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

import titan_ckpt
from titan_ckpt.blob import frame
from titan_ckpt.checkpoint import FULL, MODEL, Checkpoint, open_checkpoint
from titan_ckpt.commit import find_commit, write_commit
from titan_ckpt.decoded import decoded
from titan_ckpt.errors import AlreadyExistsError, DamagedError, NotFoundError, StoreError, UsageError
from titan_ckpt.execute import Budget, Execution, FileResult, Traffic
from titan_ckpt.index import DIGEST_BYTES, RAW, FileEntry, Manifest, ObjectEntry
from titan_ckpt.layout import ASSETS, data_file, is_attempt, new_attempt, step_folder
from titan_ckpt.location import is_inside
from titan_ckpt.manifest import digest
from titan_ckpt.mesh import MeshSpec
from titan_ckpt.metadata import dcp_metadata
from titan_ckpt.placement import Box
from titan_ckpt.plan import Literal, Region, Segment, Source, SourceTensor, TargetFile, Wave, source_of
from titan_ckpt.rules import Rule
from titan_ckpt.select import Selection, select
from titan_ckpt.store import FileStore, Store, open_store
from titan_ckpt.target import Placed, Placer, Target, check_complete, lay_out, stages_for
from titan_ckpt.units import format_size
from titan_ckpt.waves import group_ranks, spread

JOB = "reshard.json"
DEFAULT_MEMORY = 512_000_000
_ANY_ATTEMPT = "a-00000000T000000Z-00000000"
_OBJECT = "object:"
_VERIFY_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """What a reshard will do. `job` is a digest of everything that was asked, by which a later run knows its own files."""

    checkpoint: Checkpoint
    selection: Selection
    target: Target
    placed: Mapping[str, Placed]
    source_files: tuple[FileEntry, ...]
    source_objects: tuple[ObjectEntry, ...]
    job: str

    @property
    def step(self) -> int:
        """The step, which a reshard keeps."""
        return self.checkpoint.step

    @cached_property
    def source(self) -> Source:
        """The source's tensors under their new names, and its other values as tensors of bytes."""
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
        return Source(objects=source.objects, tensors=tensors)

    def waves(self, max_files: int) -> list[list[int]]:
        """Target ranks in the groups that are written at the same time."""
        sources = [self.source.tensors[tensor.fqn] for tensor in self.target.tensors]
        return group_ranks(self.target, sources, max_files=max_files)

    def file(self, rank: int, attempt: str) -> TargetFile:
        """The target file of a rank."""
        path = f"{step_folder(self.step)}/{data_file(attempt, rank)}"
        return TargetFile(path=path, segments=tuple(_merged(self._segments(rank))))

    def wave(self, ranks: Iterable[int], attempt: str) -> Wave:
        """The target files of several ranks as one wave."""
        return Wave(files=tuple(self.file(rank, attempt) for rank in ranks))

    def _segments(self, rank: int) -> Iterator[Segment]:
        table, end = self.target.table, 0
        for row in self.target.rows_of(rank).tolist():
            tensor = self.target.tensor_of(row)
            box = self.target.box(row)
            around = frame(tensor.dtype, box.sizes)
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
    checkpoint: Checkpoint,
    mesh: MeshSpec,
    *,
    rules: tuple[Rule, ...] = (),
    selection: Selection | None = None,
    stages_per_rank: int | None = None,
) -> ReshardPlan:
    """Plan to rewrite `checkpoint` for `mesh`; reads no tensor.

    PlanError where a cut on the new mesh is not known, or chunks are missing. `rules` say how tensors are cut where the
    checkpoint does not (`titan_ckpt.rules`), `selection` which are taken, under which names and dtypes (`titan_ckpt.select`).
    """
    source_files = checkpoint.manifest.files
    checkpoint = decoded(checkpoint)
    manifest = checkpoint.manifest
    selection = selection or select(manifest)
    check_complete(manifest)
    stages = stages_for(manifest, mesh, stages_per_rank=stages_per_rank)
    placer = Placer(source=manifest.mesh, target=mesh, rules=rules, stages=stages)
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
class Workers:
    """This process among those that share a job through the target store alone."""

    count: int = 1
    index: int = 0
    poll_s: float = 0.5
    patience_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a run did. `checkpoint` is None on workers that do not commit; `kept_files` were whole from an earlier run."""

    checkpoint: Checkpoint | None
    traffic: Traffic
    num_files: int
    kept_files: int
    wall_s: float


def run_plan(
    plan: ReshardPlan,
    url: str,
    *,
    store: Store | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
    is_checked: bool = True,
    on_progress: Callable[[int], None] | None = None,
    workers: Workers | None = None,
) -> ReshardReport:
    """Write the plan's checkpoint at `url` and commit it; nothing is visible there before that.

    `memory_bytes` bounds all buffers; `on_progress` is told the size of each piece that is done; `is_checked` verifies the
    source's digests.
    Every worker calls it; worker 0 commits. AlreadyExistsError if `url` has this step; DamagedError if the source's bytes are
    not what it recorded or change meanwhile.
    """
    started, workers = time.monotonic(), workers or Workers()
    store = store or open_store(url)
    budget = Budget.of(memory_bytes, store, num_files=-(-len(plan.target.ranks_with_files()) // workers.count))
    check_destination(plan, url, store)
    mine = spread(plan.waves(budget.max_open_files), workers.count, workers.index)
    attempt = _found_attempt(plan, store)
    finished = _finished(plan, store, attempt, [rank for wave in mine for rank in wave]) if attempt else {}
    todo = [[rank for rank in wave if rank not in finished] for wave in mine]
    _check_space(plan, store, [rank for wave in todo for rank in wave])
    attempt = attempt or _begun_attempt(plan, store, workers)
    before = _versions(plan)
    execution = Execution(
        source=plan.source, source_store=plan.checkpoint.store, target_store=store, budget=budget, is_checked=is_checked,
        on_progress=on_progress,
    )  # fmt: skip
    for results in execution.run(plan.wave(ranks, attempt) for ranks in todo if ranks):
        for result in results:
            store.write(_record_path(result.path), [_encode_record(result)])
    _check_unchanged(plan, before)
    checkpoint = _commit(plan, store, url, attempt, workers) if workers.index == 0 else None
    return ReshardReport(
        checkpoint=checkpoint,
        traffic=execution.traffic,
        num_files=sum(map(len, todo)),
        kept_files=len(finished),
        wall_s=time.monotonic() - started,
    )


def check_destination(plan: ReshardPlan, url: str, store: Store) -> None:
    """Refuse a destination that lies inside the source, or that has this step already."""
    if is_inside(url, plan.checkpoint.url) and not is_inside(plan.checkpoint.url, url):
        raise UsageError(f"the destination {store} lies inside the source {plan.checkpoint}; give a URL beside it")
    if find_commit(store, plan.step) is not None:
        raise AlreadyExistsError(f"{store}@{plan.step} exists already; give another URL, or remove that step first")


def _found_attempt(plan: ReshardPlan, store: Store) -> str | None:
    """The folder of this job, if an earlier run or worker 0 of this one began it."""
    folder = step_folder(plan.step)
    attempts = [name for name in store.folders(folder) if is_attempt(name)]
    return next((name for name in attempts if _job_of(store, f"{folder}/{name}/{JOB}") == plan.job), None)


def _begun_attempt(plan: ReshardPlan, store: Store, workers: Workers) -> str:
    """A new folder for this job: worker 0 makes it, the others wait for it."""
    if workers.index == 0:
        attempt = new_attempt()
        content = {"job": plan.job, "source": str(plan.checkpoint), "mesh": str(plan.target.mesh)}
        store.write(f"{step_folder(plan.step)}/{attempt}/{JOB}", [json.dumps(content).encode()])
        return attempt
    give_up_at = time.monotonic() + workers.patience_s
    while (found := _found_attempt(plan, store)) is None:
        if time.monotonic() > give_up_at:
            raise StoreError(f"{store}: worker 0 has not begun within {workers.patience_s:.0f} s; is it running?")
        time.sleep(workers.poll_s)
    return found


def _job_of(store: Store, path: str) -> str | None:
    try:
        return str(json.loads(store.read(path))["job"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        return None


def _finished(plan: ReshardPlan, store: Store, attempt: str, ranks: list[int]) -> dict[int, FileResult]:
    """The files of an earlier run that are whole: they have a record, and their bytes have the digest it says."""
    finished = {}
    folder = f"{step_folder(plan.step)}/{attempt}"
    present = {entry.path for entry in store.list(folder)}
    for rank in ranks:
        path = f"{step_folder(plan.step)}/{data_file(attempt, rank)}"
        if path in present and _record_path(path) in present:
            record = _decode_record(store, path)
            if record is not None and _file_digest(store, path, record.size_bytes) == record.digest:
                finished[rank] = record
    return finished


def _record_path(path: str) -> str:
    return f"{path}.json"


def _encode_record(result: FileResult) -> bytes:
    digests = {key: value.hex() for key, value in result.digests.items()}
    return json.dumps({"size": result.size_bytes, "xxh3_128": result.digest.hex(), "digests": digests}).encode()


def _decode_record(store: Store, path: str) -> FileResult | None:
    try:
        content = json.loads(store.read(_record_path(path)))
        digests = {key: bytes.fromhex(value) for key, value in content["digests"].items()}
        whole = bytes.fromhex(content["xxh3_128"])
        return FileResult(path=path, size_bytes=int(content["size"]), digest=whole, digests=digests)
    except (NotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _file_digest(store: Store, path: str, size_bytes: int) -> bytes | None:
    """Digest of a file's bytes, None if it has another size than that."""
    if store.stat(path).size_bytes != size_bytes:
        return None
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_VERIFY_BYTES))
    for start in range(0, size_bytes, _VERIFY_BYTES):
        view = buffer[: min(_VERIFY_BYTES, size_bytes - start)]
        store.read_into(path, start, view)
        hasher.update(view)
    return hasher.digest()


def _check_space(plan: ReshardPlan, store: Store, ranks: list[int]) -> None:
    if isinstance(store, FileStore) and ranks:
        needed, free = int(plan.target.file_bytes()[ranks].sum()), store.free_bytes()
        if free < needed:
            raise StoreError(
                f"{store}: {format_size(needed)} are to be written, {format_size(free)} are free on that disk"
            )


def _versions(plan: ReshardPlan) -> dict[str, str]:
    """The version of every file that the source's tensors lie in, encoded ones included."""
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


def _commit(plan: ReshardPlan, store: Store, url: str, attempt: str, workers: Workers) -> Checkpoint:
    records = _all_records(plan, store, attempt, workers)
    assets = dict(_copied_assets(plan, store, attempt))
    manifest = target_manifest(plan, attempt, records, assets)
    write_commit(store, manifest, dcp_metadata(manifest), replaces=None)
    folder = f"{step_folder(plan.step)}/{attempt}"
    store.delete([f"{folder}/{JOB}", *(_record_path(record.path) for record in records.values())])
    return open_checkpoint(url, step=plan.step, store=store)


def _all_records(plan: ReshardPlan, store: Store, attempt: str, workers: Workers) -> dict[int, FileResult]:
    """Every rank's record, once all workers have written theirs."""
    paths = {rank: f"{step_folder(plan.step)}/{data_file(attempt, rank)}" for rank in plan.target.ranks_with_files()}
    missing, seen_at = set(paths.values()), time.monotonic()
    while missing:
        present = {entry.path for entry in store.list(f"{step_folder(plan.step)}/{attempt}")}
        still = {path for path in missing if _record_path(path) not in present}
        seen_at = time.monotonic() if len(still) < len(missing) else seen_at
        missing = still
        if missing and time.monotonic() - seen_at > workers.patience_s:
            raise StoreError(
                f"{store}: {len(missing)} of {len(paths)} files are still missing and none came for {workers.patience_s:.0f} s; "
                f"a worker is gone. Nothing was committed; run the same command again, finished files are kept"
            )
        if missing:
            time.sleep(workers.poll_s)
    records = {rank: _decode_record(store, path) for rank, path in paths.items()}
    damaged = [rank for rank, record in records.items() if record is None]
    if damaged:
        raise DamagedError(
            f"{store}: the record of rank {damaged[0]}'s file cannot be read; run the same command again"
        )
    return {rank: record for rank, record in records.items() if record is not None}


def _copied_assets(plan: ReshardPlan, store: Store, attempt: str) -> Iterator[tuple[str, str]]:
    for name, known in plan.checkpoint.manifest.assets.items():
        store.write(f"{step_folder(plan.step)}/{attempt}/{ASSETS}/{name}", [plan.checkpoint.asset(name)])
        yield name, known


def target_manifest(
    plan: ReshardPlan, attempt: str, records: Mapping[int, FileResult], assets: Mapping[str, str]
) -> Manifest:
    """The manifest of the finished target: the source's training state and config, the target's mesh, chunks and digests."""
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
        kind=MODEL if plan.selection.is_model_only or source.kind == MODEL else FULL,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={**source.versions, "titan_ckpt": titan_ckpt.__version__},
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
    )


def _merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same segments with neighbouring literals joined."""
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
