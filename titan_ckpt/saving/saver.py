"""Saving: `Saver` stages a state in one copy, uploads it in the background and commits it when every rank is done.

The phases of one save, on each rank:

    prepare   flatten, check and serialise what this rank has
    plan      tell all ranks of any failure, choose the boxes this rank writes; reused while no rank's state changes shape
    stage     copy into the arena, fingerprint what other ranks hold too; then `save` returns
    upload    from the arena to the store, on a thread
    commit    gather every rank's part, or its error, on the coordinator, which writes manifest, .metadata and COMMIT;
              broadcast the outcome (see `saving.commit`)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.errors import SaveError
from titan_ckpt.format.commit import Before, found_before
from titan_ckpt.format.names import ASSETS, step_folder
from titan_ckpt.location import StrPath
from titan_ckpt.saving.agreement import Agreed, Agreement, Prepared, prepare
from titan_ckpt.saving.apart.uploader import start_on_all, uploader_for
from titan_ckpt.saving.commit import Committer, Upload
from titan_ckpt.saving.incremental import KnownChunks
from titan_ckpt.saving.job import SaveJob, report_of
from titan_ckpt.saving.options import (
    GIVE_UP_AT,
    SaveAttempt,
    SaveHandle,
    SaveOptions,
    SaveReport,
    SaveRequest,
    SaverMetrics,
)
from titan_ckpt.saving.pace import fitting_pace
from titan_ckpt.saving.replicas import Replicas
from titan_ckpt.saving.second_tier import Mirror
from titan_ckpt.saving.staging import Copies, Staging, warn_expanded
from titan_ckpt.saving.tiers import open_tiers
from titan_ckpt.saving.turns import Turns
from titan_ckpt.saving.upload import RankContents, RankFile, RankPart, UploadOptions
from titan_ckpt.state.exchange import Failure, RankGroup, failure_of, raise_failures
from titan_ckpt.state.modes import without_modes
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, current_settings, using
from titan_ckpt.store.time_limit import run_until

log = logging.getLogger(__name__)


class Saver:
    """Saves the states of one run. Made, used and closed by all ranks together; a context manager.

    At most one upload is in flight: a `save` that comes too early waits for the previous one (and logs it), so that host memory
    stays at one copy of this rank's share. An upload error on any rank is raised by the next call.
    Threads take turns. UsageError for a call from a hook or callback of a save, from a forked child, or after `close`.
    """

    def __init__(
        self, url: StrPath | Store, options: SaveOptions | None = None, *, storage_options: Options = None
    ) -> None:
        check_type(options, "options", SaveOptions, or_none=True, hint="SaveOptions(...)")
        self._options = options or SaveOptions()
        with using(storage_options, url, self._options.mirror):
            self._uploader = uploader_for(url, current_settings(), is_process=self._options.upload_process)
        self._ranks = RankGroup(timeout_s=self._options.timeout_s)
        self._store, mirror = open_tiers(self._ranks, url, self._options.mirror, storage_options)
        # Every exchange between ranks runs on this thread: they cannot mix, and no signal interrupts one half-way.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-upload")
        self._turns = Turns(own_thread=self._thread.submit(threading.get_ident).result())
        start_on_all(self._ranks, self._uploader, self._thread)
        self._mirror = None if mirror is None else Mirror(self._store, mirror, self._options)
        self._committer = Committer(self._store, self._ranks, self._options, mirror=self._mirror)
        self._known = KnownChunks(is_incremental=self._options.incremental)
        self._agreement = Agreement(self._ranks, self._options.mesh, replicas=Replicas(self._options.replicas))
        self._staging = Staging(is_shared=self._options.upload_process)
        self._pending: SaveHandle | None = None
        self._running: Future[Any] | None = None
        self._uploaded_bytes = 0
        self._last_committed_step: int | None = None
        self._stall_s, self._said = 0.0, set[str]()

    def __enter__(self) -> Saver:
        self._turns.check("with saver")
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
        with self._turns.taken("save"):
            started = time.perf_counter()
            request = SaveRequest(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
            _, handle = self._begin(state, request, is_staged=True)
            self._stall_s = handle.stall_s = time.perf_counter() - started
            self._pending = handle
            return handle

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
        with self._turns.taken("save_now"):
            started = time.perf_counter()
            request = SaveRequest(step=step, kind=kind, training=training, config=config, assets=assets, user=user)
            job, handle = self._begin(state, request, is_staged=False)
            try:
                report = handle.wait()
            except BaseException:
                job.cancel()  # an interrupted caller may change the tensors while they are read
                raise
            self._stall_s = time.perf_counter() - started
            return replace(report, stall_s=self._stall_s)

    def _begin(self, state: Mapping[str, Any], request: SaveRequest, *, is_staged: bool) -> tuple[SaveJob, SaveHandle]:
        """Agree with the other ranks, stage, start the upload. If this rank fails, whenever that is, all ranks learn of it."""
        started, job = time.perf_counter(), None
        with ExitStack() as phase, without_modes():
            try:
                earlier = self._unreported_error()
                mine, error = self._prepare(state, request, earlier, phase if is_staged else None)
                reached = self._thread.submit(self._agreement.reach, request.step, mine, error)
                try:
                    agreed = reached.result()
                except SaveError:
                    if error is not None and (error is earlier or not isinstance(error, Exception)):
                        raise error from None
                    raise
                assert mine is not None
                job = self._job(mine, agreed, is_staged=is_staged)
                phase.close()
                job = replace(job, stall_s=time.perf_counter() - started)
                handle = SaveHandle(step=request.step, stall_s=job.stall_s, future=Future(), hurry=job.pace.lift)
                self._running = job.running = handle.future = self._thread.submit(self._run, job)
                return job, handle
            except BaseException as error:
                if job is not None and job.running is not None:
                    job.cancel()
                else:
                    self._running = self._thread.submit(self._refuse, request.step, error)
                raise

    def _prepare(
        self, state: Mapping[str, Any], request: SaveRequest, earlier: BaseException | None, phase: ExitStack | None
    ) -> tuple[Prepared | None, BaseException | None]:
        """What this rank can do before the ranks agree, or the error that it will tell them."""
        if earlier is not None:
            return None, earlier
        try:
            if phase is not None:
                phase.enter_context(self._phase("ckpt_stage", request.step))
            mine = prepare(state, request)
            warn_expanded(mine.flat.tensors.items(), self._said)
            return mine, None
        except BaseException as error:  # noqa: BLE001  (raised once the other ranks know)
            return None, error

    def _job(self, mine: Prepared, agreed: Agreed, *, is_staged: bool) -> SaveJob:
        """Stage this rank's share, or take the tensors themselves as the source of its bytes."""
        plan, tensors = agreed.plan, [mine.flat.tensors[item.fqn] for item in agreed.plan.items]
        copies = Copies([mine.flat.tensors[item.fqn] for item in mine.items], plan.copies)
        source = self._staging.source(plan.items, tensors, is_staged=is_staged)
        asked = self._options.upload_bytes_per_s if is_staged else None
        pace = fitting_pace(asked, plan.items, give_up_s=GIVE_UP_AT * self._options.timeout_s, said=self._said)
        attempt = SaveAttempt(
            name=agreed.attempt, request=mine.request, mesh=self._options.mesh, pipeline=self._options.pipeline
        )
        return SaveJob(attempt=attempt, plan=plan, source=source, copies=copies, objects=mine.objects, pace=pace)

    def _refuse(self, step: int, error: BaseException) -> None:
        """Tell the other ranks of an `error` here, unless they know; runs on the upload thread, after what was under way."""
        try:
            self._known.forget()
            if not self._agreement.is_reached:
                self._agreement.finish(step, error)
            if self._agreement.is_reached:
                self._committer.finish(failure_of(self._ranks.rank, error), step)
        finally:
            self._end()

    def _end(self) -> None:
        """The save is over on this rank, one way or the other."""
        self._agreement.end()
        self._committer.end()

    def check(self) -> None:
        """Raise the error of a failed save: this rank's own, or SaveError with another rank's traceback. Call it every step."""
        self._turns.check("check")
        if self._pending is not None and self._pending.future.done():
            self.wait()
        if self._mirror is not None:
            self._mirror.check()

    def wait(self) -> SaveReport | None:
        """Wait for the save in flight and raise its error; None if there is none, or if its handle was waited for."""
        self._turns.check("wait")
        pending, self._pending = self._pending, None
        return None if pending is None or pending.is_reported else pending.wait()

    def _unreported_error(self) -> BaseException | None:
        """Wait until nothing is in flight; the error of the last save if the caller does not know it yet."""
        try:
            if self._pending is not None:
                self._pending.hurry()
            if self._running is not None:
                self._running.exception()
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
        if self._turns.is_forked:
            return
        with ExitStack() as last:
            last.callback(self._ranks.close)
            last.callback(self._uploader.end)
            last.callback(self._thread.shutdown)
            if self._mirror is not None:
                last.callback(self._mirror.close)
            last.callback(setattr, self._turns, "is_closed", True)
            if not self._turns.is_closed:
                self.wait()

    def _abandon(self) -> None:
        """The caller is failing: let an upload in flight end, but log its error, which must not replace the caller's."""
        if self._turns.is_forked:
            return
        self._turns.is_closed = True
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.hurry()
            if not pending.is_reported and (error := pending.future.exception()) is not None:
                log.error("the save of step %d failed as well: %s", pending.step, error)
        self._thread.shutdown()
        self._uploader.end()

    def _phase(self, name: str, step: int) -> AbstractContextManager[Any]:
        return nullcontext() if self._options.phase is None else self._options.phase(name, step)

    def _run(self, job: SaveJob) -> SaveReport:
        """Upload, commit and mirror one save; runs on the upload thread. Whatever fails here, the other ranks learn of it.

        After the commit the step is saved on every rank: an error is logged, and cannot undo it.
        """
        try:
            self._upload_and_commit(job)
        except BaseException as error:
            self._known.forget()
            failure, step = failure_of(self._ranks.rank, error), job.attempt.step
            self._committer.finish(failure, step)
            if not self._committer.is_committed:
                raise
            log.error("step %d is saved; what follows a commit failed: %s", step, failure.text)
            self._note_commit(job)
        finally:
            self._end()
        assert job.report is not None
        return job.report

    def _upload_and_commit(self, job: SaveJob) -> None:
        started_s, step = time.perf_counter(), job.attempt.step
        part, replaces, error = self._uploaded(job)
        with ExitStack() as phase:
            try:
                phase.enter_context(self._phase("ckpt_commit", step))
                if isinstance(part, RankPart):
                    job.report = report_of(job, part, time.perf_counter() - started_s)
            except BaseException as caught:  # noqa: BLE001  (raised below, once the other ranks know)
                part, error = failure_of(self._ranks.rank, caught), error or caught
            outcome = self._committer.commit(
                Upload(attempt=job.attempt, part=part, share=job.plan.share, replaces=replaces, started_s=started_s)
            )
            if error is not None:
                raise error
            raise_failures([outcome], f"nothing was committed: the save of step {step}")
            assert isinstance(part, RankPart)
            self._note_commit(job)
            phase.close()
            self._known.remember(job.plan.items, part, step)
            job.report = report_of(job, part, time.perf_counter() - started_s)

    def _note_commit(self, job: SaveJob) -> None:
        """Count a committed step and give it to the mirror, once: the mirror copies only what every rank gives it."""
        self._last_committed_step = job.attempt.step
        if self._mirror is not None and not job.is_with_mirror:
            self._mirror.add(job.attempt.step)
        job.is_with_mirror = True

    def _uploaded(self, job: SaveJob) -> tuple[RankPart | Failure, Before | None, BaseException | None]:
        """This rank's part, or its error and what the other ranks hear of it; and the commit to replace."""
        step, give_up_s = job.attempt.step, GIVE_UP_AT * self._options.timeout_s
        try:
            self._uploader.start()
            with self._phase("ckpt_upload", step):
                what = f"uploading step {step}"
                part, replaces = run_until(give_up_s, partial(self._upload, job), self._store, what=what)
            if job.is_cancelled.is_set():
                raise SaveError(f"nothing was committed: the save of step {step} was interrupted")
        except BaseException as error:  # noqa: BLE001  (raised by the caller, once the other ranks know)
            job.pace.stop()  # an upload that was given up writes no more
            self._uploader.end()
            return failure_of(self._ranks.rank, error), None, error
        return part, replaces, None

    def _upload(self, job: SaveJob, store: Store) -> tuple[RankPart, Before | None]:
        """This rank's part, and on the coordinator what the save replaces."""
        attempt, is_coordinator = job.attempt, self._ranks.is_coordinator
        replaces = found_before(store, attempt.step) if is_coordinator else None
        contents = RankContents(
            items=job.plan.items, source=job.source, objects=job.objects, own_objects=job.plan.objects,
            copies=job.copies.digests,
        )  # fmt: skip
        target = RankFile(step=attempt.step, attempt=attempt.name, rank=self._ranks.rank)
        known = self._known.find(store, job.plan.items)
        options = UploadOptions(codec=self._options.codec, known=known, on_bytes=self._count_bytes)
        part = self._uploader.upload(store, contents, target, options, job.pace)
        if is_coordinator:
            for name, data in (attempt.request.assets or {}).items():
                store.write(f"{step_folder(attempt.step)}/{attempt.name}/{ASSETS}/{name}", [data])
        return part, replaces

    def _count_bytes(self, sent_bytes: int) -> None:
        self._uploaded_bytes += sent_bytes


def save(
    url: StrPath | Store,
    state: Mapping[str, Any],
    *,
    step: int,
    options: SaveOptions | None = None,
    training: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
    storage_options: Options = None,
) -> SaveReport:
    """Save and commit before returning, without claiming the run. All ranks call it; see `Saver.save` for the arguments.

    SaveError on every rank if one fails; its text has ConditionFailedError if another job committed this step meanwhile.
    """
    check_type(options, "options", SaveOptions, or_none=True, hint="SaveOptions(...)")
    options = replace(options or SaveOptions(), is_exclusive=False, upload_process=False)  # it would only be waited for
    with Saver(url, options, storage_options=storage_options) as saver:
        return saver.save_now(state, step=step, training=training, config=config, user=user)


__all__ = ["SaveError", "SaveHandle", "SaveOptions", "SaveReport", "Saver", "SaverMetrics", "save"]
