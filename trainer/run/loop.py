"""The training loop: batch, forward and backward, clip, check, update, measure, save; and the ends it can come to."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_ckpt.errors import TitanError
from titan_ckpt.trainer.data.batches import Batch, Loader, Microbatch
from titan_ckpt.trainer.parallel.optimizer import learning_rate
from titan_ckpt.trainer.run.gc_at_steps import Collector
from titan_ckpt.trainer.run.job import Job, Outcome
from titan_ckpt.trainer.run.meter import Meter, Step
from titan_ckpt.trainer.run.resume import Progress, live_state, training_record
from titan_ckpt.trainer.run.stop_signals import NOTHING, REASONS, SIGNAL

log = logging.getLogger(__name__)


class DivergedError(TitanError):
    """The gradient is no longer finite; the update was not made."""


class Loop:
    """One run of steps from `progress` on."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.saved_step = progress.step
        self.loss: float | None = None
        self.meter = Meter(job)
        self._skipped_in_a_row = 0
        self._side = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-logs")
        self._device = job.parallelized.ranks.device

    def run(self) -> Outcome:
        """Train until the last step, a signal or the time limit; the last checkpoint is committed on return."""
        job, config = self.job, self.job.config
        inspection = job.inspection
        loader = Loader(job.dataset, job.batch_shape, position=self.progress.samples, prefetch=config.data.prefetch)
        first_step, stop = self.progress.step, NOTHING
        try:
            with Collector(config.train.gc_every) as collector:
                while self.progress.step < config.train.steps and stop == NOTHING:
                    inspection.before(self.progress.step + 1)
                    stop = self._step(loader)
                    inspection.after(self.progress.step)
                    job.metrics.progress(self.progress.step)
                    collector.after(self.progress.step)
                    if self.progress.step == first_step + 1:
                        self._tighten_timeouts()
        finally:
            loader.close()
            inspection.close()
        job.agreement.limit(None)  # ranks may end their last uploads far apart
        return self._finish(stop)

    def _step(self, loader: Loader) -> int:
        """One optimizer step; returns the largest stop code of all ranks."""
        job, step = self.job, self.progress.step + 1
        started = time.perf_counter()
        with job.phases("data", step):
            batch = next(loader)
        local_loss = self._forward_backward(batch, step)
        lr, grad_norm = self._update(step)
        self.progress = self.progress.after(
            samples=job.config.train.global_batch_size,
            tokens=batch.valid_tokens,
            is_skipped=not math.isfinite(grad_norm),
        )
        done = Step(
            local_loss=local_loss, num_tokens=batch.num_tokens, valid_tokens=batch.valid_tokens, grad_norm=grad_norm, lr=lr
        )  # fmt: skip
        stop = self._measure(done, step, started)
        if job.config.validation.every and step % job.config.validation.every == 0:
            self._validate(step)
        if job.saver is not None:
            job.saver.check()
            if job.exporter is not None:
                job.exporter.poll(job.saver.metrics().last_committed_step)
            if job.config.save.every and step % job.config.save.every == 0:
                self._save()
        return stop

    def _forward_backward(self, batch: Batch, step: int) -> torch.Tensor:
        total = torch.zeros((), device=self._device)
        with self.job.phases("forward_backward", step):
            for microbatch in batch.microbatches:
                tokens_BL, labels_BL, documents_BL = self._on_device(microbatch)
                total += self.job.parallelized.forward_backward(
                    tokens_BL, labels_BL, global_valid_tokens=batch.valid_tokens, documents_BS=documents_BL
                )
        return total

    def _on_device(self, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        tokens_BL, labels_BL, documents_BL = (
            part if part is None else part.to(self._device, non_blocking=True)
            for part in (microbatch.tokens_BL, microbatch.labels_BL, microbatch.documents_BL)
        )
        assert tokens_BL is not None
        assert labels_BL is not None
        return tokens_BL, labels_BL, documents_BL

    def _update(self, step: int) -> tuple[float, float]:
        """Clip, look whether all is finite, update; the learning rate and the gradient norm, the same on every rank."""
        job, config = self.job, self.job.config
        lr = learning_rate(config.optimizer, step - 1, config.train.steps)
        with job.phases("optimizer", step):
            grad_norm = float(job.parallelized.clip_grad_norm(config.optimizer.grad_clip or math.inf))
            if math.isfinite(grad_norm):
                self._skipped_in_a_row = 0
                job.optimizer.step(lr)
            else:
                self._skip(step, grad_norm)
            job.optimizer.zero_grad()
        return lr, grad_norm

    def _skip(self, step: int, grad_norm: float) -> None:
        """Leave a step out, or end the run, as `optimizer.not_finite` says."""
        config, self._skipped_in_a_row = self.job.config.optimizer, self._skipped_in_a_row + 1
        what = f"step {step}: the gradient norm is {grad_norm}; samples {self.progress.samples} and following"
        if config.not_finite == "skip" and self._skipped_in_a_row <= config.max_skipped:
            log.warning("%s; no update is made, %d steps skipped so far", what, self.progress.skipped + 1)
            return
        tried = f", {config.max_skipped} steps before it too" if config.not_finite == "skip" else ""
        saved = (
            "no checkpoint was saved" if self.saved_step == 0 else f"the last checkpoint is of step {self.saved_step}"
        )
        raise DivergedError(
            f"{what}{tried}; {saved}. Lower optimizer.lr or optimizer.grad_clip, leave such steps out with "
            'optimizer.not_finite = "skip", or go on from an earlier step with resume.from = URL@STEP'
        )

    def _measure(self, done: Step, step: int, started: float) -> int:
        """Count the step, tell of it where it is due; returns the largest stop code of all ranks."""
        job = self.job
        is_logged = step % job.config.log.every == 0 or step == job.config.train.steps
        with job.phases("metrics", step):
            if is_logged:
                self.loss = float(job.parallelized.reduce_loss(done.local_loss)) / done.valid_tokens
            self.meter.add_step(time.perf_counter() - started)
            if self.loss is None or not is_logged:
                return int(job.agreement.largest([job.stop.code])[0])
            return self.meter.tell(done, self.progress, self.loss)

    def _validate(self, step: int) -> None:
        job = self.job
        batch = job.dataset.held_out_batch(job.config.validation.samples, job.batch_shape)
        started = time.perf_counter()
        with job.phases("validation", step):
            total = torch.zeros((), device=self._device)
            for microbatch in batch.microbatches:
                tokens_BL, labels_BL, documents_BL = self._on_device(microbatch)
                total += job.parallelized.forward_loss(tokens_BL, labels_BL, documents_BS=documents_BL)
            loss = float(job.parallelized.reduce_loss(total)) / batch.valid_tokens
        seconds = time.perf_counter() - started
        log.info("step %d  validation loss %.4f over %d tokens (%.1f s)", step, loss, batch.valid_tokens, seconds)
        job.metrics.event("validation", step=step, loss=loss, tokens=batch.valid_tokens, seconds=seconds)

    def _save(self) -> None:
        """Start a save of this step; returns when the tensors may change again."""
        job, config, progress = self.job, self.job.config, self.progress
        assert job.saver is not None
        lr = learning_rate(config.optimizer, progress.step, config.train.steps)
        record = training_record(progress, fingerprint=job.dataset.fingerprint, seed=config.train.seed, lr=lr)
        pending = job.saver.save(
            live_state(job.parallelized, job.optimizer),
            step=progress.step, training=record, config=job.config_record, assets=job.assets,
        )  # fmt: skip
        self.saved_step = progress.step
        self.meter.add_stall(pending.stall_s)
        log.info("step %d: saving; training went on after %.2f s", progress.step, pending.stall_s)
        job.metrics.event("save", step=progress.step, stall_s=pending.stall_s)
        self._side.submit(job.upload_logs)

    def _finish(self, stop: int) -> Outcome:
        """The last checkpoint, committed; then say how it ended."""
        job, committed = self.job, None
        reason = REASONS.get(stop, "completed")
        if stop == SIGNAL:
            log.warning(
                "%s received: saving a last checkpoint at step %d",
                job.stop.name or "a signal on another rank",
                self.progress.step,
            )
        if job.saver is not None:
            if self.saved_step != self.progress.step and (job.config.save.at_end or stop):
                self._save()
            job.saver.wait()
            committed = job.saver.metrics().last_committed_step
        self._side.shutdown()
        outcome = Outcome(
            reason=reason, step=self.progress.step, committed_step=committed, loss=self.loss,
            is_of_another=stop == SIGNAL and not job.stop.name,
        )  # fmt: skip
        job.metrics.event("end", reason=reason, step=outcome.step, committed_step=committed, loss=self.loss)
        log.info(
            "%s at step %d; %s",
            reason,
            outcome.step,
            "nothing saved" if committed is None else f"step {committed} is committed",
        )
        return outcome

    def _tighten_timeouts(self) -> None:
        """Compilation and warm-up are over: from now on a collective that takes long is a fault."""
        limits, parallelized = self.job.config.train, self.job.parallelized
        self.job.agreement.limit(limits.step_timeout_s)
        if dist.get_world_size() == 1 or limits.step_timeout_s == limits.init_timeout_s:
            return
        ranks = parallelized.ranks
        others = [group for group in (ranks.cp_group, parallelized.tied_group) if group is not None]
        for group in (None, *others, *ranks.device_mesh.get_all_groups()):
            _set_pg_timeout(timedelta(seconds=limits.step_timeout_s), group)
