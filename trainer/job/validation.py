"""Validation: the sets, and the run's validator over held-out samples and each of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from titan_ckpt.errors import ConfigError, DataError
from titan_ckpt.trainer.config.extension import RECORDED
from titan_ckpt.trainer.config.train_config import SourceConfig, TrainConfig
from titan_ckpt.trainer.config.validation import ValidationConfig, ValidationSet
from titan_ckpt.trainer.data.batches import Batch, BatchShape, Dataset, open_dataset
from titan_ckpt.trainer.data.sample_order import SampleRef
from titan_ckpt.trainer.data.tokenizer import Tokenizer
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.seams.boundary import calling, checked_numbers
from titan_ckpt.trainer.seams.data import checked_source
from titan_ckpt.trainer.seams.loss import Loss, count_of
from titan_ckpt.trainer.seams.validation import Evaluation, Means

Prepared: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def validation_sets(config: TrainConfig, tokenizer: Tokenizer | None, *, is_writer: bool) -> dict[str, Dataset]:
    """The sets of the config and of a module, by name. Text that is not in the cache is tokenised first, by the writer."""
    found = {each.name: _corpus(config, each, tokenizer, is_writer=is_writer) for each in config.validation.sets}
    for name, open_ in config.extension.validation.items():
        source = checked_source(open_, config, f"validation[{name!r}]")
        found[name] = Dataset([source], [1.0], seq_len=config.data.seq_len, seed=0, shuffle=False)
    return found


def _corpus(config: TrainConfig, each: ValidationSet, tokenizer: Tokenizer | None, *, is_writer: bool) -> Dataset:
    if tokenizer is None:
        raise ConfigError("validation.sets are corpora of text, which a run with data of its own has no tokenizer for")
    source = SourceConfig(url=each.url, format=each.format, text_field=each.text_field)
    data = dataclasses.replace(config.data, source="", mixture=(source,), shuffle=False, stream=False)
    dataset = open_dataset(data, ValidationConfig(), tokenizer, seed=0, is_writer=is_writer, chat=config.chat)
    if not len(dataset.sources[0]):
        raise DataError(f"validation.sets: {each.name}: {each.url} has less than one sample of {data.seq_len} tokens")
    return dataset


def batches_of(held_out: Dataset, sets: Mapping[str, Dataset], samples: int, shape: BatchShape) -> dict[str, Batch]:
    """This rank's part of what is evaluated: the held-out samples under no name, and the first samples of each set."""
    found = {"": held_out.held_out_batch(samples, shape)} if held_out.held_out_samples(1) else {}
    for name, dataset in sets.items():
        count = min(samples, len(dataset.sources[0]))
        found[name] = dataset.batch_of([SampleRef(0, index, 0) for index in range(count)], shape)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What validates on this rank; `batches` are its parts of the sets by name, of the held-out samples under none."""

    config: TrainConfig
    model: Parallelized
    control: ControlGroup
    loss: Loss
    prepare: Prepared
    batches: Callable[[], Mapping[str, Batch]]

    def run(self, step: int) -> Iterator[tuple[str, dict[str, float], float]]:
        """The name of each set, its numbers, and the seconds that they took; collective."""
        own = self.config.extension.validator or Means()
        for name, batch in self.batches().items():
            started = time.perf_counter()
            evaluation = Evaluation(
                name=name, step=step, microbatches=batch.microbatches, means=partial(self._means, batch.microbatches),
                outputs=lambda microbatch: self.model.outputs(self.prepare(microbatch)), total=self._total,
            )  # fmt: skip
            with calling("Validator", own), torch.no_grad():
                found: object = own(evaluation)
            yield name, checked_numbers(found, "Validator", own, RECORDED), time.perf_counter() - started

    def _means(self, microbatches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """`loss`, `tokens` (how many losses it is the mean of), and each metric by name; the same on every rank, collective."""
        metrics, ranks = self.config.extension.metrics, self.model.ranks
        total = torch.zeros(1 + len(metrics), dtype=torch.float64, device=ranks.device)
        for microbatch in microbatches:
            part = self.model.forward_loss(self.prepare(microbatch))
            total[: len(part)] += part.double()
        dist.all_reduce(total)
        total /= ranks.spec.degree("tp")  # tensor parallel ranks computed the same
        counted = (self.loss, *metrics.values())
        local = [float(sum(count_of(each, microbatch) for microbatch in microbatches)) for each in counted]
        copies = ranks.spec.world_size // ranks.data_degree
        counts = [count / copies for count in self.control.all_reduce_sum(local)]
        means = {name: float(total[i]) / max(counts[i], 1.0) for i, name in enumerate(("loss", *metrics))}
        return means | {"tokens": counts[0]}

    def _total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks, of which those along tp have counted the same."""
        copies = self.model.ranks.spec.degree("tp")
        return [number / copies for number in self.control.all_reduce_sum(numbers)]
