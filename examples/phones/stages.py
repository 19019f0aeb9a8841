"""The pipeline of arXiv 1512.02972 on a crew of ranks: describe pictures, learn a vocabulary, vectorise, cluster.

Each stage goes on from its newest checkpoint, on whatever number of ranks it was written. What a picture yields depends on the
album and the choices alone, so the result does not depend on who computed it (sums of floats apart).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from examples.phones.choices import DIMENSIONS, Choices
from examples.phones.features import describe
from examples.phones.kmeans import cluster_once, lloyd_step, mini_batch_step, nearest
from examples.phones.pictures import open_gray
from examples.phones.progress import Crew, Stage
from titan_ckpt import TitanError
from titan_ckpt.errors import DataError

log = logging.getLogger(__name__)
Words = dict[int, Tensor]
"""This rank's pictures by number, each with its descriptors: [descriptors, dimensions], bytes."""
Blocks = dict[str, Tensor]
DTYPES = {"descriptors": torch.uint8, "counts": torch.int32, "histograms": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Album:
    """The pictures, which every peer has, in blocks: the units in which stages save and resume."""

    pictures: Sequence[Path]
    block: int

    @property
    def size(self) -> int:
        """Number of pictures."""
        return len(self.pictures)

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last may be smaller."""
        return -(-self.size // self.block)

    def length(self, block: int) -> int:
        """Number of pictures in a block."""
        return min(self.block, self.size - block * self.block)

    def mine(self, block: int, crew: Crew) -> list[int]:
        """This rank's pictures of a block."""
        return [block * self.block + row for row in crew.rows(self.length(block))]


def run_pipeline(crew: Crew, album: Album, choices: Choices) -> list[int]:
    """The cluster of each picture, on every rank. Goes on where earlier crews have stopped."""
    words = describe_pictures(crew, album, choices)
    centres_KD = learn_vocabulary(crew, album, choices, words)
    vectors_NK = vectorise(crew, album, words, centres_KD)
    return cluster(crew, choices, vectors_NK)


def describe_pictures(crew: Crew, album: Album, choices: Choices) -> Words:
    """Stage 1: descriptors of this rank's pictures of every block, sharded over the ranks."""

    def compute(block: int) -> Blocks:
        return _padded([_descriptors(album, choices, number) for number in album.mine(block, crew)], choices)

    words: Words = {}
    for block, tensors in _by_blocks(crew, "descriptors", album, compute):
        pairs = zip(album.mine(block, crew), tensors["descriptors"], tensors["counts"].tolist(), strict=True)
        words.update({number: rows[:count].clone() for number, rows, count in pairs})
    return words


def learn_vocabulary(crew: Crew, album: Album, choices: Choices, words: Words) -> Tensor:
    """Stage 2: the centres of k-means over the descriptors of all ranks; equal on all of them."""
    with Stage(crew, "vocabulary", keep=2) as stage:
        size = (choices.words, DIMENSIONS[choices.features])
        state: dict[str, Any] = {
            "centres": torch.zeros(size),
            "seen": torch.zeros(choices.words),
            "distance": torch.inf,
        }
        step = stage.saved[-1].step if stage.saved else 0
        if step:
            stage.load(state, step)
        else:
            state["centres"] = _first_centres(words, album, choices)
        sampled = {number: _sample(rows, number, choices) for number, rows in words.items()}
        is_last = stage.is_finished
        while not is_last:
            is_last = _one_step(state, sampled, album, choices, step) or step + 1 == choices.iterations
            step += 1
            if stage.is_due(is_last=is_last):
                stage.save(state, first=0, step=step, is_last=is_last)
        centres_KD: Tensor = state["centres"]
        return centres_KD


def vectorise(crew: Crew, album: Album, words: Words, centres_KD: Tensor) -> Tensor:
    """Stage 3: a vector for each picture, on every rank: how often each word occurs, weighted by tf-idf, of length 1."""

    def compute(block: int) -> Blocks:
        rows = [_histogram(words[number], centres_KD) for number in album.mine(block, crew)]
        return {"histograms": torch.stack(rows) if rows else torch.zeros(0, len(centres_KD))}

    vectors_NK = torch.zeros(album.size, len(centres_KD))
    for block, tensors in _by_blocks(crew, "vectors", album, compute):
        vectors_NK[album.mine(block, crew)] = tensors["histograms"]
    dist.all_reduce(vectors_NK)  # a row is 0 on all ranks but one
    return weighted(vectors_NK)


def weighted(histograms_NK: Tensor) -> Tensor:
    """tf-idf: the share of a word in a picture, times the logarithm of how rare pictures with it are; rows of length 1."""
    share_NK = histograms_NK / histograms_NK.sum(1, keepdim=True).clamp_min(1)
    num_pictures = len(histograms_NK)
    rarity_K = torch.log((1 + num_pictures) / (1 + (histograms_NK > 0).sum(0)))
    return torch.nn.functional.normalize(share_NK * rarity_K)


def cluster(crew: Crew, choices: Choices, vectors_NK: Tensor) -> list[int]:
    """Stage 4: k-means from several starts, which the ranks share; the best one's clusters, on every rank."""
    with Stage(crew, "clusters", keep=2) as stage:
        state: dict[str, Any] = {"labels": torch.zeros(len(vectors_NK), dtype=torch.int64), "distance": torch.inf}
        done = stage.saved[-1].step if stage.saved else 0
        if done:
            stage.load(state, done)
        while done < choices.restarts:
            start = done + crew.rank
            seed, mine = choices.seed + start, (float("inf"), state["labels"])
            if start < choices.restarts:
                mine = cluster_once(vectors_NK, choices.clusters, seed)
            found = [mine] * crew.size
            dist.all_gather_object(found, mine)
            state["distance"], state["labels"] = min(
                [(state["distance"], state["labels"]), *found], key=lambda pair: pair[0]
            )
            done = min(done + crew.size, choices.restarts)
            if stage.is_due(is_last=done == choices.restarts):
                stage.save(state, first=0, step=done, is_last=done == choices.restarts)
        labels: list[int] = state["labels"].tolist()
        return labels


def _by_blocks(crew: Crew, name: str, album: Album, compute: Callable[[int], Blocks]) -> Iterable[tuple[int, Blocks]]:
    """This rank's rows of every block, loaded if it is committed, else computed and saved."""
    with Stage(crew, name) as stage:
        loaded = _load_blocks(stage, album)
        yield from loaded.items()
        pending: dict[int, Blocks] = {}
        missing = [block for block in range(album.num_blocks) if block not in loaded]
        for block in missing:
            pending[block] = compute(block)
            yield block, pending[block]
            is_last = block == missing[-1]
            if stage.is_due(is_last=is_last):
                state = {str(key): _sharded(crew, album.length(key), part) for key, part in pending.items()}
                stage.save(state, first=min(pending), step=block + 1, is_last=is_last)
                pending = {}


def _load_blocks(stage: Stage, album: Album) -> dict[int, Blocks]:
    """The committed blocks. Those that some rank cannot read, since their holders are gone, must be computed again."""
    loaded: dict[int, Blocks] = {}
    for saved in stage.saved:
        tensors: Blocks = {}
        try:
            tensors = stage.load_sharded(saved.step, DTYPES)
        except TitanError as error:
            log.warning("%s %d to %d: computed again: %s", stage.name, saved.first, saved.step, error)
        if any(stage.crew.any(not tensors)):
            continue
        for fqn, tensor in tensors.items():
            block, _, name = fqn.partition(".")
            loaded.setdefault(int(block), {})[name] = tensor
    return {block: tensors for block, tensors in loaded.items() if block < album.num_blocks}


def _sharded(crew: Crew, count: int, tensors: Blocks) -> Blocks:
    return {name: crew.sharded(tensor, count) for name, tensor in tensors.items()}


def _descriptors(album: Album, choices: Choices, number: int) -> Tensor:
    """Descriptors of one picture, at most `per_picture` of them."""
    picture = open_gray(album.pictures[number], choices.width)
    rows = describe(picture, choices.features)
    if len(rows) > choices.per_picture:
        chosen = np.random.default_rng([choices.seed, number]).permutation(len(rows))[: choices.per_picture]
        rows = rows[np.sort(chosen)]
    return torch.from_numpy(rows)


def _padded(rows: list[Tensor], choices: Choices) -> Blocks:
    """Descriptors as one tensor, as long as the longest of all ranks, and the true lengths."""
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    longest = torch.tensor(max([1, *counts.tolist()]))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = torch.zeros(len(rows), int(longest), DIMENSIONS[choices.features], dtype=torch.uint8)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return {"descriptors": padded, "counts": counts}


def _sample(rows: Tensor, number: int, choices: Choices) -> Tensor:
    """The descriptors of a picture that take part in learning the vocabulary."""
    if choices.sample >= 1:
        return rows
    drawn = np.random.default_rng([choices.seed, 1, number]).random(len(rows)) < choices.sample
    return rows[torch.from_numpy(drawn)]


def _first_centres(words: Words, album: Album, choices: Choices) -> Tensor:
    """Descriptors drawn from random pictures, wherever these are; more are drawn than needed, since a picture may have none.

    If too few are found, they repeat; DataError if there are none.
    """
    random = np.random.default_rng([choices.seed, 2])
    drawn = 4 * choices.words
    numbers, places = random.integers(album.size, size=drawn).tolist(), random.random(drawn).tolist()
    found = torch.zeros(drawn, DIMENSIONS[choices.features] + 1)
    for row, number, place in zip(found, numbers, places, strict=True):
        if number in words and len(words[number]):
            row[:-1] = words[number][int(place * len(words[number]))].float()
            row[-1] = 1
    dist.all_reduce(found)
    found = found[found[:, -1] > 0, :-1]
    if not len(found):
        raise DataError(
            f"no picture drawn from the album has a descriptor: features {choices.features}, width {choices.width}"
        )
    return found[torch.arange(choices.words) % len(found)].contiguous()


def _one_step(state: dict[str, Any], points: Words, album: Album, choices: Choices, step: int) -> bool:
    """Move the centres in `state`; True if Lloyd's algorithm has converged."""
    centres_KD, seen_K, before = state["centres"], state["seen"], state["distance"]
    if choices.batch:
        drawn = np.random.default_rng([choices.seed, 3, step]).choice(
            album.size, min(choices.batch, album.size), replace=False
        )
        batches = [points[number] for number in drawn.tolist() if number in points]
        batch = [torch.cat(batches)] if batches else []
        state["centres"], state["seen"] = mini_batch_step(batch, centres_KD, seen_K)
        return False
    state["centres"], after = lloyd_step(list(points.values()), centres_KD)
    state["distance"] = after
    return bool(before - after < choices.tolerance * after)


def _histogram(rows: Tensor, centres_KD: Tensor) -> Tensor:
    """How often each word occurs in a picture."""
    found, _ = nearest(rows.float(), centres_KD)
    return torch.bincount(found, minlength=len(centres_KD)).float()
