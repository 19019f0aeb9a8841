"""The training loop: batch, forward and backward, clip, check, update, measure, save; and its exit conditions."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_ckpt.errors import TitanError
from titan_ckpt.trainer.data.batches import Batch, BatchLoader
from titan_ckpt.trainer.job.job import EndReason, Job, Outcome
from titan_ckpt.trainer.job.meter import Meter, StepResult
from titan_ckpt.trainer.job.own_parts import run_own_step
from titan_ckpt.trainer.job.rank_process import Collector
from titan_ckpt.trainer.job.resume import TrainingProgress, live_state, model_record, training_record
from titan_ckpt.trainer.job.stop_signals import StopCode
from titan_ckpt.trainer.report.records import Event
from titan_ckpt.trainer.seams.boundary import refuse
from titan_ckpt.trainer.seams.loss import CrossEntropy, LossInModel, count_of

log = logging.getLogger(__name__)
END_REASONS = {
    StopCode.NONE: EndReason.COMPLETED,
    StopCode.TIME_LIMIT: EndReason.TIME_LIMIT,
    StopCode.SIGNAL: EndReason.SIGNAL,
}


def _line(numbers: Mapping[str, float]) -> str:
    """The numbers of a set for the log."""
    shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items() if name != "tokens")
    return f"{shown} over {numbers['tokens']:,.0f} tokens" if "tokens" in numbers else shown


class DivergedError(TitanError):
    """The gradient is not finite, so the step was not applied."""


class Loop:
    """Trains from `progress` on."""

    def __init__(self, job: Job, progress: TrainingProgress) -> None:
        self.job, self.progress = job, progress
        self.saved_step = progress.step
        self.loss: float | None = None
        self.meter = Meter(job)
        self._hooks = job.hooks
        self._skipped_in_a_row = 0
        self._side = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-logs")
        self._device = job.parallelized.ranks.device

    def run(self) -> Outcome:
        """Train until the last step, a signal or the time limit, and commit the last checkpoint."""
        job, config = self.job, self.job.config
        inspection = job.inspection
        shapes = map(job.batch_shape, itertools.count(self.progress.step + 1))
        loader = BatchLoader(job.dataset, shapes, position=self.progress.samples, prefetch=config.data.prefetch)
        first_step, stop = self.progress.step, StopCode.NONE
        try:
            with inspection.watching(), Collector(config.train.gc_every) as collector:
                while self.progress.step < config.train.steps and stop == StopCode.NONE:
                    inspection.before(self.progress.step + 1)
                    stop = self._step(loader)
                    inspection.after(self.progress.step)
                    job.metrics.progress(self.progress.step)
                    collector.after(self.progress.step)
                    if self.progress.step == first_step + 1:
                        self._tighten_timeouts()
        finally:
            loader.close()
        job.control.set_timeout(None)  # the ranks' last uploads may end far apart
        return self._finish(stop)

    def _step(self, loader: BatchLoader) -> StopCode:
        """One optimizer step; returns the largest stop code of all ranks."""
        job, step = self.job, self.progress.step + 1
        self._hooks.before_step(step)
        started = time.perf_counter()
        with job.phases("data", step):
            batch = next(loader)
            local_count, count = self._count(batch)
        local_loss = self._forward_backward(batch, count, step)
        lr, grad_norm = self._update(step)
        self.progress = self.progress.after(
            samples=job.config.train.batch_size(step),
            tokens=count,
            is_skipped=not math.isfinite(grad_norm),
        )
        done = StepResult(local_loss=local_loss, local_count=local_count, count=count, grad_norm=grad_norm, lr=lr)
        stop = self._measure(done, step, started)
        self._after(step, grad_norm, lr)
        if job.config.validation.every and step % job.config.validation.every == 0:
            self._validate(step)
        if job.saver is not None:
            job.saver.check()
            if job.exporter is not None:
                job.exporter.poll(job.saver.metrics().last_committed_step)
            if job.config.save.every and step % job.config.save.every == 0:
                self._save()
        return stop

    def _count(self, batch: Batch) -> tuple[int, int]:
        """The losses of a batch on this rank, and over all ranks, which is more than 0."""
        job, local = self.job, sum(count_of(self.job.loss, microbatch) for microbatch in batch.microbatches)
        copies = job.parallelized.mesh.world_size // job.parallelized.data_degree
        count = batch.count if type(job.loss) in (CrossEntropy, LossInModel) else None
        if count is None:
            count = round(job.control.all_reduce_sum([float(local)])[0]) // copies
        if not count:
            which = f"step {self.progress.step + 1}, samples {self.progress.samples} and following"
            refuse("Loss.count", job.loss, f"is 0 over the whole batch of {which}: nothing is learned there (labels?)")
        return local, count

    def _forward_backward(self, batch: Batch, count: int, step: int) -> torch.Tensor:
        total, own = torch.zeros((), device=self._device), self.job.config.extension.train_step
        with self.job.phases("forward_backward", step):
            self.job.optimizer.begin(self.job.config.rate(step - 1))
            if own is not None:
                mine = [self.job.prepare(microbatch) for microbatch in batch.microbatches]
                return run_own_step(own, mine, self.job.parallelized, count=count, step=step)
            for microbatch in batch.microbatches:
                total += self.job.parallelized.forward_backward(self.job.prepare(microbatch), count=count)
        return total

    def _update(self, step: int) -> tuple[float, float]:
        """Clip, check that the gradient is finite, update; returns learning rate and gradient norm, the same on every rank."""
        job, config = self.job, self.job.config
        lr = config.rate(step - 1)
        with job.phases("optimizer", step):
            self._hooks.after_backward(step, job.parallelized)
            max_norm = config.optimizer.grad_clip or math.inf
            grad_norm = float(job.parallelized.clip_grad_norm(max_norm, dropped=job.optimizer.dropped_squares))
            if math.isfinite(grad_norm):
                self._skipped_in_a_row = 0
                job.optimizer.step(lr)
            else:
                self._skip(step, grad_norm)
            job.optimizer.zero_grad()
        return lr, grad_norm

    def _after(self, step: int, grad_norm: float, lr: float) -> None:
        """Give the hooks the numbers of the step, and record theirs."""
        is_logged = self.loss is not None and self.job.config.is_logged(step)
        numbers = {"grad_norm": grad_norm, "lr": lr} | (
            {"loss": self.loss} if self.loss is not None and is_logged else {}
        )
        if own := self._hooks.after_step(step, numbers):
            self.job.metrics.event(Event.OWN, step=step, **own)

    def _skip(self, step: int, grad_norm: float) -> None:
        """Skip a step or end the run, according to `optimizer.not_finite`."""
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

    def _measure(self, done: StepResult, step: int, started: float) -> StopCode:
        """Count the step, and log it if due; returns the largest stop code of all ranks."""
        job = self.job
        is_logged = job.config.is_logged(step)
        with job.phases("metrics", step):
            if is_logged or step in job.loss_check.steps:
                self.loss = float(job.parallelized.reduce_loss(done.local_loss)) / done.count
                job.loss_check.check(step, self.loss)
            self.meter.add_step(time.perf_counter() - started)
            if self.loss is None or not is_logged:
                return StopCode(int(job.control.all_reduce_max([job.stop.code])[0]))
            return self.meter.write(done, self.progress, self.loss)

    def _validate(self, step: int) -> None:
        with self.job.phases("validation", step):
            for name, numbers, seconds in self.job.validation.run(step):
                what = {"set": name} if name else {}
                log.info(
                    "step %d  validation%s  %s (%.1f s)", step, f" of {name}" if name else "", _line(numbers), seconds
                )
                self.job.metrics.event(Event.VALIDATION, step=step, seconds=seconds, **numbers, **what)

    def _save(self) -> None:
        """Start saving this step; returns as soon as the tensors may change again."""
        job, config, progress = self.job, self.job.config, self.progress
        assert job.saver is not None
        lr = config.rate(progress.step)
        record = training_record(
            progress, fingerprint=job.dataset.fingerprint, seed=config.train.seed, lr=lr, rule=job.optimizer.name,
            frozen=job.frozen, model=model_record(config.spec, config.model),
        )  # fmt: skip
        pending = job.saver.save(
            live_state(job.parallelized, job.optimizer) | job.hooks.kept(),
            step=progress.step, training=record, config=job.config_record,
            assets=job.assets(),
        )  # fmt: skip
        self.saved_step = progress.step
        self.meter.add_stall(pending.stall_s)
        log.info("step %d: saving; training went on after %.2f s", progress.step, pending.stall_s)
        job.metrics.event(Event.SAVE, step=progress.step, stall_s=pending.stall_s)
        self._side.submit(job.upload_logs)

    def _finish(self, stop: StopCode) -> Outcome:
        """Commit the last checkpoint; record how training ended."""
        job, committed = self.job, None
        reason = END_REASONS[stop]
        if stop == StopCode.SIGNAL:
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
            is_from_other_rank=stop == StopCode.SIGNAL and not job.stop.name,
        )  # fmt: skip
        job.metrics.event(Event.END, reason=reason, step=outcome.step, committed_step=committed, loss=self.loss)
        log.info(
            "%s at step %d; %s",
            reason,
            outcome.step,
            "nothing saved" if committed is None else f"step {committed} is committed",
        )
        return outcome

    def _tighten_timeouts(self) -> None:
        """Switch to `step_timeout_s`: after compilation and warm-up, a slow collective is a fault."""
        limits, parallelized = self.job.config.train, self.job.parallelized
        self.job.control.set_timeout(limits.step_timeout_s)
        if dist.get_world_size() == 1 or limits.step_timeout_s == limits.init_timeout_s:
            return
        ranks = parallelized.ranks
        ends = [] if parallelized.tied_group is None else [parallelized.tied_group]
        for group in (None, *ends, *ranks.all_groups()):
            _set_pg_timeout(timedelta(seconds=limits.step_timeout_s), group)
