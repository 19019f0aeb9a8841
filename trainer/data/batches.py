"""Batches of packed samples whose order does not depend on the mesh.

Each optimizer step takes the next `global_batch_size` positions of the order; data rank r of d takes the r-th of d equal
parts. If whole microbatches do not divide the batch, masked samples fill the last ones, so that it is the same on every mesh.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from torch import Tensor

from titan_ckpt.errors import ConfigError, DataError
from titan_ckpt.trainer.config.chat import ChatConfig
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig, TrainConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.binary_tokens import open_megatron, open_nanogpt
from titan_ckpt.trainer.data.chat_source import ChatSource, PairSource
from titan_ckpt.trainer.data.chat_tokens import ChatFile, ChatKind, cached_chat, chat_rules
from titan_ckpt.trainer.data.corpus import DocumentReader, list_shards
from titan_ckpt.trainer.data.hub import PREFIX
from titan_ckpt.trainer.data.sample_order import SampleOrder, SampleRef, SourceSize, mix
from titan_ckpt.trainer.data.shard_stream import StreamOptions, StreamSource
from titan_ckpt.trainer.data.token_files import cached_tokens, is_tokens, open_tokens
from titan_ckpt.trainer.data.token_source import Tokens, TokenSource
from titan_ckpt.trainer.data.tokenizer import Tokenizer, open_tokenizer
from titan_ckpt.trainer.seams.data import DataSource, collate, filler_of

NO_CHAT = ChatConfig()
OTHER_FORMATS = ("tokens", "chat", "nanogpt", "megatron")  # which no `DocumentReader` reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's share of an optimizer step: fields by name, samples along dimension 0.

    `count` is the number of labels that count, over all ranks, None if it takes counting those of every sample.
    """

    position: int
    microbatches: list[dict[str, Tensor]]
    count: int | None


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

    def describe(self) -> str:
        """One line for the log."""
        text = f"{self.data_degree} data ranks x {self.accumulation} microbatches of {self.microbatch_size}"
        return text + (f", {self.padding} masked samples to fill up" if self.padding else "")

    def offsets(self) -> list[int | None]:
        """This rank's samples as offsets in the global batch; None for a masked one.

        >>> BatchShape(global_batch_size=5, microbatch_size=1, data_rank=1, data_degree=2).offsets()
        [3, 4, None]
        """
        per_rank = self.accumulation * self.microbatch_size
        mine = range(self.data_rank * per_rank, (self.data_rank + 1) * per_rank)
        return [offset if offset < self.global_batch_size else None for offset in mine]


class Dataset:
    """The sources of a run, and the order of their samples."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        weights: Sequence[float],
        *,
        seq_len: int,
        seed: int,
        shuffle: bool,
        held_out: float = 0.0,
    ) -> None:
        self.sources = sources
        sizes = []
        for source, weight in zip(sources, weights, strict=True):
            kept_back = max(1, int(len(source) * held_out)) if held_out else 0
            sizes.append(SourceSize(num_samples=len(source), num_held_out=kept_back, weight=weight))
        self.order = SampleOrder(tuple(sizes), seed, shuffle)
        identity = [[source.fingerprint for source in sources], list(weights), seq_len, seed, shuffle, held_out]
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())
        each = {getattr(source, "losses_per_sample", None) for source in sources}
        self._losses_per_sample = each.pop() if len(each) == 1 else None

    def read(self, place: SampleRef) -> Mapping[str, Tensor]:
        """The fields of a sample."""
        return self.sources[place.source].sample(place.index)

    def batch(self, position: int, shape: BatchShape) -> Batch:
        """This rank's part of the step that starts at `position`."""
        places = [None if offset is None else self.order.at(position + offset) for offset in shape.offsets()]
        return self._batch(position, places, shape.microbatch_size, shape.global_batch_size)

    def held_out_batch(self, samples: int, shape: BatchShape) -> Batch:
        """This rank's part of the first `samples` held-out samples, round-robin over the sources."""
        return self.batch_of(self.held_out_samples(samples), shape)

    def batch_of(self, places: list[SampleRef], shape: BatchShape) -> Batch:
        """This rank's part of these samples."""
        shares = replace(shape, global_batch_size=len(places))
        mine = [None if offset is None else places[offset] for offset in shares.offsets()]
        return self._batch(0, mine, shape.microbatch_size, len(places))

    def held_out_samples(self, samples: int) -> list[SampleRef]:
        """At most `samples` held-out samples, round-robin over the sources."""
        sizes = self.order.sources
        rounds = range(max(size.num_held_out for size in sizes))
        places = [self.order.held_out(k, n) for n in rounds for k in range(len(sizes)) if n < sizes[k].num_held_out]
        return places[:samples]

    def _batch(self, position: int, places: list[SampleRef | None], size: int, num_samples: int) -> Batch:
        samples = [filler_of(self.sources[0]) if place is None else self.read(place) for place in places]
        return Batch(
            position=position,
            microbatches=[collate(samples[i : i + size]) for i in range(0, len(samples), size)],
            count=None if self._losses_per_sample is None else num_samples * self._losses_per_sample,
        )


def open_dataset(
    config: DataConfig,
    validation: ValidationConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    is_writer: bool,
    chat: ChatConfig = NO_CHAT,
    wait_s: float = 600.0,
) -> Dataset:
    """Open the run's data. Text that is not in the cache is tokenised first, by the writer (one process per machine).

    With `data.stream` it is tokenised later; the other processes then wait up to `wait_s` for a shard.
    """
    if config.stream:
        return _open_streams(config, tokenizer, seed=seed, is_writer=is_writer, wait_s=wait_s)
    sources = open_sources(config.sources, config, chat, tokenizer, is_writer=is_writer)
    weights = [source.weight for source in config.sources]
    return Dataset(
        sources, weights, seq_len=config.seq_len, seed=seed, shuffle=config.shuffle, held_out=validation.fraction
    )


def _open_streams(config: DataConfig, tokenizer: Tokenizer, *, seed: int, is_writer: bool, wait_s: float) -> Dataset:
    sources = []
    for number, source in enumerate(config.sources):
        options = StreamOptions(
            seq_len=config.seq_len, seed=mix(seed, number), shuffle=config.shuffle,
            has_document_masks=config.document_masks, cache=config.cache, is_writer=is_writer, wait_s=wait_s,
        )  # fmt: skip
        sources.append(StreamSource(list_shards(source.url), tokenizer, reader_of(source, config), options))
    weights = [source.weight for source in config.sources]
    return Dataset(sources, weights, seq_len=config.seq_len, seed=seed, shuffle=False)  # the streams shuffle


def open_sources(
    asked: Sequence[SourceConfig], data: DataConfig, chat: ChatConfig, tokenizer: Tokenizer, *, is_writer: bool
) -> list[DataSource]:
    """The sources `asked` as samples that have the same fields."""
    is_packed = chat.pack and any(source.format == "chat" for source in data.sources)

    def open_one(source: SourceConfig) -> DataSource:
        if source.format == "chat":
            file = open_chat(source, data, chat, tokenizer, is_writer=is_writer)
            return ChatSource(
                file, seq_len=data.seq_len, too_long=chat.too_long, is_packed=is_packed, padding=tokenizer.separator
            )
        tokens = _open_source(source, data, tokenizer, is_writer)
        return TokenSource(
            file=tokens, seq_len=data.seq_len, has_document_masks=data.document_masks, has_positions=is_packed
        )

    return [open_one(source) for source in asked]


def open_chat(
    source: SourceConfig,
    data: DataConfig,
    chat: ChatConfig,
    tokenizer: Tokenizer,
    *,
    is_writer: bool,
    kind: ChatKind = "chat",
) -> ChatFile:
    """The tokenised conversations or pairs of a source."""
    rules = chat_rules(kind, data.tokenizer, template=chat.template, last_only=chat.train_on == "last", today=chat.date)
    reader = DocumentReader(text_field=source.text_field, bad_line=data.bad_line)
    return cached_chat(source.url, tokenizer, rules, reader, data.cache, is_writer=is_writer)


def preference_pairs(config: TrainConfig) -> DataSource:
    """The pairs at `data.source`, for a loss of one's own: the parameter `data` of `run`, or a module's.

    A sample has `tokens` and `labels` [2, data.seq_len], the chosen answer first, labels on the answers alone. Lines have
    `chosen` and `rejected`, and perhaps `prompt`, as messages or as text; DataError names a line that has not.
    """
    data = config.data
    if len(data.sources) != 1 or not data.sources[0].url:
        raise ConfigError("preference_pairs reads one source: set data.source")
    tokenizer = open_tokenizer(data.tokenizer, separator=data.separator)
    # Every rank may write: the content is the same, and a file appears whole or not at all.
    file = open_chat(data.sources[0], data, config.chat, tokenizer, is_writer=True, kind="pairs")
    return PairSource(file, seq_len=data.seq_len, too_long=config.chat.too_long, padding=tokenizer.separator)


def _open_source(source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, is_writer: bool) -> Tokens:
    if source.format in ("nanogpt", "megatron"):
        return (open_nanogpt if source.format == "nanogpt" else open_megatron)(source.url, tokenizer)
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
    kind = source.format
    return DocumentReader(
        format="auto" if kind in OTHER_FORMATS else kind,  # type: ignore[arg-type]
        text_field=source.text_field,
        bad_line=config.bad_line,
    )


class BatchLoader:
    """Batches of these shapes from a position on, prefetched by a thread, whose errors the next `next` raises."""

    def __init__(self, dataset: Dataset, shapes: Iterator[BatchShape], *, position: int, prefetch: int = 2) -> None:
        self._dataset, self._shapes = dataset, shapes
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
            for shape in self._shapes:
                if self._is_closed.is_set():
                    return
                self._queue.put(self._dataset.batch(position, shape))
                position += shape.global_batch_size
        except Exception as error:  # noqa: BLE001 - raised in the training loop
            self._queue.put(error)
        except BaseException as error:  # noqa: BLE001 - else the loop would wait for ever
            self._queue.put(
                DataError(f"reading sample data raised {error!r}, which ends a thread: raise an Exception instead")
            )


def unigram_entropy(file: Tokens, *, limit: int = 1 << 20) -> float:
    """Entropy in nats of the first `limit` tokens: the loss of a model that knows token frequencies only."""
    counts = np.bincount(file.read(0, min(limit, len(file))))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
