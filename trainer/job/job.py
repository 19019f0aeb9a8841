"""The objects of a run on one rank, and the result of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_ckpt.saving.saver import Saver
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import BatchShape, Dataset
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.export import Exporter
from titan_ckpt.trainer.job.own_parts import HookCalls
from titan_ckpt.trainer.job.stop_signals import StopRequest
from titan_ckpt.trainer.job.validation import Prepared, Validation
from titan_ckpt.trainer.parallel.optimizer import Optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.report.loss_check import LossCheck
from titan_ckpt.trainer.report.metrics_log import MetricsLog
from titan_ckpt.trainer.report.phases import Phases
from titan_ckpt.trainer.report.profile import Inspection
from titan_ckpt.trainer.seams.loss import Loss


class EndReason(StrEnum):
    """Why training ended without an error."""

    COMPLETED = "completed"
    TIME_LIMIT = "time limit"
    SIGNAL = "signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended; `committed_step` is None if nothing was saved."""

    reason: EndReason
    step: int
    committed_step: int | None
    loss: float | None
    is_from_other_rank: bool = False  # the signal reached other ranks, not this one


@dataclass(slots=True, kw_only=True)
class Job:
    """Everything the loop works with on this rank; `titan_ckpt.trainer.job.setup` builds it."""

    config: TrainConfig
    config_record: dict[str, Any]
    assets: Callable[[], dict[str, bytes]]  # of this rank, as of now
    frozen: Mapping[str, Any]  # weights of others, as each checkpoint records them
    parallelized: Parallelized
    loss: Loss
    prepare: Prepared
    hooks: HookCalls
    loss_check: LossCheck
    optimizer: Optimizer
    dataset: Dataset
    saver: Saver | None
    exporter: Exporter | None
    control: ControlGroup
    stop: StopRequest
    phases: Phases
    inspection: Inspection
    metrics: MetricsLog
    validation: Validation
    upload_logs: Callable[[], None]

    def batch_shape(self, step: int) -> BatchShape:
        """This rank's share of the batch of a step, which is counted from 1."""
        return BatchShape(
            global_batch_size=self.config.train.batch_size(step),
            microbatch_size=self.config.train.microbatch_size,
            data_rank=self.parallelized.data_rank,
            data_degree=self.parallelized.data_degree,
        )
