"""Saving: `Saver` stages a state in one copy, uploads it behind the training loop and commits it when every rank is done.

The states of one save, on each rank:

    plan      which boxes this rank writes; agreed once, then reused while nobody's state changes shape
    stage     copy into the arena; when this ends, `save` returns
    upload    the arena to the store, on a thread
    gather    every rank's part list, or its error, to the coordinator
    commit    manifest, .metadata, COMMIT by the coordinator; everybody learns the outcome
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import check_files, open_checkpoint
from titan_ckpt.errors import CheckpointError, NotCommittedError, TitanError
from titan_ckpt.format.commit import commit_version, write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.names import ASSETS, step_folder
from titan_ckpt.location import redact_text, redact_values
from titan_ckpt.saving.agreement import Agreement, SavePlan
from titan_ckpt.saving.incremental import known_of_checkpoint, known_of_save
from titan_ckpt.saving.merge_parts import Saved, merge
from titan_ckpt.saving.options import Kind, SaveHandle, SaveOptions, SaveReport, SaverMetrics
from titan_ckpt.saving.second_tier import Mirror
from titan_ckpt.saving.staging import Arena, Direct, Source
from titan_ckpt.saving.upload import Known, Part, UploadOptions, part_chunks, upload
from titan_ckpt.state.exchange import Failure, RankGroup, SaveError, failure_on, raise_failures
from titan_ckpt.state.state_dict import LocalShard, dump_object
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import run_until
from titan_ckpt.upkeep.deletion import apply_retention
from titan_ckpt.upkeep.ownership import check_claim, claim

log = logging.getLogger(__name__)
# Parts of `timeout_s`: a rank whose store hangs must still tell the others before they stop waiting for it.
GIVE_UP_AT, COMMIT_BY = 0.8, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a caller gave with the state."""

    step: int
    kind: Kind
    training: Mapping[str, Any] | None
    config: Mapping[str, Any] | None
    assets: Mapping[str, bytes] | None
    user: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one save carries to its upload thread."""

    step: int
    attempt: str
    kind: Kind
    plan: SavePlan
    source: Source
    objects: dict[str, bytes]
    paths: dict[str, tuple[str, ...]]
    training: Mapping[str, Any]
    config: Mapping[str, Any]
    assets: Mapping[str, bytes]
    user: Mapping[str, Any]
    stall_s: float


class Saver:
    """Saves the states of one run. Made, used and closed by all ranks together; a context manager.

    One upload is in flight at most: a `save` that comes too early waits for the one before (and says so), so that host memory
    stays at one copy of this rank's share. An error of the upload, on any rank, is raised by the next call here.
    """

    def __init__(self, url: str | Store, options: SaveOptions | None = None) -> None:
        self._options = options or SaveOptions()
        self._store = url if isinstance(url, Store) else open_store(url)
        self._ranks = RankGroup(timeout_s=self._options.timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-upload")
        timeout_s, mirror = self._options.timeout_s, self._options.mirror
        self._mirror = None if mirror is None else Mirror(self._store, mirror, timeout_s=timeout_s)
        self._known: Known | None = None
        self._claim = self._take_over() if self._options.is_exclusive else None
        self._agreement = Agreement(self._ranks, self._options.mesh)
        self._arena: Arena | None = None
        self._pending: SaveHandle | None = None
        self._uploaded_bytes = 0
        self._last_committed_step: int | None = None
        self._stall_s = 0.0

    def _take_over(self) -> str | None:
        """The coordinator's claim; a store that cannot be written is found out here, by every rank."""
        token: str | None = None
        failure: Failure | None = None
        error: Exception | None = None
        if self._ranks.is_coordinator:
            try:
                token = run_until(GIVE_UP_AT * self._options.timeout_s, claim, self._store, what="claiming the run")
            except Exception as caught:  # noqa: BLE001  (it is raised below, after the others have been told)
                error, failure = caught, Failure(self._ranks.rank, redact_text(str(caught)))
        told = self._ranks.broadcast(failure)
        if error is not None:
            raise error
        raise_failures([told], f"the first write to {self._store}")
        return token

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        kind: Kind = "full",
        training: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Stage `state` and start its upload; returns when the tensors may be changed again. All ranks call it.

        `state` is nested mappings of tensors and plain values; keys joined by dots are the names. A DTensor is stored as its
        global tensor, every element once, and how it is cut is recorded where `SaveOptions.mesh` has its axes. `step` is the
        number of optimizer steps done, the same on all ranks.

        Raises what went wrong with the save before it, and SaveError on every rank where this one cannot begin on one of them.
        `training`, `config` and `user` must be JSON; the coordinator's count, as its `assets` (small files by name) do.
        `kind="model"` marks an export that must never be taken for a checkpoint to resume from.
        """
        started = time.perf_counter()
        earlier = self._untold_error()
        asked = _Asked(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
        with self._phase("ckpt_stage", step):
            job, tensors = self._prepare(state, asked, earlier)
            if self._arena is None or self._arena.items != job.plan.items:
                self._arena = None  # the old one goes before the new one comes
                self._arena = Arena(job.plan.items, is_pinned=any(tensor.is_cuda for tensor in tensors))
            self._arena.stage(tensors)
        self._stall_s = time.perf_counter() - started
        job = replace(job, source=self._arena, stall_s=self._stall_s)
        self._pending = SaveHandle(step=step, stall_s=self._stall_s, future=self._thread.submit(self._run, job))
        return self._pending

    def save_now(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        kind: Kind = "full",
        training: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> SaveReport:
        """Like `save`, but read the tensors where they are, without a staged copy, and return when it is committed."""
        started = time.perf_counter()
        earlier = self._untold_error()
        asked = _Asked(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
        job, _ = self._prepare(state, asked, earlier)
        report = self._run(job)
        self._stall_s = time.perf_counter() - started
        return replace(report, stall_s=self._stall_s)

    def _prepare(
        self, state: Mapping[str, Any], asked: _Asked, earlier: BaseException | None
    ) -> tuple[_Job, list[torch.Tensor]]:
        """The job, its source the tensors themselves, and those tensors: one per item of the plan."""
        agreed = self._agreement.reach(state, asked.step, earlier)
        flat, plan = agreed.flat, agreed.plan
        tensors = [flat.tensors[item.fqn] for item in plan.items]
        job = _Job(
            step=asked.step, attempt=agreed.attempt, kind=asked.kind, plan=plan, source=Direct(tensors),
            objects={fqn: dump_object(value) for fqn, value in flat.objects.items()}, paths=flat.paths,
            training=redact_values(asked.training or {}), config=redact_values(asked.config or {}),
            assets=asked.assets or {}, user=redact_values(asked.user or {}), stall_s=0.0,
        )  # fmt: skip
        return job, tensors

    def check(self) -> None:
        """Raise the error of a save that failed: this rank's own, or SaveError with another's traceback. For every step."""
        if self._pending is not None and self._pending.future.done():
            self.wait()
        if self._mirror is not None:
            self._mirror.check()

    def wait(self) -> SaveReport | None:
        """Wait for the save in flight and raise its error; None if there is none, or if its handle has told the outcome."""
        pending, self._pending = self._pending, None
        return None if pending is None or pending.is_told else pending.wait()

    def _untold_error(self) -> BaseException | None:
        """Wait for the save in flight; its error if nobody was told of it yet."""
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001  (raised when the other ranks have heard of it)
            return error
        return None

    def metrics(self) -> SaverMetrics:
        """Counters for a training log."""
        return SaverMetrics(
            uploaded_bytes=self._uploaded_bytes,
            last_committed_step=self._last_committed_step,
            stall_s=self._stall_s,
            is_uploading=self._pending is not None and not self._pending.future.done(),
            last_mirrored_step=None if self._mirror is None else self._mirror.metrics().last_mirrored_step,
        )

    def close(self) -> None:
        """Wait for the save in flight and for its copy in the second tier, raise their errors, give threads and groups back."""
        try:
            self.wait()
        finally:
            try:
                if self._mirror is not None:
                    self._mirror.close()
            finally:
                self._thread.shutdown()
                self._ranks.close()

    def _abandon(self) -> None:
        """The caller is failing: let an upload in flight end if it can, but do not hide the caller's error behind its."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_told and (error := pending.future.exception()) is not None:
            log.error("the save of step %d failed as well: %s", pending.step, error)
        self._thread.shutdown()

    def _phase(self, name: str, step: int) -> AbstractContextManager[Any]:
        return nullcontext() if self._options.phase is None else self._options.phase(name, step)

    def _run(self, job: _Job) -> SaveReport:
        """The upload thread's work."""
        started = time.perf_counter()
        part: Part | Failure
        previous: str | None = None
        own_error: BaseException | None = None
        what = f"uploading step {job.step}"
        try:
            with self._phase("ckpt_upload", job.step):
                give_up_s = GIVE_UP_AT * self._options.timeout_s
                part, previous = run_until(give_up_s, partial(self._upload, job), self._store, what=what)
        except BaseException as error:  # noqa: BLE001  (it is raised below, after the others have been told)
            own_error = error
            part = failure_on(self._ranks)
        with self._phase("ckpt_commit", job.step):
            parts = self._ranks.gather(part)
            outcome = self._ranks.broadcast(
                self._commit_in_time(job, parts, previous, started) if self._ranks.is_coordinator else None
            )
            if outcome is None and self._ranks.is_coordinator:
                self._retire(job.step)
        if own_error is not None or outcome is not None:
            self._known = None  # what an earlier checkpoint holds may have been what failed: look again
        if own_error is not None:
            raise own_error
        raise_failures([outcome], f"nothing was committed: the save of step {job.step}")
        assert isinstance(part, Part)
        if self._mirror is not None:
            self._mirror.add(job.step)
        self._last_committed_step = job.step
        if self._options.incremental:
            self._known = known_of_save(job.plan.items, part_chunks(part), job.step)
        return SaveReport(
            step=job.step,
            attempt=job.attempt,
            written_bytes=part.written_bytes,
            raw_bytes=part.raw_bytes,
            stall_s=job.stall_s,
            upload_s=time.perf_counter() - started,
        )

    def _upload(self, job: _Job, store: Store) -> tuple[Part, str | None]:
        """This rank's part, and on the coordinator the version of the commit that the new one will replace."""
        previous = commit_version(store, job.step) if self._ranks.is_coordinator else None
        part = upload(
            store, job.plan.items, job.source, step=job.step, attempt=job.attempt, rank=self._ranks.rank,
            objects=job.objects, mine=job.plan.objects, sent=self._count,
            options=UploadOptions(codec=self._options.codec, known=self._known_chunks(store, job.plan.items)),
        )  # fmt: skip
        if self._ranks.is_coordinator:
            for name, data in job.assets.items():
                store.write(f"{step_folder(job.step)}/{job.attempt}/{ASSETS}/{name}", [data])
        return part, previous

    def _known_chunks(self, store: Store, items: list[LocalShard]) -> Known:
        """What need not be written: of this saver's last save, or at its first of the newest checkpoint in the run."""
        if self._options.incremental and self._known is None:
            try:
                self._known = known_of_checkpoint(open_checkpoint(store.url, store=store), items)
            except NotCommittedError:
                self._known = {}
            except CheckpointError as error:
                log.warning("nothing is referred to, everything is written: %s", error)
                self._known = {}
        return self._known or {}

    def _count(self, sent_bytes: int) -> None:
        self._uploaded_bytes += sent_bytes

    def _retire(self, step: int) -> None:
        if self._options.retention is None:
            return
        keep = (self._mirror.waiting() if self._mirror is not None else frozenset()) | self._options.in_use() | {step}
        action = partial(apply_retention, policy=self._options.retention, keep=keep)
        try:
            run_until(GIVE_UP_AT * self._options.timeout_s, action, self._store, what="deleting old checkpoints")
        except TitanError as error:
            log.warning("the save of step %d stands, but: %s", step, error)

    def _commit_in_time(
        self, job: _Job, parts: list[Part | Failure], previous: str | None, started: float
    ) -> Failure | None:
        """Commit on the coordinator while the other ranks wait; a failure is returned, so that every rank hears of it."""
        timeout_s = self._options.timeout_s
        rest_s = max(COMMIT_BY * timeout_s - (time.perf_counter() - started), (COMMIT_BY - GIVE_UP_AT) * timeout_s)
        action, what = (
            partial(self._commit, job, parts, previous),
            f"committing step {job.step}, which may still appear",
        )
        try:
            return run_until(rest_s, action, self._store, what=what)
        except Exception:  # noqa: BLE001  (reported to every rank)
            return failure_on(self._ranks)

    def _commit(self, job: _Job, parts: list[Part | Failure], previous: str | None, store: Store) -> Failure | None:
        failures = [part for part in parts if isinstance(part, Failure)]
        if failures:
            return Failure(failures[0].rank, "\n".join(failure.text for failure in failures))
        assert job.plan.share is not None
        saved = Saved(
            step=job.step, attempt=job.attempt, kind=job.kind, mesh=self._options.mesh,
            pipeline=self._options.pipeline, training=job.training, config=job.config, user=job.user,
            assets={name: digest(data).hex() for name, data in job.assets.items()},
        )  # fmt: skip
        manifest = merge(saved, [part for part in parts if isinstance(part, Part)], job.plan.share)
        folder = step_folder(job.step)
        check_files(Checkpoint(store=store, url=store.url, step=job.step, folder=folder, manifest=manifest))
        if self._claim is not None:
            check_claim(store, self._claim)
        write_commit(store, manifest, dcp_metadata(manifest, paths=job.paths), replaces=previous)
        return None


def save(
    url: str | Store,
    state: Mapping[str, Any],
    *,
    step: int,
    options: SaveOptions | None = None,
    training: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Save and commit before returning, without claiming the run. All ranks call it; see `Saver.save` for the arguments.

    SaveError on every rank where one fails; ConditionFailedError in it where another job committed this step meanwhile.
    """
    with Saver(url, replace(options or SaveOptions(), is_exclusive=False)) as saver:
        return saver.save_now(state, step=step, training=training, config=config, user=user)


__all__ = ["Kind", "SaveError", "SaveHandle", "SaveOptions", "SaveReport", "Saver", "SaverMetrics", "save"]
