"""Each rule of the optimizer on several meshes: the losses of one process, and states that are bit-equal after a reshard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.parallel.config import ParallelConfig
from tools.rank_pool import RankPool
from tools.training.curves import relative_error
from tools.training.optimizer_runs import digests, train

STEPS = 4
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
def test_a_resume_with_another_rule_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, "muon", FSDP_TP, 1, "", str(tmp_path))
    with pytest.raises(AssertionError, match=r"ConfigError: .*the state of the optimizer 'muon', this run has 'adamw'"):
        ranks.run(train, "adamw", FSDP_TP, 1, str(tmp_path))
