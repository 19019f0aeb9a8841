"""Conversations as a source of samples: packed or padded to `seq_len`, with labels where the assistant speaks.

Shapes: L `seq_len`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from titan_ckpt.errors import DataError
from titan_ckpt.trainer.data.chat_tokens import ChatFile
from titan_ckpt.trainer.data.packing import pack
from titan_ckpt.trainer.data.token_source import positions
from titan_ckpt.trainer.seams.loss import IGNORED

log = logging.getLogger(__name__)
TooLong = Literal["stop", "skip", "cut_left", "cut_right"]


@dataclass(frozen=True, slots=True)
class Fit:
    """What becomes of sequences that are longer than a sample, or have nothing to learn: the rest and the counts.

    `tokens` and `learned`, those with a label, are of what is kept.
    """

    kept: NDArray[np.int64]
    tokens: int
    learned: int
    cut: int
    left_out: int
    empty: int


class Sequences:
    """The sequences of a file, each cut to at most `seq_len` tokens."""

    def __init__(self, file: ChatFile, seq_len: int, too_long: TooLong) -> None:
        self.file, self.seq_len, self.too_long = file, seq_len, too_long
        self.lengths = np.minimum(file.lengths, seq_len)

    def read(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens, and for each its label: the next token if that is learned, else IGNORED."""
        ids, is_learned = self.file.read(number)
        part = slice(-self.seq_len, None) if self.too_long == "cut_left" else slice(0, self.seq_len)
        ids, is_learned = ids[part], is_learned[part]
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        labels[:-1] = np.where(is_learned[1:], ids[1:], IGNORED)
        return ids, labels

    def fit(self, per_example: int = 1) -> Fit:
        """The examples that are used, each of `per_example` sequences; DataError for a long one if that is to stop the run."""
        lengths = self.file.lengths
        is_long: NDArray[np.bool_] = np.asarray((lengths > self.seq_len).reshape(-1, per_example).any(axis=1))
        if is_long.any() and self.too_long == "stop":
            first = int(np.flatnonzero(lengths > self.seq_len)[0])
            raise DataError(
                f"{self.file.where(first)}: {lengths[first]} tokens, but data.seq_len = {self.seq_len}; "
                f"{int(is_long.sum())} of {len(is_long)} examples are longer. Raise data.seq_len, or say what happens to them "
                'with chat.too_long = "skip", "cut_left" or "cut_right"'
            )
        left_out = is_long if self.too_long == "skip" else np.zeros_like(is_long)
        ends = self.file.starts[1:] if self.too_long == "cut_left" else self.file.starts[:-1] + self.lengths
        labels = self.file.count_learned(ends - self.lengths + 1, ends).reshape(-1, per_example)
        empty: NDArray[np.bool_] = (labels == 0).any(axis=1) & ~left_out
        kept = np.flatnonzero(~left_out & ~empty)
        if not len(kept):
            raise DataError(
                f"{self.file.where(0)} and all others: no answer fits into data.seq_len = {self.seq_len} tokens"
            )
        cut = int((is_long & ~left_out & ~empty).sum())
        tokens = int(self.lengths.reshape(-1, per_example)[kept].sum())
        return Fit(kept, tokens, int(labels[kept].sum()), cut, int(left_out.sum()), int(empty.sum()))


def describe_fit(fit: Fit, seq_len: int) -> str:
    """What was cut or left out; empty if nothing was."""
    said = [
        f"{fit.cut} cut to {seq_len} tokens" if fit.cut else "",
        f"{fit.left_out} left out, which are longer than {seq_len} tokens" if fit.left_out else "",
        f"{fit.empty} left out, in which nothing is learned" if fit.empty else "",
    ]
    return ", ".join(filter(None, said))


class ChatSource:
    """A `DataSource` of conversations. Packed, a sample has `documents` and `positions`, which begin anew in each of them."""

    def __init__(self, file: ChatFile, *, seq_len: int, too_long: TooLong, is_packed: bool, padding: int) -> None:
        self._sequences, self._seq_len, self._padding = Sequences(file, seq_len, too_long), seq_len, padding
        self._is_packed = is_packed
        self.fit = fit = self._sequences.fit()
        if is_packed:
            bins = pack(self._sequences.lengths[fit.kept], seq_len)
            self._bins = [fit.kept[members] for members in bins]
        else:
            self._bins = [fit.kept[number : number + 1] for number in range(len(fit.kept))]
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{file.header.digest} {too_long} {is_packed}".encode())
        if said := describe_fit(fit, seq_len):
            log.warning("conversations: %s", said)

    def __len__(self) -> int:
        return len(self._bins)

    def sample(self, index: int) -> dict[str, Tensor]:
        """The sequences of a bin one after another, then padding; all fields [L]."""
        return self._fields([self._sequences.read(int(number)) for number in self._bins[index]])

    def filler(self) -> dict[str, Tensor]:
        """Padding alone."""
        return self._fields([])

    def _fields(self, parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> dict[str, Tensor]:
        fields, documents = row(parts, self._seq_len, self._padding)
        return fields | {"documents": documents, "positions": positions(documents)} if self._is_packed else fields

    def describe(self) -> str:
        """One line for the log."""
        fit = self.fit
        return (
            f"{len(fit.kept):,} conversations in {len(self):,} samples, {fit.tokens / (len(self) * self._seq_len):.1%} full; "
            f"{fit.learned:,} of {fit.tokens:,} tokens are learned"
        )


class PairSource:
    """A `DataSource` of pairs: `tokens` and `labels` [2, L], the chosen answer first, padded."""

    losses_per_sample = 1

    def __init__(self, file: ChatFile, *, seq_len: int, too_long: TooLong, padding: int) -> None:
        self._sequences, self._seq_len, self._padding = Sequences(file, seq_len, too_long), seq_len, padding
        self._pairs = self._sequences.fit(per_example=2)
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"pairs {file.header.digest} {too_long}".encode())
        if said := describe_fit(self._pairs, seq_len):
            log.warning("pairs: %s", said)

    def __len__(self) -> int:
        return len(self._pairs.kept)

    def sample(self, index: int) -> dict[str, Tensor]:
        """The chosen and the rejected answer, each behind the prompt."""
        number = 2 * int(self._pairs.kept[index])
        return self._stacked([[self._sequences.read(number)], [self._sequences.read(number + 1)]])

    def filler(self) -> dict[str, Tensor]:
        """Padding alone."""
        return self._stacked([[], []])

    def _stacked(self, rows: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]]) -> dict[str, Tensor]:
        made = [row(parts, self._seq_len, self._padding)[0] for parts in rows]
        return {name: torch.stack([fields[name] for fields in made]) for name in made[0]}


def row(
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]], seq_len: int, padding: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens and labels of sequences one after another, padded, and for each token the number of its sequence; all [L]."""
    tokens_L, labels_L = torch.full((seq_len,), padding), torch.full((seq_len,), IGNORED)
    documents_L = torch.full((seq_len,), len(parts))
    place = 0
    for number, (ids, own) in enumerate(parts):
        here = slice(place, place + len(ids))
        tokens_L[here], labels_L[here], documents_L[here] = torch.from_numpy(ids), torch.from_numpy(own), number
        place += len(ids)
    return {"tokens": tokens_L, "labels": labels_L}, documents_L
