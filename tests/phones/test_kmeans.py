"""K-means over ranks, and the score of its clusters."""

from __future__ import annotations

import pytest
import torch

from examples.phones.kmeans import assign, cluster_once, lloyd_step, mini_batch_step, nearest
from examples.phones.score import adjusted_rand_index


def _spots() -> tuple[torch.Tensor, list[int]]:
    """60 points around three corners, and the corner of each."""
    random = torch.Generator().manual_seed(0)
    truth = [number % 3 for number in range(60)]
    corners = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    return corners[truth] + torch.randn(60, 2, generator=random), truth


def test_nearest_agrees_with_all_distances() -> None:
    points, _ = _spots()
    centres = points[:5]
    found, distances = nearest(points, centres)
    expected = torch.cdist(points, centres).square().min(1)
    assert torch.equal(found, expected.indices)
    torch.testing.assert_close(distances, expected.values, rtol=1e-4, atol=1e-4)


def test_a_rank_without_points_adds_nothing() -> None:
    sums = assign([], torch.ones(4, 2))
    assert float(sums.counts_K.sum()) == sums.distance == 0.0


@pytest.mark.usefixtures("one_rank")
def test_a_lloyd_step_moves_centres_to_their_means() -> None:
    points, truth = _spots()
    start = points[:3]
    moved, distance = lloyd_step([points[:25], points[25:]], start)
    torch.testing.assert_close(
        moved, torch.stack([points[torch.tensor(truth) == corner].mean(0) for corner in range(3)])
    )
    assert distance == pytest.approx(float(torch.cdist(points, start).square().min(1).values.mean()), rel=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_a_centre_without_points_stays() -> None:
    points, _ = _spots()
    far = torch.tensor([[0.0, 0.0], [500.0, 500.0]])
    assert torch.equal(lloyd_step([points], far)[0][1], far[1])
    assert torch.equal(mini_batch_step([points], far, torch.zeros(2))[0][1], far[1])


@pytest.mark.usefixtures("one_rank")
def test_mini_batches_keep_the_mean_of_all_they_saw() -> None:
    points, _ = _spots()
    centre, seen = torch.zeros(1, 2), torch.zeros(1)
    for batch in torch.split(points, 7):
        centre, seen = mini_batch_step([batch], centre, seen)
    torch.testing.assert_close(centre[0], points.mean(0))
    assert seen.tolist() == [60]


def test_clusters_of_separate_spots_are_the_truth() -> None:
    points, truth = _spots()
    _, labels = min((cluster_once(points, 3, seed) for seed in range(3)), key=lambda found: found[0])
    assert adjusted_rand_index(truth, labels.tolist()) == 1.0


@pytest.mark.parametrize(
    ("truth", "found", "expected"),
    [
        ([0, 0, 1, 1], [1, 1, 0, 0], 1.0),
        ([0, 0, 0, 0], [2, 2, 2, 2], 1.0),
        ([0, 0, 1, 1], [0, 0, 1, 2], 4 / 7),  # scikit-learn: 0.571...
        ([0, 0, 1, 1], [0, 1, 0, 1], -0.5),
    ],
)
def test_adjusted_rand_index(truth: list[int], found: list[int], expected: float) -> None:
    assert adjusted_rand_index(truth, found) == pytest.approx(expected)
