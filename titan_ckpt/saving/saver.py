"""Saving: `Saver` stages a state in one copy, uploads it in the background and commits it when every rank is done.

The phases of one save, on each rank:

    plan      choose the boxes this rank writes; reused while no rank's state changes shape
    stage     copy into the arena; then `save` returns
    upload    from the arena to the store, on a thread
    commit    gather every rank's part, or its error, on the coordinator, which writes manifest, .metadata and COMMIT;
              broadcast the outcome (see `saving.commit`)
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

from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.format.commit import Before, found_before
from titan_ckpt.format.names import ASSETS, step_folder
from titan_ckpt.location import check_writable
from titan_ckpt.saving.agreement import Agreement, SavePlan
from titan_ckpt.saving.commit import Committer, Upload
from titan_ckpt.saving.incremental import KnownChunks
from titan_ckpt.saving.options import (
    GIVE_UP_AT,
    SaveAttempt,
    SaveHandle,
    SaveOptions,
    SaveReport,
    SaveRequest,
    SaverMetrics,
    no_steps,
)
from titan_ckpt.saving.second_tier import Mirror
from titan_ckpt.saving.staging import Arena, Direct, PayloadSource
from titan_ckpt.saving.upload import RankContents, RankFile, RankPart, UploadOptions, upload
from titan_ckpt.state.exchange import Failure, RankGroup, SaveError, failure_on, raise_failures
from titan_ckpt.state.state_dict import dump_object
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import run_until

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save on its way through the upload thread."""

    attempt: SaveAttempt
    plan: SavePlan
    source: PayloadSource
    objects: dict[str, bytes]
    paths: dict[str, tuple[str, ...]]
    stall_s: float


class Saver:
    """Saves the states of one run. Made, used and closed by all ranks together; a context manager.

    At most one upload is in flight: a `save` that comes too early waits for the previous one (and logs it), so that host memory
    stays at one copy of this rank's share. An upload error on any rank is raised by the next call.
    """

    def __init__(self, url: str | Store, options: SaveOptions | None = None) -> None:
        self._options = options or SaveOptions()
        for target in (url, self._options.mirror):
            if target is not None:
                check_writable(target.url if isinstance(target, Store) else target)
        self._store = url if isinstance(url, Store) else open_store(url)
        self._ranks = RankGroup(timeout_s=self._options.timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-upload")
        timeout_s, mirror = self._options.timeout_s, self._options.mirror
        self._mirror = None if mirror is None else Mirror(self._store, mirror, timeout_s=timeout_s)
        not_mirrored = no_steps if self._mirror is None else self._mirror.due
        self._committer = Committer(self._store, self._ranks, self._options, not_mirrored=not_mirrored)
        self._known = KnownChunks(is_incremental=self._options.incremental)
        self._agreement = Agreement(self._ranks, self._options.mesh)
        self._arena: Arena | None = None
        self._pending: SaveHandle | None = None
        self._uploaded_bytes = 0
        self._last_committed_step: int | None = None
        self._stall_s = 0.0

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
        kind: CheckpointKind | str = CheckpointKind.FULL,
        training: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Stage `state` and start its upload; returns when the tensors may be changed again. All ranks call it.

        `state` is nested mappings of tensors and plain values; keys joined by dots are the names. A DTensor is stored as its
        global tensor, every element once, and its placements are recorded if `SaveOptions.mesh` has its axes. `step` is the
        number of optimizer steps done, the same on all ranks.

        Raises the error of the previous save; SaveError on every rank if this save cannot start on one of them.
        `training`, `config` and `user` must be JSON; they and `assets` (small files by name) are taken from the coordinator.
        `kind="model"` marks an export, from which training never resumes by itself.
        """
        started = time.perf_counter()
        earlier = self._unreported_error()
        request = SaveRequest(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
        step = request.step
        with self._phase("ckpt_stage", step):
            job, tensors = self._prepare(state, request, earlier)
            if self._arena is None or self._arena.items != job.plan.items:
                self._arena = None  # free the old one before the new one is allocated
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
        kind: CheckpointKind | str = CheckpointKind.FULL,
        training: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> SaveReport:
        """Like `save`, but read the tensors in place, without a staged copy, and return after the commit."""
        started = time.perf_counter()
        earlier = self._unreported_error()
        request = SaveRequest(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
        job, _ = self._prepare(state, request, earlier)
        report = self._run(job)
        self._stall_s = time.perf_counter() - started
        return replace(report, stall_s=self._stall_s)

    def _prepare(
        self, state: Mapping[str, Any], request: SaveRequest, earlier: BaseException | None
    ) -> tuple[_Job, list[torch.Tensor]]:
        """The job, with the tensors themselves as its source, and those tensors: one per item of the plan."""
        agreed = self._agreement.reach(state, request, earlier)
        flat, plan = agreed.flat, agreed.plan
        tensors = [flat.tensors[item.fqn] for item in plan.items]
        attempt = SaveAttempt(
            name=agreed.attempt, request=request.redacted(), mesh=self._options.mesh, pipeline=self._options.pipeline
        )
        objects = {fqn: dump_object(value) for fqn, value in flat.objects.items()}
        source = Direct(tensors)
        job = _Job(attempt=attempt, plan=plan, source=source, objects=objects, paths=flat.paths, stall_s=0.0)
        return job, tensors

    def check(self) -> None:
        """Raise the error of a failed save: this rank's own, or SaveError with another rank's traceback. Call it every step."""
        if self._pending is not None and self._pending.future.done():
            self.wait()
        if self._mirror is not None:
            self._mirror.check()

    def wait(self) -> SaveReport | None:
        """Wait for the save in flight and raise its error; None if there is none, or if its handle was waited for."""
        pending, self._pending = self._pending, None
        return None if pending is None or pending.is_reported else pending.wait()

    def _unreported_error(self) -> BaseException | None:
        """Wait for the save in flight; its error if the caller does not know it yet."""
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001  (raised once the other ranks know)
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
        """Wait for the save in flight and for its mirror copy, raise their errors, release threads and process groups."""
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
        """The caller is failing: let an upload in flight end, but log its error, which must not replace the caller's."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_reported and (error := pending.future.exception()) is not None:
            log.error("the save of step %d failed as well: %s", pending.step, error)
        self._thread.shutdown()

    def _phase(self, name: str, step: int) -> AbstractContextManager[Any]:
        return nullcontext() if self._options.phase is None else self._options.phase(name, step)

    def _run(self, job: _Job) -> SaveReport:
        """Upload, commit and mirror one save; runs on the upload thread."""
        started_s, step = time.perf_counter(), job.attempt.step
        part: RankPart | Failure
        replaces: Before | None = None
        own_error: BaseException | None = None
        give_up_s, what = GIVE_UP_AT * self._options.timeout_s, f"uploading step {step}"
        try:
            with self._phase("ckpt_upload", step):
                part, replaces = run_until(give_up_s, partial(self._upload, job), self._store, what=what)
        except BaseException as error:  # noqa: BLE001  (raised below, once the other ranks know)
            own_error, part = error, failure_on(self._ranks)
        done = Upload(
            attempt=job.attempt, part=part, share=job.plan.share, paths=job.paths, replaces=replaces, started_s=started_s
        )  # fmt: skip
        with self._phase("ckpt_commit", step):
            outcome = self._committer.commit(done)
        if own_error is not None or outcome is not None:
            self._known.forget()
        if own_error is not None:
            raise own_error
        raise_failures([outcome], f"nothing was committed: the save of step {step}")
        assert isinstance(part, RankPart)
        if self._mirror is not None:
            self._mirror.add(step)
        self._last_committed_step = step
        self._known.remember(job.plan.items, part, step)
        return SaveReport(
            step=step,
            attempt=job.attempt.name,
            written_bytes=part.written_bytes,
            raw_bytes=part.raw_bytes,
            stall_s=job.stall_s,
            upload_s=time.perf_counter() - started_s,
        )

    def _upload(self, job: _Job, store: Store) -> tuple[RankPart, Before | None]:
        """This rank's part, and on the coordinator what the save replaces."""
        attempt, is_coordinator = job.attempt, self._ranks.is_coordinator
        replaces = found_before(store, attempt.step) if is_coordinator else None
        part = upload(
            store,
            RankContents(items=job.plan.items, source=job.source, objects=job.objects, own_objects=job.plan.objects),
            RankFile(step=attempt.step, attempt=attempt.name, rank=self._ranks.rank),
            UploadOptions(
                codec=self._options.codec, known=self._known.find(store, job.plan.items), on_bytes=self._count_bytes
            ),
        )
        if is_coordinator:
            for name, data in (attempt.request.assets or {}).items():
                store.write(f"{step_folder(attempt.step)}/{attempt.name}/{ASSETS}/{name}", [data])
        return part, replaces

    def _count_bytes(self, sent_bytes: int) -> None:
        self._uploaded_bytes += sent_bytes


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

    SaveError on every rank if one fails; its text has ConditionFailedError if another job committed this step meanwhile.
    """
    with Saver(url, replace(options or SaveOptions(), is_exclusive=False)) as saver:
        return saver.save_now(state, step=step, training=training, config=config, user=user)


__all__ = ["SaveError", "SaveHandle", "SaveOptions", "SaveReport", "Saver", "SaverMetrics", "save"]
