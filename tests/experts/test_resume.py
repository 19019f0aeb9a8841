"""Mixtures: experts are stored once, cut by expert, and resume on every other mesh with ep, online and resharded offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.resharding.reshard import plan_reshard
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.trainer.parallel.config import ParallelConfig
from tools.rank_pool import RankPool
from tools.training.resume_matrix import STEPS_AFTER, STEPS_BEFORE, reshard, resume_both_ways, train_sources

pytestmark = pytest.mark.dist
MESHES = {
    "dp_shard=4": ParallelConfig(dp_shard=4),
    "dp_shard=2,ep=2": ParallelConfig(dp_shard=4, ep=2),
    "ep=2,tp=2": ParallelConfig(dp_shard=2, ep=2, tp=2),
    "pp=2,ep=2": ParallelConfig(pp=2, dp_shard=2, ep=2),
    "cp=2,ep=2": ParallelConfig(cp=2, dp_shard=2, ep=4),  # over cp too
}
PAIRS = [
    ("dp_shard=2,ep=2", "dp_shard=4"),
    ("dp_shard=4", "ep=2,tp=2"),
    ("pp=2,ep=2", "dp_shard=2,ep=2"),
    ("dp_shard=2,ep=2", "pp=2,ep=2"),
    ("pp=2,ep=2", "cp=2,ep=2"),
    ("cp=2,ep=2", "dp_shard=2,ep=2"),
]
EXPERTS = "model.model.layers.1.mlp.experts.gate_up_proj"
PROJECTION = "model.model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def sources(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A trained checkpoint for every source mesh."""
    folder = tmp_path_factory.mktemp("sources")
    return train_sources(pool, MESHES, (mesh for mesh, _ in PAIRS), folder, is_mixture=True)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_resharded_mixture_resumes_as_an_online_load(
    pool: RankPool, sources: dict[str, str], tmp_path: Path, source: str, target: str
) -> None:
    online, offline = resume_both_ways(pool, MESHES[target], sources[source], str(tmp_path), target, is_mixture=True)
    assert offline == online
    assert all(len(rank.losses) == STEPS_AFTER and rank.start.step == STEPS_BEFORE for rank in offline)


def test_experts_are_stored_once_and_cut_by_expert(sources: dict[str, str]) -> None:
    manifest = open_checkpoint(sources["dp_shard=2,ep=2"]).manifest
    entry = manifest.by_fqn[EXPERTS]
    assert entry.placements == {"ep": Shard(0), "dp_shard": Shard(0)}
    assert entry.global_shape == (8, 56, 64)
    assert entry.num_chunks == 4
    assert manifest.by_fqn[PROJECTION].placements == {"dp_shard+ep": Shard(0)}


def test_an_offline_layout_is_that_of_the_trainer(sources: dict[str, str], tmp_path: Path) -> None:
    reshard(sources["pp=2,ep=2"], str(tmp_path), "dp_shard=2,ep=2")
    made, trained = open_checkpoint(str(tmp_path)).manifest, open_checkpoint(sources["dp_shard=2,ep=2"]).manifest
    names = [fqn for fqn in trained.by_fqn if fqn.startswith("model.")]
    assert {fqn: made.by_fqn[fqn].placements for fqn in names} == {fqn: trained.by_fqn[fqn].placements for fqn in names}


def test_the_bias_and_the_load_of_experts_are_saved(sources: dict[str, str]) -> None:
    checkpoint = open_checkpoint(sources["pp=2,ep=2"])
    total = checkpoint.read("routers.model.layers.2.mlp.gate.total")
    assert int(total.sum()) == STEPS_BEFORE * 8 * 24 * 2  # samples, tokens, experts per token
    bias = checkpoint.read("model.model.layers.2.mlp.gate.e_score_correction_bias")
    assert 0 < float(bias.abs().max()) <= STEPS_BEFORE * 0.01 + 1e-6


def test_inspect_shows_how_experts_are_cut(sources: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", sources["dp_shard=2,ep=2"], "*experts*"]) == 0
    shown = capsys.readouterr().out
    assert EXPERTS in shown
    assert "ep:0" in shown


def test_experts_over_cp_and_fsdp_are_cut_by_both(sources: dict[str, str]) -> None:
    manifest = open_checkpoint(sources["cp=2,ep=2"]).manifest
    assert manifest.by_fqn[EXPERTS].placements == {"cp+ep": Shard(0), "dp_shard": Shard(0)}
    assert manifest.by_fqn[EXPERTS].num_chunks == 4
    assert manifest.by_fqn[PROJECTION].placements == {"dp_shard+cp+ep": Shard(0)}


def test_experts_over_cp_are_laid_out_by_ep_elsewhere(sources: dict[str, str]) -> None:
    plan = plan_reshard(open_checkpoint(sources["cp=2,ep=2"]), MeshSpec.parse("dp_shard=2,cp=2,ep=4"))
    placements = {entry.fqn: entry.placements for entry in plan.target.tensors}
    assert placements[EXPERTS] == {"ep": Shard(0), "dp_shard+cp": Shard(0)}
    assert placements[PROJECTION] == {"dp_shard+cp+ep": Shard(0)}
