"""What takes part in a run on one rank, and what a run comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_ckpt.saving.saver import Saver
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import BatchShape, Dataset
from titan_ckpt.trainer.parallel.optimizer import Optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.report.metrics import MetricsLog
from titan_ckpt.trainer.report.phases import Phases
from titan_ckpt.trainer.report.profile import Inspection
from titan_ckpt.trainer.run.export import Exporter
from titan_ckpt.trainer.run.stop_signals import Agreement, StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended: `completed`, `time limit` or `signal`; `committed_step` None when nothing was saved."""

    reason: str
    step: int
    committed_step: int | None
    loss: float | None
    is_of_another: bool = False  # ended by a signal that came to another rank alone


@dataclass(slots=True, kw_only=True)
class Job:
    """All that takes part on this rank, built by `titan_ckpt.trainer.run.setup`."""

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
