"""From steps to metrics records: times of the slowest rank, utilisation, the state of checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_ckpt.trainer.job.job import Job
from titan_ckpt.trainer.job.resume import TrainingProgress
from titan_ckpt.trainer.job.stop_signals import StopCode
from titan_ckpt.trainer.report.metrics import FLOAT8_PEAK_RATIO, StepMetrics, expert_spread, memory_bytes, peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step: this rank's sum of losses and their count; the other fields are equal on all ranks."""

    local_loss: Tensor
    local_count: int
    count: int
    grad_norm: float
    lr: float


class Meter:
    """Accumulates steps between two records."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps, self._steps_s, self._stall_s = 0, 0.0, 0.0
        self._commit_time_s: float | None = None
        self._last_seen_commit: int | None = None
        self._uploaded_bytes, self._written_s = 0, time.monotonic()
        self._device = job.parallelized.ranks.device
        counted = job.parallelized.spec.flops_per_token
        flops = 0.0 if counted is None else counted(job.config.data.seq_len)
        self._flops = flops / job.parallelized.mesh.world_size
        self._peak = peak_flops(self._device)

    def add_step(self, seconds: float) -> None:
        """Count a finished step."""
        self._steps, self._steps_s = self._steps + 1, self._steps_s + seconds

    def add_stall(self, seconds: float) -> None:
        """Count the time a save blocked the loop; it goes into the next record."""
        self._stall_s += seconds

    def write(self, step: StepResult, progress: TrainingProgress, loss: float) -> StopCode:
        """Write a record of the steps since the last one; returns the largest stop code, which shares the reduction of times."""
        job, steps = self._job, self._steps
        mine = float(step.local_loss) / step.local_count if step.local_count else 0.0
        numbers = [job.stop.code, mine, job.phases.take().get("data", 0.0) / steps, self._steps_s / steps]
        self._steps, self._steps_s = 0, 0.0
        stop, loss_max, data_wait_s, step_s = job.control.all_reduce_max(numbers)
        tokens_per_s = step.count / step_s
        job.metrics.step(
            StepMetrics(
                step=progress.step, steps=steps, time_s=time.time(), loss=loss, loss_max=loss_max,
                grad_norm=step.grad_norm, lr=step.lr, step_s=step_s, tokens_per_s=tokens_per_s,
                data_wait_s=data_wait_s, memory_bytes=memory_bytes(self._device), tokens_seen=progress.tokens,
                skipped_steps=progress.skipped, **self._utilisation(tokens_per_s), **self._checkpoint_numbers(),
                **self._expert_numbers(),
            )
        )  # fmt: skip
        return StopCode(int(stop))

    def _utilisation(self, tokens_per_s: float) -> dict[str, Any]:
        """`mfu` is always relative to the bfloat16 peak, so that runs compare; `mfu_float8` to the Float8 peak."""
        flops = self._flops * tokens_per_s
        mfu = None if self._peak is None or not flops else flops / self._peak
        is_float8 = self._job.config.mesh.float8 != "none"
        return {
            "tflops": flops / 1e12,
            "mfu": mfu,
            "mfu_float8": mfu / FLOAT8_PEAK_RATIO if mfu is not None and is_float8 else None,
        }

    def _expert_numbers(self) -> dict[str, Any]:
        """How evenly the last step's tokens went to the experts of a mixture."""
        spread = expert_spread(load.tolist() for load in self._job.parallelized.loads.values())
        return {} if spread is None else {"expert_imbalance": spread[0], "expert_entropy": spread[1]}

    def _checkpoint_numbers(self) -> dict[str, Any]:
        """The saver's fields of a record."""
        if self._job.saver is None:
            return {}
        now, clock_s = self._job.saver.metrics(), time.monotonic()
        stall_s, self._stall_s = self._stall_s, 0.0
        rate = (now.uploaded_bytes - self._uploaded_bytes) / max(clock_s - self._written_s, 1e-9)
        self._uploaded_bytes, self._written_s = now.uploaded_bytes, clock_s
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
