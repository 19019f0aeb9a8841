"""A job resumed from a resharded checkpoint continues exactly like one that loaded the source checkpoint online.

All pairs of meshes: `make reshard-matrix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ckpt.trainer.parallel.config import SPLIT_BACKWARD, ParallelConfig, PipelineSchedule
from tools.rank_pool import RankPool
from tools.training.resume_matrix import (
    STEPS_AFTER,
    STEPS_BEFORE,
    losses_without_stop,
    resume,
    resume_both_ways,
    train_and_save,
    train_sources,
)

pytestmark = pytest.mark.dist
MESHES = {
    "dp_shard=4": ParallelConfig(dp_shard=4),
    "dp_replicate=2,dp_shard=2": ParallelConfig(dp_replicate=2, dp_shard=2),
    "dp_shard=2,tp=2": ParallelConfig(dp_shard=2, tp=2),
    "pp=2,dp_shard=2": ParallelConfig(pp=2, dp_shard=2),
    "pp=2,tp=2": ParallelConfig(pp=2, dp_shard=1, tp=2),
    "dp_shard=2,cp=2": ParallelConfig(dp_shard=2, cp=2),
}
PAIRS = [
    ("dp_shard=4", "pp=2,tp=2"),
    ("dp_shard=4", "dp_shard=2,cp=2"),
    ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"),
    ("dp_shard=2,tp=2", "dp_shard=4"),
    ("dp_shard=2,tp=2", "pp=2,dp_shard=2"),
    ("pp=2,dp_shard=2", "dp_replicate=2,dp_shard=2"),
    ("pp=2,tp=2", "dp_shard=4"),
    ("dp_shard=2,cp=2", "pp=2,tp=2"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def sources(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A trained checkpoint for every source mesh."""
    return train_sources(pool, MESHES, (mesh for mesh, _ in PAIRS), tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_resharded_checkpoint_resumes_as_an_online_load(
    pool: RankPool, sources: dict[str, str], tmp_path: Path, source: str, target: str
) -> None:
    online, offline = resume_both_ways(pool, MESHES[target], sources[source], str(tmp_path), target)
    assert offline == online
    assert all((len(r.losses), r.losses, r.start.step) == (STEPS_AFTER, online[0].losses, STEPS_BEFORE) for r in online)
    assert online[0].losses[-1] < online[0].losses[0]


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_a_split_backward_resumes_as_if_it_had_not_stopped(
    pool: RankPool, tmp_path: Path, schedule: PipelineSchedule
) -> None:
    parallel = ParallelConfig(pp=2, dp_shard=2, pp_schedule=schedule)
    expected = pool.run(losses_without_stop, parallel, True)
    pool.run(train_and_save, parallel, str(tmp_path), True)
    assert [resumed.losses for resumed in pool.run(resume, parallel, str(tmp_path), True)] == expected
