"""Batches of packed samples whose order does not depend on the mesh.

Sample i of a source is tokens [i L, i L + L] of its stream: L inputs, and the labels shifted by one. Each optimizer step takes
the next `global_batch_size` positions of the order; data rank r of d takes the r-th of d equal parts. If whole microbatches
do not divide the batch, masked samples fill the last ones, so that the batch is the same on every mesh.

Shapes: B samples of a microbatch, L `seq_len`.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from titan_ckpt.errors import DataError
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig, ValidationConfig
from titan_ckpt.trainer.data.corpus import DocumentReader
from titan_ckpt.trainer.data.hub import PREFIX
from titan_ckpt.trainer.data.sample_order import SampleOrder, SampleRef, SourceSize
from titan_ckpt.trainer.data.token_files import TokenFile, cached_tokens, is_tokens, open_tokens
from titan_ckpt.trainer.data.tokenizer import Tokenizer
from titan_ckpt.trainer.model.loss import IGNORED as IGNORED


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Ids and labels (IGNORED: masked) of one forward and backward, and each token's document number if masks are on."""

    tokens_BL: Tensor
    labels_BL: Tensor
    documents_BL: Tensor | None = None

    def to(self, device: torch.device) -> Microbatch:
        """A copy on `device`."""
        documents_BL = None if self.documents_BL is None else self.documents_BL.to(device, non_blocking=True)
        tokens_BL, labels_BL = (ids.to(device, non_blocking=True) for ids in (self.tokens_BL, self.labels_BL))
        return Microbatch(tokens_BL, labels_BL, documents_BL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's share of an optimizer step. `valid_tokens` counts over all ranks."""

    position: int
    microbatches: list[Microbatch]
    valid_tokens: int

    @property
    def num_tokens(self) -> int:
        """This rank's unmasked tokens."""
        return sum(int((microbatch.labels_BL != IGNORED).sum()) for microbatch in self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How a global batch is divided over data ranks and microbatches."""

    global_batch_size: int
    microbatch_size: int
    data_rank: int = 0
    data_degree: int = 1

    @property
    def accumulation(self) -> int:
        """Microbatches per rank and step."""
        return -(-self.global_batch_size // (self.data_degree * self.microbatch_size))

    @property
    def padding(self) -> int:
        """Masked samples that pad the batch, over all ranks."""
        return self.accumulation * self.data_degree * self.microbatch_size - self.global_batch_size

    def offsets(self) -> list[int | None]:
        """This rank's samples as offsets in the global batch; None for a masked one.

        >>> BatchShape(global_batch_size=5, microbatch_size=1, data_rank=1, data_degree=2).offsets()
        [3, 4, None]
        """
        per_rank = self.accumulation * self.microbatch_size
        mine = range(self.data_rank * per_rank, (self.data_rank + 1) * per_rank)
        return [offset if offset < self.global_batch_size else None for offset in mine]


class Dataset:
    """The tokenised sources of a run, and the order of their samples."""

    def __init__(
        self,
        tokens: list[TokenFile],
        weights: list[float],
        *,
        seq_len: int,
        seed: int,
        shuffle: bool,
        held_out: float = 0.0,
        has_document_masks: bool = False,
    ) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        self._separator = tokens[0].header.separator if has_document_masks else None
        sizes = []
        for file, weight in zip(tokens, weights, strict=True):
            count = max(0, (len(file) - 1) // seq_len)
            kept_back = max(1, int(count * held_out)) if held_out else 0
            sizes.append(SourceSize(num_samples=count, num_held_out=kept_back, weight=weight))
        self.order = SampleOrder(tuple(sizes), seed, shuffle)
        identity = [[file.header.digest for file in tokens], weights, seq_len, seed, shuffle, held_out]
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())

    def read(self, place: SampleRef) -> torch.Tensor:
        """The L + 1 tokens of a sample."""
        ids = self.tokens[place.source].read(place.index * self.seq_len, self.seq_len + 1)
        return torch.from_numpy(ids)

    def batch(self, position: int, shape: BatchShape) -> Batch:
        """This rank's part of the step that starts at `position`."""
        places = [None if offset is None else self.order.at(position + offset) for offset in shape.offsets()]
        return Batch(
            position=position,
            microbatches=self._microbatches(places, shape.microbatch_size),
            valid_tokens=shape.global_batch_size * self.seq_len,
        )

    def held_out_batch(self, samples: int, shape: BatchShape) -> Batch:
        """This rank's part of the first `samples` held-out samples, round-robin over the sources."""
        places = self.held_out_samples(samples)
        shares = BatchShape(
            global_batch_size=len(places), microbatch_size=shape.microbatch_size,
            data_rank=shape.data_rank, data_degree=shape.data_degree,
        )  # fmt: skip
        mine = [None if offset is None else places[offset] for offset in shares.offsets()]
        return Batch(
            position=0,
            microbatches=self._microbatches(mine, shape.microbatch_size),
            valid_tokens=len(places) * self.seq_len,
        )

    def held_out_samples(self, samples: int) -> list[SampleRef]:
        """At most `samples` held-out samples, round-robin over the sources."""
        sizes = self.order.sources
        rounds = range(max(size.num_held_out for size in sizes))
        places = [self.order.held_out(k, n) for n in rounds for k in range(len(sizes)) if n < sizes[k].num_held_out]
        return places[:samples]

    def _microbatches(self, places: list[SampleRef | None], size: int) -> list[Microbatch]:
        return [self._microbatch(places[i : i + size]) for i in range(0, len(places), size)]

    def _microbatch(self, places: list[SampleRef | None]) -> Microbatch:
        tokens = torch.zeros(len(places), self.seq_len, dtype=torch.int64)
        labels = torch.full((len(places), self.seq_len), IGNORED, dtype=torch.int64)
        for row, place in enumerate(places):
            if place is not None:
                sample = self.read(place)
                tokens[row], labels[row] = sample[:-1], sample[1:]
        if self._separator is None:
            return Microbatch(tokens, labels)
        return Microbatch(tokens, labels, documents(tokens, self._separator))


def documents(tokens_BL: Tensor, separator: int) -> Tensor:
    """Each token's document number within its sample; a separator belongs to the document it ends.

    >>> documents(torch.tensor([[5, 6, 0, 7, 0, 8]]), separator=0).tolist()
    [[0, 0, 0, 1, 1, 2]]
    """
    closes_BL = (tokens_BL == separator).long()
    return closes_BL.cumsum(dim=1) - closes_BL


def open_dataset(
    config: DataConfig, validation: ValidationConfig, tokenizer: Tokenizer, *, seed: int, is_writer: bool
) -> Dataset:
    """Open the run's data. Text that is not in the cache is tokenised first, by the writer (one process per machine)."""
    tokens = [_open_source(source, config, tokenizer, is_writer) for source in config.sources]
    weights = [source.weight for source in config.sources]
    return Dataset(
        tokens, weights, seq_len=config.seq_len, seed=seed, shuffle=config.shuffle, held_out=validation.fraction,
        has_document_masks=config.document_masks,
    )  # fmt: skip


def _open_source(source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, is_writer: bool) -> TokenFile:
    if may_be_tokens(source) and (source.format == "tokens" or is_tokens(source.url)):
        file = open_tokens(source.url)
        if file.header.tokenizer != tokenizer.digest:
            raise DataError(
                f"{source.url}: was tokenised with another tokenizer ({file.header.vocab_size} ids) than "
                f"data.tokenizer = {config.tokenizer} ({tokenizer.vocab_size} ids)"
            )
        return file
    return cached_tokens(source.url, tokenizer, reader_of(source, config), config.cache, is_writer=is_writer)


def may_be_tokens(source: SourceConfig) -> bool:
    """Whether a source may be a pre-tokenised folder, judging by its config."""
    is_folder = not source.url.startswith(PREFIX) and "*" not in source.url
    return source.format == "tokens" or (source.format == "auto" and is_folder)


def reader_of(source: SourceConfig, config: DataConfig) -> DocumentReader:
    """The reader of a text source."""
    kind = "auto" if source.format == "tokens" else source.format
    return DocumentReader(format=kind, text_field=source.text_field, bad_line=config.bad_line)


class BatchLoader:
    """Batches from a position on, prefetched by a thread, whose errors the next `next` raises."""

    def __init__(self, dataset: Dataset, shape: BatchShape, *, position: int, prefetch: int = 2) -> None:
        self._dataset, self._shape = dataset, shape
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=prefetch)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(position,), name="titan-ckpt-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _work(self, position: int) -> None:
        try:
            while not self._is_closed.is_set():
                self._queue.put(self._dataset.batch(position, self._shape))
                position += self._shape.global_batch_size
        except Exception as error:  # noqa: BLE001 - raised in the training loop
            self._queue.put(error)


def unigram_entropy(file: TokenFile, *, limit: int = 1 << 20) -> float:
    """Entropy in nats of the first `limit` tokens: the loss of a model that knows token frequencies only."""
    counts = np.bincount(file.read(0, min(limit, len(file))))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
