"""From steps to records: what they cost on the slowest rank, what they reached, where checkpoints stand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_ckpt.trainer.report.metrics import FLOAT8_PEAK_RATIO, StepMetrics, flops_per_token, memory_bytes, peak_flops
from titan_ckpt.trainer.run.job import Job
from titan_ckpt.trainer.run.resume import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step came to: this rank's sum of token losses and its tokens; the rest is the same on all ranks."""

    local_loss: Tensor
    num_tokens: int
    valid_tokens: int
    grad_norm: float
    lr: float


class Meter:
    """Adds steps up until they are told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps, self._steps_s, self._stall_s = 0, 0.0, 0.0
        self._commit_time_s: float | None = None
        self._last_seen_commit: int | None = None
        self._uploaded_bytes, self._told_s = 0, time.monotonic()
        self._device = job.parallelized.ranks.device
        flops = flops_per_token(job.config.model, job.config.data.seq_len)
        self._flops = flops / job.parallelized.mesh.world_size
        self._peak = peak_flops(self._device)

    def add_step(self, seconds: float) -> None:
        """A step is over."""
        self._steps, self._steps_s = self._steps + 1, self._steps_s + seconds

    def add_stall(self, seconds: float) -> None:
        """A save kept the loop; it is told with the step after it."""
        self._stall_s += seconds

    def tell(self, step: Step, progress: Progress, loss: float) -> int:
        """Log the steps since the last time; the exchange of the slowest rank's times carries the stop flags too."""
        job, steps = self._job, self._steps
        mine = float(step.local_loss) / step.num_tokens if step.num_tokens else 0.0
        numbers = [job.stop.code, mine, job.phases.take().get("data", 0.0) / steps, self._steps_s / steps]
        self._steps, self._steps_s = 0, 0.0
        stop, loss_max, data_wait_s, step_s = job.agreement.largest(numbers)
        tokens_per_s = step.valid_tokens / step_s
        job.metrics.step(
            StepMetrics(
                step=progress.step, steps=steps, time_s=time.time(), loss=loss, loss_max=loss_max,
                grad_norm=step.grad_norm, lr=step.lr, step_s=step_s, tokens_per_s=tokens_per_s,
                data_wait_s=data_wait_s, memory_bytes=memory_bytes(self._device), tokens_seen=progress.tokens,
                skipped_steps=progress.skipped, **self._utilisation(tokens_per_s), **self._checkpoint_numbers(),
            )
        )  # fmt: skip
        return int(stop)

    def _utilisation(self, tokens_per_s: float) -> dict[str, Any]:
        """`mfu` is against the bfloat16 peak always, so that runs compare; Float8's own peak is said apart."""
        flops = self._flops * tokens_per_s
        mfu = None if self._peak is None else flops / self._peak
        is_float8 = self._job.config.mesh.float8 != "none"
        return {
            "tflops": flops / 1e12,
            "mfu": mfu,
            "mfu_float8": mfu / FLOAT8_PEAK_RATIO if mfu is not None and is_float8 else None,
        }

    def _checkpoint_numbers(self) -> dict[str, Any]:
        """What the saver says of itself."""
        if self._job.saver is None:
            return {}
        now, clock_s = self._job.saver.metrics(), time.monotonic()
        stall_s, self._stall_s = self._stall_s, 0.0
        rate = (now.uploaded_bytes - self._uploaded_bytes) / max(clock_s - self._told_s, 1e-9)
        self._uploaded_bytes, self._told_s = now.uploaded_bytes, clock_s
        committed = now.last_committed_step
        if committed is not None and committed != self._last_seen_commit:
            self._last_seen_commit, self._commit_time_s = committed, time.time()
        return {
            "checkpoint_stall_s": stall_s,
            "uploaded_bytes": now.uploaded_bytes,
            "upload_bytes_per_s": rate,
            "committed_step": committed,
            "commit_age_s": None if self._commit_time_s is None else time.time() - self._commit_time_s,
            "is_uploading": now.is_uploading,
            "mirrored_step": now.last_mirrored_step,
        }
