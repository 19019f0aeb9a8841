"""K-means over points that lie on many ranks: each step sums over all of them, so that every rank has the same centres.

Shapes: points_ND, centres_KD; a rank's N may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ROWS = 4096  # points whose distances to all centres are in memory at once


@dataclass(frozen=True, slots=True)
class Sums:
    """What one pass over points yields: for each centre the sum and the number of its points, and the squared distance in all."""

    points_KD: Tensor
    counts_K: Tensor
    distance: float

    def over_all_ranks(self) -> Sums:
        """The sums of all ranks, by one all-reduce."""
        packed = torch.cat([self.points_KD.flatten(), self.counts_K, torch.tensor([self.distance])])
        dist.all_reduce(packed)
        size = self.points_KD.numel()
        return Sums(packed[:size].view_as(self.points_KD), packed[size:-1], float(packed[-1]))


def nearest(points_ND: Tensor, centres_KD: Tensor) -> tuple[Tensor, Tensor]:
    """For each point the number of its nearest centre, and the squared distance to it."""
    norms_K = centres_KD.square().sum(1)
    parts = [(rows @ centres_KD.T).mul_(-2).add_(norms_K).min(1) for rows in torch.split(points_ND, ROWS)]
    if not parts:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    found = torch.cat([part.indices for part in parts])
    distances = torch.cat([part.values for part in parts]) + points_ND.square().sum(1)
    return found, distances.clamp_min_(0)


def assign(batches: Sequence[Tensor], centres_KD: Tensor) -> Sums:
    """The sums of this rank's points, a batch of any type at a time."""
    num_centres, dimensions = centres_KD.shape
    points_KD = torch.zeros(num_centres, dimensions)
    counts_K, distance = torch.zeros(num_centres), 0.0
    for batch in batches:
        points_ND = batch.float()
        found, distances = nearest(points_ND, centres_KD)
        points_KD.index_add_(0, found, points_ND)
        counts_K += torch.bincount(found, minlength=num_centres)
        distance += float(distances.sum())
    return Sums(points_KD, counts_K, distance)


def lloyd_step(batches: Sequence[Tensor], centres_KD: Tensor) -> tuple[Tensor, float]:
    """The centres after one step over all points of all ranks, and the mean squared distance before it.

    A centre without points stays where it is.
    """
    sums = assign(batches, centres_KD).over_all_ranks()
    means_KD = sums.points_KD / sums.counts_K.clamp_min(1)[:, None]
    moved_KD = torch.where(sums.counts_K[:, None] > 0, means_KD, centres_KD)
    return moved_KD, sums.distance / max(float(sums.counts_K.sum()), 1.0)


def mini_batch_step(batches: Sequence[Tensor], centres_KD: Tensor, seen_K: Tensor) -> tuple[Tensor, Tensor]:
    """One step of mini-batch k-means (Sculley 2010) with the batches of all ranks: the centres, and the points each has seen.

    A centre is the mean of all points that it was ever given, so one all-reduced sum does what the paper does point by point.
    """
    sums = assign(batches, centres_KD).over_all_ranks()
    total_K = seen_K + sums.counts_K
    moved_KD = (centres_KD * seen_K[:, None] + sums.points_KD) / total_K.clamp_min(1)[:, None]
    return torch.where(total_K[:, None] > 0, moved_KD, centres_KD), total_K


def cluster_once(vectors_ND: Tensor, num_clusters: int, seed: int, *, iterations: int = 100) -> tuple[float, Tensor]:
    """Lloyd's algorithm on one rank, from a k-means++ start: the squared distance in all, and each vector's cluster."""
    random = torch.Generator().manual_seed(seed)
    centres_KD = _spread_start(vectors_ND, num_clusters, random)
    labels_N = torch.full((len(vectors_ND),), -1)
    for _ in range(iterations):
        found_N, distances_N = nearest(vectors_ND, centres_KD)
        if torch.equal(found_N, labels_N):
            break
        labels_N = found_N
        counts_K = torch.bincount(labels_N, minlength=num_clusters)
        means_KD = torch.zeros_like(centres_KD).index_add_(0, labels_N, vectors_ND) / counts_K.clamp_min(1)[:, None]
        centres_KD = torch.where(counts_K[:, None] > 0, means_KD, centres_KD)
    return float(distances_N.sum()), labels_N


def _spread_start(vectors_ND: Tensor, num_clusters: int, random: torch.Generator) -> Tensor:
    """Starting centres far from each other (k-means++, Arthur and Vassilvitskii 2007)."""
    chosen = [int(torch.randint(len(vectors_ND), (1,), generator=random))]
    far_N = torch.full((len(vectors_ND),), torch.inf)
    while len(chosen) < num_clusters:
        far_N = torch.minimum(far_N, (vectors_ND - vectors_ND[chosen[-1]]).square().sum(1))
        weights_N = far_N if float(far_N.sum()) > 0 else torch.ones_like(far_N)
        chosen.append(int(torch.multinomial(weights_N, 1, generator=random)))
    return vectors_ND[chosen]
