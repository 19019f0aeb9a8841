"""A corpus read shard by shard while training goes on, without a pass over all of it, in the same order on any mesh.

A shard is one file. Each epoch takes the shards in a new order, and each shard's samples in a new order; both depend on the seed
alone. How many samples a shard has is known once it is tokenised. These counts, in the order of reading, turn a position into a
sample; they are saved with every checkpoint, so that a resume needs only the shard that it goes on with.

One process per machine tokenises, into the cache of all text, the next shard while the current one is trained on.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_ckpt.errors import DataError
from titan_ckpt.location import join, normalise
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.trainer.data.corpus import DocumentReader, File
from titan_ckpt.trainer.data.hub import HubSplit
from titan_ckpt.trainer.data.sample_order import mix, permuted
from titan_ckpt.trainer.data.token_files import corpus_digest, is_tokens, open_tokens, pretokenise
from titan_ckpt.trainer.data.token_source import TokenSource
from titan_ckpt.trainer.data.tokenizer import Tokenizer
from titan_ckpt.trainer.seams.loss import IGNORED

ASSET = "shard_counts.json"  # of a checkpoint
ENDLESS = 1 << 62  # samples, more than a run takes
OPEN = 4  # shards kept open
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a corpus is read as a stream."""

    seq_len: int
    seed: int
    shuffle: bool
    has_document_masks: bool
    cache: str
    is_writer: bool  # this process tokenises for its machine; the others wait for it
    wait_s: float  # for a shard, at most


class StreamSource:
    """A `DataSource` without end: sample n is the n-th of the run, so its order needs no other shuffling."""

    def __init__(
        self, files: Sequence[File | HubSplit], tokenizer: Tokenizer, reader: DocumentReader, options: StreamOptions
    ) -> None:
        self._files, self._tokenizer, self._reader, self._options = files, tokenizer, reader, options
        self.digest = corpus_digest(files, tokenizer, reader)
        self.fingerprint = f"stream {self.digest} {options.seed} {options.shuffle}"
        self.losses_per_sample = options.seq_len
        self._counts: list[int] = []  # samples of the shard read in each turn, as far as known
        self._ends: list[int] = []
        self._coming: dict[int, Future[TokenSource]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="titan-ckpt-shards")

    def __len__(self) -> int:
        return ENDLESS

    def describe(self) -> str:
        """One line for the log."""
        return f"{len(self._files)} shards, tokenised while they are read"

    def sample(self, index: int) -> dict[str, Tensor]:
        """Tokens and labels [L] of sample `index` of the run; waits for its shard. DataError names a shard that fails."""
        while not self._ends or self._ends[-1] <= index:
            self._extend()
        turn = bisect_right(self._ends, index)
        number, epoch = self.shard(turn)
        source, count = self._get(number), self._counts[turn]
        if len(source) != count:
            raise DataError(
                f"{self._files[number].where}: {len(source)} samples, but {count} when it was read before; has it changed?"
            )
        step = index - (self._ends[turn] - count)
        if self._options.shuffle:
            step = permuted(step, count, mix(self._options.seed, epoch, number))
        self._begin(self.shard(turn + 1)[0])
        return source.sample(step)

    def filler(self) -> dict[str, Tensor]:
        """Zeros, none of which counts."""
        tokens_L = torch.zeros(self._options.seq_len, dtype=torch.int64)
        fields = {"tokens": tokens_L, "labels": torch.full_like(tokens_L, IGNORED)}
        return fields | ({"documents": tokens_L} if self._options.has_document_masks else {})

    def shard(self, turn: int) -> tuple[int, int]:
        """The shard read in turn `turn`, and its epoch."""
        epoch, place = divmod(turn, len(self._files))
        if self._options.shuffle:
            place = permuted(place, len(self._files), mix(self._options.seed, epoch))
        return place, epoch

    @property
    def counts(self) -> list[int]:
        """Samples of the shards in the order in which they are read."""
        return list(self._counts)

    def recall(self, counts: list[int]) -> None:
        """Take up the counts of an earlier run over the same corpus."""
        if not self._counts:
            self._counts = list(counts)

    def _extend(self) -> None:
        turn = len(self._ends)
        if turn == len(self._counts):
            self._counts.append(len(self._get(self.shard(turn)[0])))
        self._ends.append((self._ends[-1] if self._ends else 0) + self._counts[turn])
        if turn + 1 == len(self._files) and not self._ends[-1]:
            raise DataError(
                f"{self._files[0].where} and all other shards are shorter than data.seq_len = {self._options.seq_len}"
            )

    def _get(self, number: int) -> TokenSource:
        found = self._begin(number).result()
        with self._lock:
            self._coming[number] = self._coming.pop(number)  # the newest last
            for old in list(self._coming)[:-OPEN]:
                if self._coming[old].done():
                    del self._coming[old]
        return found

    def _begin(self, number: int) -> Future[TokenSource]:
        with self._lock:
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self._make, number)
            return self._coming[number]

    def _make(self, number: int) -> TokenSource:
        file, options = self._files[number], self._options
        folder = join(normalise(options.cache), f"shard-{corpus_digest([file], self._tokenizer, self._reader)}")
        if not is_tokens(folder):
            if options.is_writer:
                pretokenise([file], self._tokenizer, replace(self._reader, skipped_lines={}), folder)
            else:
                _wait_for(folder, file.where, options.wait_s)
        return TokenSource(
            file=open_tokens(folder), seq_len=options.seq_len, has_document_masks=options.has_document_masks
        )


def _wait_for(folder: str, where: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_tokens(folder):
        if time.monotonic() > end:
            raise DataError(f"{where}: not tokenised by local rank 0 within {limit_s:.0f} s (train.step_timeout_s)")
        time.sleep(POLL_S)


def counts_asset(sources: Sequence[object]) -> dict[str, bytes]:
    """The counts of the streams among a run's sources, as an asset of its checkpoints; empty if there are none."""
    counts = [[source.digest, source.counts] for source in sources if isinstance(source, StreamSource)]
    return {ASSET: json.dumps(counts).encode()} if counts else {}


def recall_counts(sources: Sequence[object], content: bytes, where: str) -> None:
    """Take up the counts in an asset; those of another corpus mean nothing here."""
    saved = {}
    for entry in JsonValue(parse_json(content, where), where).entries():
        digest, counts = entry.entries()
        saved[digest.text()] = counts.wholes()
    for source in sources:
        if isinstance(source, StreamSource) and source.digest in saved:
            source.recall(saved[source.digest])
