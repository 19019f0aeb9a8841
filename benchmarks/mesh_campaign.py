"""Meshes of 8 and 16 real ranks against the single process, 20 steps each: python -m benchmarks.mesh_campaign [ranks ...]

Prints one line per mesh with the largest relative difference of loss and gradient norm; exit code 1 when a loss is off by more
than 1e-5. Takes minutes: CI runs the same curves on 4 ranks.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from tests.pool import RankPool
from tests.trainer_curves import SMALL, Run, relative_error, single, train
from titan_ckpt.trainer.parallel_config import ParallelConfig, mesh_spec

BAR = 1e-5
DEEP = replace(SMALL, n_layers=8)
MESHES: dict[int, list[ParallelConfig]] = {
    8: [
        ParallelConfig(),
        ParallelConfig(dp_replicate=2, dp_shard=2, tp=2),
        ParallelConfig(dp_shard=2, cp=2, tp=2),
        ParallelConfig(dp_shard=2, cp=2, tp=2, cp_method="all_gather", sequence_parallel=False),
        ParallelConfig(pp=2, dp_shard=2, tp=2),
        ParallelConfig(pp=2, cp=2, tp=2, pp_schedule="Interleaved1F1B"),
        ParallelConfig(pp=2, dp_replicate=2, dp_shard=2, pp_schedule="InterleavedZeroBubble"),
        ParallelConfig(pp=2, dp_shard=2, tp=2, pp_schedule="ZBVZeroBubble"),
        ParallelConfig(pp=4, tp=2, pp_schedule="DualPipeV", microbatches=8),
        ParallelConfig(cp=4, tp=2, activation_checkpoint="selective"),
        ParallelConfig(pp=8),
    ],
    16: [
        ParallelConfig(pp=2, dp_shard=2, cp=2, tp=2),
        ParallelConfig(pp=2, dp_shard=2, cp=2, tp=2, pp_schedule="ZBVZeroBubble", cp_method="all_gather"),
        ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, tp=2),
    ],
}


def main(worlds: list[int]) -> int:
    """Run the meshes of these world sizes; 1 when one of them misses the bar."""
    base = Run(model=DEEP, steps=20, batch_size=16)
    expected = single(base)
    worst = 0.0
    for world in worlds:
        with RankPool(world) as pool:
            for parallel in MESHES[world]:
                start = time.monotonic()
                found = pool.run(train, replace(base, parallel=parallel))[0]
                loss = relative_error(found.losses, expected.losses)
                norm = relative_error(found.norms, expected.norms)
                worst = max(worst, loss)
                mesh, took = mesh_spec(parallel, world), time.monotonic() - start
                how = f"{parallel.pp_schedule if parallel.pp > 1 else '':22}{parallel.cp_method if parallel.cp > 1 else '':11}"
                print(f"{world:3} {mesh!s:40} {how} loss {loss:.1e}  norm {norm:.1e}  {took:5.1f} s", flush=True)  # noqa: T201
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or sorted(MESHES)))
