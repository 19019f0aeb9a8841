"""The training loop: batch, forward and backward, clip, check, update, measure, save; and the ends it can come to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_ckpt.errors import TitanError
from titan_ckpt.save import SaveHandle, Saver
from titan_ckpt.trainer.checkpoint import Progress, live_state, training_record
from titan_ckpt.trainer.config import TrainConfig
from titan_ckpt.trainer.data import Batch, BatchShape, Dataset, Loader
from titan_ckpt.trainer.exporting import Exporter
from titan_ckpt.trainer.metrics import MetricsLog, StepMetrics, flops_per_token, memory_bytes, peak_flops
from titan_ckpt.trainer.optimizer import Optimizer, learning_rate
from titan_ckpt.trainer.parallelized import Parallelized
from titan_ckpt.trainer.phases import Phases
from titan_ckpt.trainer.profile import Inspection
from titan_ckpt.trainer.signals import NOTHING, REASONS, SIGNAL, Agreement, StopRequest

log = logging.getLogger(__name__)


class DivergedError(TitanError):
    """The gradient is no longer finite; the update was not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended: `completed`, `time limit` or `signal`; `committed_step` None when nothing was saved."""

    reason: str
    step: int
    committed_step: int | None
    loss: float | None


@dataclass(slots=True, kw_only=True)
class Job:
    """All that takes part on this rank, built by `titan_ckpt.trainer.setup`."""

    config: TrainConfig
    config_record: dict[str, Any]
    assets: dict[str, bytes]
    parallelized: Parallelized
    optimizer: Optimizer
    dataset: Dataset
    saver: Saver | None
    exporter: Exporter | None
    agreement: Agreement
    stop: StopRequest
    phases: Phases
    inspection: Inspection
    metrics: MetricsLog
    upload_logs: Callable[[], None]

    @property
    def batch_shape(self) -> BatchShape:
        """How a global batch is dealt to this rank."""
        return BatchShape(
            global_batch_size=self.config.train.global_batch_size,
            microbatch_size=self.config.train.microbatch_size,
            data_rank=self.parallelized.data_rank,
            data_degree=self.parallelized.data_degree,
        )


class Loop:
    """One run of steps from `progress` on."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.saved_step = progress.step
        self.pending: SaveHandle | None = None
        self.loss: float | None = None
        self.stall_s, self._steps, self._steps_s = 0.0, 0, 0.0
        self.commit_time_s: float | None = None
        self._last_seen_commit: int | None = None
        self._side = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-logs")
        device = job.parallelized.ranks.device
        self._flops = flops_per_token(job.config.model, job.config.data.seq_len) / job.parallelized.mesh.world_size
        self._device, self._peak = device, peak_flops(device)

    def run(self) -> Outcome:
        """Train until the last step, a signal or the time limit; the last checkpoint is committed on return."""
        job, steps = self.job, self.job.config.train.steps
        inspection = job.inspection
        loader = Loader(job.dataset, job.batch_shape, position=self.progress.samples, prefetch=job.config.data.prefetch)
        first_step, stop = self.progress.step, NOTHING
        try:
            while self.progress.step < steps and stop == NOTHING:
                inspection.before(self.progress.step + 1)
                stop = self._step(loader)
                inspection.after(self.progress.step)
                job.metrics.progress(self.progress.step)
                if self.progress.step == first_step + 1:
                    self._tighten_timeouts()
        finally:
            loader.close()
            inspection.close()
        return self._finish(stop)

    def _step(self, loader: Loader) -> int:
        """One optimizer step; returns the largest stop code of all ranks."""
        job, step = self.job, self.progress.step + 1
        started = time.perf_counter()
        with job.phases("data", step):
            batch = next(loader)
        local_loss = self._forward_backward(batch, step)
        lr, grad_norm = self._update(step)
        self.progress = self.progress.after(samples=job.config.train.global_batch_size, tokens=batch.valid_tokens)
        is_logged = step % job.config.log.every == 0 or step == job.config.train.steps
        with job.phases("metrics", step):
            if is_logged:
                self.loss = float(job.parallelized.reduce_loss(local_loss)) / batch.valid_tokens
            self._steps, self._steps_s = self._steps + 1, self._steps_s + time.perf_counter() - started
            stop = self._measure(batch, local_loss, grad_norm, lr) if is_logged else self._stop_code()
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
                total += self.job.parallelized.forward_backward(
                    microbatch.tokens_BL.to(self._device, non_blocking=True),
                    microbatch.labels_BL.to(self._device, non_blocking=True),
                    global_valid_tokens=batch.valid_tokens,
                )
        return total

    def _update(self, step: int) -> tuple[float, float]:
        """Clip, refuse what is not finite, update; the learning rate and the gradient norm."""
        job, config = self.job, self.job.config
        with job.phases("optimizer", step):
            grad_norm = float(job.parallelized.clip_grad_norm(config.optimizer.grad_clip or math.inf))
            if not math.isfinite(grad_norm):
                saved = (
                    "no checkpoint was saved"
                    if self.saved_step == 0
                    else f"the last checkpoint is of step {self.saved_step}"
                )
                raise DivergedError(
                    f"step {step}: the gradient norm is {grad_norm}; samples {self.progress.samples} and following; {saved}. "
                    "Lower optimizer.lr or optimizer.grad_clip, or go on from an earlier step with resume.from = URL@STEP"
                )
            lr = learning_rate(config.optimizer, step - 1, config.train.steps)
            job.optimizer.step(lr)
            job.optimizer.zero_grad()
        return lr, grad_norm

    def _stop_code(self) -> int:
        return int(self.job.agreement.largest([self.job.stop.code])[0])

    def _measure(self, batch: Batch, local_loss: torch.Tensor, grad_norm: float, lr: float) -> int:
        """Log the steps since the last time; the exchange of the slowest rank's times carries the stop flags too."""
        job, steps = self.job, self._steps
        data_s = job.phases.take().get("data", 0.0)
        mine = sum(int((m.labels_BL >= 0).sum()) for m in batch.microbatches)
        numbers = [
            job.stop.code,
            float(local_loss) / mine if mine else 0.0,
            data_s / steps,
            self._steps_s / steps,
        ]
        self._steps, self._steps_s = 0, 0.0
        stop, loss_max, data_wait_s, step_s = job.agreement.largest(numbers)
        tokens_per_s = batch.valid_tokens / step_s
        tflops = self._flops * tokens_per_s / 1e12
        assert self.loss is not None
        job.metrics.step(
            StepMetrics(
                step=self.progress.step, steps=steps, time_s=time.time(), loss=self.loss, loss_max=loss_max,
                grad_norm=grad_norm, lr=lr,
                step_s=step_s, tokens_per_s=tokens_per_s, tflops=tflops,
                mfu=None if self._peak is None else tflops * 1e12 / self._peak, data_wait_s=data_wait_s,
                memory_bytes=memory_bytes(self._device), tokens_seen=self.progress.tokens, **self._checkpoint_numbers(),
            )
        )  # fmt: skip
        return int(stop)

    def _checkpoint_numbers(self) -> dict[str, Any]:
        """What the saver says of itself; a stall is told with the step after it."""
        if self.job.saver is None:
            return {}
        now = self.job.saver.metrics()
        stall_s, self.stall_s = self.stall_s, 0.0
        committed = now.last_committed_step
        if committed is not None and committed != self._last_seen_commit:
            self._last_seen_commit, self.commit_time_s = committed, time.time()
        return {
            "checkpoint_stall_s": stall_s,
            "uploaded_bytes": now.uploaded_bytes,
            "committed_step": committed,
            "commit_age_s": None if self.commit_time_s is None else time.time() - self.commit_time_s,
            "is_uploading": now.is_uploading,
            "mirrored_step": now.last_mirrored_step,
        }

    def _validate(self, step: int) -> None:
        job = self.job
        batch = job.dataset.held_out_batch(job.config.validation.samples, job.batch_shape)
        started = time.perf_counter()
        with job.phases("validation", step):
            total = torch.zeros((), device=self._device)
            for microbatch in batch.microbatches:
                tokens_BL, labels_BL = microbatch.tokens_BL.to(self._device), microbatch.labels_BL.to(self._device)
                total += job.parallelized.forward_loss(tokens_BL, labels_BL)
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
        self.pending = job.saver.save(
            live_state(job.parallelized, job.optimizer),
            step=progress.step, training=record, config=job.config_record, assets=job.assets,
        )  # fmt: skip
        self.saved_step, self.stall_s = progress.step, self.stall_s + self.pending.stall_s
        log.info("step %d: saving; training went on after %.2f s", progress.step, self.pending.stall_s)
        job.metrics.event("save", step=progress.step, stall_s=self.pending.stall_s)
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
        outcome = Outcome(reason=reason, step=self.progress.step, committed_step=committed, loss=self.loss)
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
        limits, ranks = self.job.config.train, self.job.parallelized.ranks
        if dist.get_world_size() == 1 or limits.step_timeout_s == limits.init_timeout_s:
            return
        for group in (None, ranks.cp_group, *ranks.device_mesh.get_all_groups()):
            _set_pg_timeout(timedelta(seconds=limits.step_timeout_s), group)
