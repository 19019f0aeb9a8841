"""The means of the loss and the metrics over held-out samples or validation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import Batch, BatchShape, Dataset
from titan_ckpt.trainer.data.sample_order import SampleRef
from titan_ckpt.trainer.job.job import Job
from titan_ckpt.trainer.seams.data import checked_source
from titan_ckpt.trainer.seams.loss import count_of


def validation_sets(config: TrainConfig) -> dict[str, Dataset]:
    """The extension's own sets, by name."""
    sources = {
        name: checked_source(open_, config, f"validation[{name!r}]")
        for name, open_ in config.extension.validation.items()
    }
    seq_len = config.data.seq_len
    return {name: Dataset([own], [1.0], seq_len=seq_len, seed=0, shuffle=False) for name, own in sources.items()}


def batches_of(held_out: Dataset, sets: Mapping[str, Dataset], samples: int, shape: BatchShape) -> dict[str, Batch]:
    """This rank's part of what is evaluated: the held-out samples under no name, and the first samples of each set."""
    found = {"": held_out.held_out_batch(samples, shape)} if held_out.held_out_samples(1) else {}
    for name, dataset in sets.items():
        count = min(samples, len(dataset.sources[0]))
        found[name] = dataset.batch_of([SampleRef(0, index, 0) for index in range(count)], shape)
    return found


def mean_of(job: Job, sums: Sequence[Tensor], batch: Batch) -> dict[str, float]:
    """`loss`, `tokens` (how many losses it is the mean of), and each metric by name; the same on every rank, collective."""
    names = ["loss", *job.config.extension.metrics]
    ranks = job.parallelized.ranks
    total = torch.zeros(len(names), dtype=torch.float64, device=ranks.device)
    for part in sums:
        total[: len(part)] += part.double()
    dist.all_reduce(total)
    total /= ranks.spec.degree("tp")  # tensor parallel ranks computed the same
    counted = (job.loss, *job.config.extension.metrics.values())
    local = [float(sum(count_of(each, microbatch) for microbatch in batch.microbatches)) for each in counted]
    copies = ranks.spec.world_size // ranks.data_degree
    counts = [count / copies for count in job.control.all_reduce_sum(local)]
    means = {name: float(total[i]) / max(counts[i], 1.0) for i, name in enumerate(names)}
    return means | {"tokens": counts[0]}
