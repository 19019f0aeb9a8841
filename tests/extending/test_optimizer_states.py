"""Each rule of the optimizer on several meshes: the losses of one process, and states that are bit-equal after a reshard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from tools.rank_pool import RankPool
from tools.training.curves import relative_error
from tools.training.optimizer_runs import MODEL, digests, train

STEPS = 4
NORMS = 2 * MODEL.n_layers + 1
WEIGHTS = NORMS + 7 * MODEL.n_layers + 2
FSDP_TP, PP_FSDP = ParallelConfig(dp_shard=2, tp=2), ParallelConfig(pp=2, dp_shard=2)


@pytest.mark.dist
@pytest.mark.parametrize(("rule", "bar"), [("muon", 1e-6), ("int8", 1e-5), ("own_whole", 1e-6)])
def test_states_reshard_bit_equal_and_training_goes_on(ranks: RankPool, tmp_path: Path, rule: str, bar: float) -> None:
    plain = train(0, rule, ParallelConfig(), 2 * STEPS)
    dist.destroy_process_group()
    first, moved, after = (str(tmp_path / name) for name in ("first", "moved", "after"))
    run = ranks.run(train, rule, FSDP_TP, STEPS, "", first)[0]
    run_plan(plan_reshard(open_checkpoint(first), MeshSpec.parse("pp=2,dp_shard=2")), moved, memory_bytes=16 << 20)
    ranks.run(train, rule, PP_FSDP, 0, moved, after)  # loads, and saves at once
    assert digests(first) == digests(moved) == digests(after)
    rest = ranks.run(train, rule, PP_FSDP, STEPS, moved)[0]
    assert relative_error(run.losses + rest.losses, plain.losses) <= bar
    assert rest.averaged == pytest.approx(plain.averaged, rel=bar)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp_shard=4),
        FSDP_TP,
        ParallelConfig(dp_replicate=2, dp_shard=2),
        ParallelConfig(dp_shard=2, cp=2, activation_checkpoint="full"),
        ParallelConfig(tp=4, dp_shard=1, sequence_parallel=False),
    ],
    ids=lambda parallel: str(mesh_spec(parallel, 4)),
)
def test_updates_in_the_backward_are_the_same(ranks: RankPool, tmp_path: Path, parallel: ParallelConfig) -> None:
    at_end, early = (ranks.run(train, r, parallel, STEPS, "", str(tmp_path / r))[0] for r in ("at_end", "in_backward"))
    assert at_end.left == WEIGHTS
    assert early.left == (NORMS if parallel.tp > 1 and parallel.sequence_parallel else 0)  # those are summed over tp
    assert early.losses == at_end.losses
    assert early.averaged == at_end.averaged
    assert early.norms == pytest.approx(at_end.norms, rel=1e-6)
    assert digests(str(tmp_path / "in_backward")) == digests(str(tmp_path / "at_end"))


@pytest.mark.dist
def test_a_resume_with_another_rule_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, "muon", FSDP_TP, 1, "", str(tmp_path))
    with pytest.raises(AssertionError, match=r"ConfigError: .*the state of the optimizer 'muon', this run has 'adamw'"):
        ranks.run(train, "adamw", FSDP_TP, 1, str(tmp_path))
