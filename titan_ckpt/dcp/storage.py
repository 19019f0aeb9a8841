"""`StorageWriter` and `StorageReader` for torch.distributed.checkpoint: any trainer's `dcp.save` and `dcp.load`, our store.

    dcp.save(state, storage_writer=titan_ckpt.StorageWriter("s3://bucket/run@1200", mesh=mesh))
    dcp.load(state, storage_reader=titan_ckpt.StorageReader("s3://bucket/run"))

The result is a checkpoint like `Saver`'s, with digests and an atomic commit.
"""

from __future__ import annotations

import io
import logging
import pickle
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_ckpt.arguments import check_flag, check_type
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.commit_proved import commit_checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.nesting import nesting
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.items import pieces_of
from titan_ckpt.dcp.subclasses import WithSubclasses, add_subclasses, load_value
from titan_ckpt.dcp.written import Written, objects_of, paths_of, result_of, table_of, tensors_of
from titan_ckpt.errors import AlreadyExistsError, CheckpointError, UsageError
from titan_ckpt.format.codec import CODECS, PLANES_ZSTD, decode_blob
from titan_ckpt.format.commit import found_before
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.names import check_step, new_attempt
from titan_ckpt.format.structure import of_paths
from titan_ckpt.loading.casts import holds_every_value
from titan_ckpt.loading.policy import LoadPolicy, LoadReport
from titan_ckpt.loading.read_plan import ReadPlan
from titan_ckpt.location import StrPath, check_writable, normalise, parse_location
from titan_ckpt.saving.merge_parts import created, versions
from titan_ckpt.saving.options import SaveRequest
from titan_ckpt.saving.staging import Direct, warn_expanded
from titan_ckpt.saving.upload import RankContents, RankFile, upload
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box
from titan_ckpt.state.state_dict import DTYPE_NAME, TORCH_DTYPE
from titan_ckpt.state.values import Encoder
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import can_open, open_store

log = logging.getLogger(__name__)
SHOWN = 10


class PlanesZstd(StreamTransformExtension):
    """Lets plain DCP read checkpoints saved with `codec="planes-zstd"`; reading only.
    registry = ExtensionRegistry(); registry.register(titan_ckpt.dcp.storage.PlanesZstd)
    dcp.load(state, storage_reader=FileSystemReader(path, _extension_registry=registry))
    """

    @staticmethod
    def registry_name() -> str:
        """The codec's name in `.metadata`."""
        return PLANES_ZSTD

    @staticmethod
    def from_descriptor(_version: str) -> PlanesZstd:
        """The codec has one version."""
        return PlanesZstd()

    def get_descriptor(self) -> str:
        """The codec's name in `.metadata`."""
        return PLANES_ZSTD

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """The raw blob."""
        return io.BytesIO(decode_blob(input.read(), "blob"))

    def transform_to(self, _output: IO[bytes]) -> IO[bytes]:
        """Saving goes through `SaveOptions(codec=...)`."""
        raise UsageError(f"{PLANES_ZSTD} is written by titan_ckpt.Saver, not through DCP's extensions")


@dataclass(slots=True)
class _Assignment:
    """Sent from the coordinator to each rank in the plan. A planner that caches plans gives it again for later saves."""

    attempt: str
    rank: int
    is_used: bool = False

    def next_attempt(self) -> str:
        """The coordinator's name for this attempt; for a plan of an earlier save a new one, whose age is that of this save."""
        attempt = new_attempt() if self.is_used else self.attempt
        self.is_used = True
        return attempt


class StorageWriter(TorchStorageWriter):
    """Writes one step of a run. The step is part of the URL (`URL@STEP`), given, or in `dcp.save(checkpoint_id="URL@STEP")`.
    `mesh` names the axes, so that the checkpoint can be resharded. `training`, `config` and `user` must be JSON. The commit is
    conditional, as `Saver`'s is: ConditionFailedError if another job committed the step meanwhile. With `overwrite=False` a step
    that exists is an AlreadyExistsError. `dcp.save(use_collectives=False)` is refused: nobody would know what all ranks wrote.
    `checkpoint_id` is URL@STEP; `save_id` is the name of this attempt to save it, on the coordinator.
    """

    def __init__(
        self,
        url: StrPath | None = None,
        *,
        step: int | None = None,
        mesh: MeshSpec | None = None,
        training: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        user: Mapping[str, Any] | None = None,
        storage_options: Options = None,
        overwrite: bool = True,
    ) -> None:
        check_flag(overwrite, "overwrite")
        check_type(mesh, "mesh", MeshSpec, or_none=True, hint="MeshSpec.parse('dp_shard=8,tp=2')")
        self._url, self._step, self._mesh, self._said = url, step, mesh, set[str]()
        self._run_url, self._at, self.save_id = "", 0, new_attempt()
        self._is_planned = False
        self._is_overwriting = overwrite
        self._storage_options = storage_options
        request = SaveRequest(step=0 if step is None else step, training=training, config=config, user=user)
        request.check()
        self._request = request.redacted()
        if url is not None and (step is not None or parse_location(url).step is not None):
            self.reset()

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """DCP calls this before each save to another checkpoint, with what `dcp.save(checkpoint_id=...)` was given."""
        location = parse_location(checkpoint_id or self._url or "")
        step = location.step if location.step is not None else self._step
        if step is None:
            raise UsageError(f"{location}: which step? Write URL@STEP, or give StorageWriter(url, step=...)")
        check_writable(location.url)
        self._run_url, self._at = normalise(location.url), check_step(step)
        self.save_id, self._is_planned = new_attempt(), False

    @property
    def checkpoint_id(self) -> str:
        """URL@STEP of the checkpoint to be saved; empty while no step is known."""
        return f"{self._run_url}@{self._at}" if self._run_url else ""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # DCP looks for this name
        """Open the store, of whose errors DCP tells all ranks here, not in `reset`; remember what this save will replace."""
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                f"{self.checkpoint_id}: with use_collectives=False each rank saves for itself, and a commit needs all of "
                "them; leave it out"
            )
        with using(self._storage_options, self._run_url):
            self._store = open_store(self._run_url)
        self._previous = found_before(self._store, self._at) if is_coordinator else None
        if not self._is_overwriting and self._previous is not None and self._previous.commit is not None:
            raise AlreadyExistsError(f"{self.checkpoint_id}: Checkpoint already exists, and overwrite=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the attempt's name and its own file."""
        self._renew_id()
        self._is_planned = True
        return [replace(plan, storage_data=_Assignment(self.save_id, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's file, without copying the tensors first."""
        assignment: _Assignment = plan.storage_data
        target = RankFile(step=self._at, attempt=assignment.next_attempt(), rank=assignment.rank)
        pieces = [
            piece for item in plan.items if item.type != WriteItemType.BYTE_IO for piece in pieces_of(planner, item)
        ]
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [(piece, piece.shard) for piece in pieces if piece.shard is not None]
        others = [piece for piece in pieces if piece.shard is None]
        encoder = Encoder()
        objects = {item.index.fqn: cast(io.BytesIO, planner.resolve_data(item)).getvalue() for item in values}
        objects |= {piece.name: encoder.encode(piece.name, piece.value) for piece in others}
        warn_expanded(((piece.name, piece.value) for piece, _ in tensors), self._said)
        contents = RankContents(
            items=[shard for _, shard in tensors],
            source=Direct([piece.value for piece, _ in tensors]),
            objects=objects,
            own_objects=list(objects),
        )
        part = upload(self._store, contents, target)
        results = [
            result_of(piece.item, Written(part=part, name=piece.name, row=row, shard=shard, below=piece.below))
            for row, (piece, shard) in enumerate(tensors)
        ]
        results += [result_of(piece.item, Written(part=part, name=piece.name, below=piece.below)) for piece in others]
        results += [result_of(item, Written(part=part, name=item.index.fqn)) for item in values]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; DCP calls this on the coordinator only, after every rank has written."""
        manifest = self._manifest(metadata, [result for rank in results for result in rank])
        commit_checkpoint(self._store, manifest, dcp_metadata(manifest), replaces=self._previous)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a URL with a step, on a store that can be written."""
        return can_open(checkpoint_id) and parse_location(checkpoint_id).step is not None

    def storage_meta(self) -> StorageMeta:
        """Where the checkpoint will be and the name of this attempt, for DCP's planners and metadata."""
        if not self._run_url:
            self.reset()
        self._renew_id()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _renew_id(self) -> None:
        """A second save without a `reset` before it is another attempt."""
        if self._is_planned:
            self.save_id, self._is_planned = new_attempt(), False

    def _manifest(self, metadata: Metadata, results: list[WriteResult]) -> Manifest:
        written: list[Written] = [result.storage_data for result in results]
        parts = {each.part.files[0].path: each.part for each in written}
        files = [parts[path].files[0] for path in sorted(parts)]
        tensors = tensors_of(written)
        paths = paths_of(metadata.planner_data or {}, ((result.index.fqn, result.storage_data) for result in results))
        return Manifest(
            step=self._at,
            attempt=self.save_id,
            kind=CheckpointKind.FULL,
            created=created(),
            versions=versions(),
            mesh=self._mesh,
            pipeline=None,
            tensors=tuple(entry for entry, _ in tensors),
            chunks=table_of([row for _, rows in tensors for row in rows], {file.path: n for n, file in enumerate(files)}),
            codecs=CODECS,
            objects=objects_of(parts.values()),
            files=tuple(files),
            training=self._request.training or {},
            config=self._request.config or {},
            user=self._request.user or {},
            structure=of_paths(paths) if paths else None,
        )  # fmt: skip


class StorageReader(TorchStorageReader):
    """Reads `URL[@STEP]` (the newest whole checkpoint without a step), ours or any DCP's, without unpickling it.
    `policy.verify` selects the digests to check; the planner decides what fits the state. DCP's casts every dtype to that of the
    state: a cast that may lose values is logged by name, or, with `LoadPolicy(cast="allow")`, refused if it does. Afterwards
    `report` has the casts, and the bytes needed, fetched and not verified. DCP raises CheckpointException on every rank for an
    error on one, such as DamagedError if stored bytes differ from what was saved.
    `checkpoint_id` is URL@STEP once it is open, before what was given; `load_id` is another one for each load.
    """

    def __init__(
        self, url: StrPath | None = None, *, policy: LoadPolicy | None = None, storage_options: Options = None
    ) -> None:
        check_type(policy, "policy", LoadPolicy, or_none=True, hint="LoadPolicy(...)")
        self._url, self._policy, self._storage_options = url, policy or LoadPolicy(), storage_options
        self._checkpoint: Checkpoint | None = None
        self.report, self.load_id = LoadReport(), _new_load_id()

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """DCP calls this before a load with `checkpoint_id`. Nothing is read yet: of an error the other ranks would not learn."""
        self._url, self._checkpoint = checkpoint_id or self._url or "", None
        self.report, self.load_id = LoadReport(), _new_load_id()

    @property
    def checkpoint_id(self) -> str:
        """URL@STEP of the checkpoint that was opened; until then what was given."""
        return str(self._url or "") if self._checkpoint is None else str(self._checkpoint)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint being read."""
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self._url or "", storage_options=self._storage_options)
        return self._checkpoint

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The manifest as DCP's `Metadata`."""
        # The bytes come from dcp_metadata and a checked manifest; nothing from a store is unpickled here.
        manifest = replace(self.checkpoint.manifest, structure=nesting(self.checkpoint))
        metadata: Metadata = pickle.loads(dcp_metadata(manifest))  # noqa: S301
        metadata.state_dict_metadata = WithSubclasses(metadata.state_dict_metadata, self.checkpoint, self._policy.allow)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=manifest.attempt, load_id=self.load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank found."""
        return replace(plan, storage_data=(str(self.checkpoint), self.checkpoint.manifest.attempt))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """CheckpointError if the ranks found different ones: a save may commit while they look for the newest."""
        found = {plan.storage_data: rank for rank, plan in enumerate(plans) if plan.storage_data is not None}
        if len(found) > 1:
            shown = ", ".join(f"rank {rank}: {url} ({attempt})" for (url, attempt), rank in found.items())
            raise CheckpointError(f"the ranks found different checkpoints ({shown}); name the step: URL@STEP")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read ranges straight into the planner's tensors, checking digests as the policy asks."""
        reads = ReadPlan(self.checkpoint, self._policy, self.report)
        add_subclasses(reads, plan, planner)
        targets, lossy = [], dict[str, str]()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                load_value(self.checkpoint, item, planner, self._policy)
                continue
            if item.storage_index.fqn not in self.checkpoint.manifest.by_fqn:
                continue
            target = planner.resolve_tensor(item).detach()
            origin = item.storage_index.offset or (0,) * len(item.lengths)
            corner = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
            entry = self.checkpoint.manifest.by_fqn[item.storage_index.fqn]
            reads.add_local(entry, Box(corner, tuple(item.lengths)), target)
            targets.append((item, target))
            if TORCH_DTYPE[entry.dtype] != target.dtype:
                self.report.cast[entry.fqn] = f"{entry.dtype} -> {DTYPE_NAME.get(target.dtype, str(target.dtype))}"
                if not holds_every_value(TORCH_DTYPE[entry.dtype], target.dtype):
                    lossy[entry.fqn] = self.report.cast[entry.fqn]
        self._warn_lossy(lossy)
        reads.run()
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _warn_lossy(self, lossy: dict[str, str]) -> None:
        if lossy:
            shown = ", ".join(f"{fqn} ({cast})" for fqn, cast in sorted(lossy.items())[:SHOWN])
            log.warning(
                "%s: DCP's planner casts %d tensors to dtypes that may not hold their values: %s%s",
                self.checkpoint, len(lossy), shown, ", ..." if len(lossy) > SHOWN else "",
            )  # fmt: skip

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a URL on a store that can be opened; that shows whether it is a checkpoint."""
        return can_open(checkpoint_id)


def _new_load_id() -> str:
    return str(uuid.uuid4())
