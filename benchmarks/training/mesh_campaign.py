"""Meshes of 4, 8 and 16 real ranks against the single process, 20 steps each.

    python -m benchmarks.training.mesh_campaign [4|8|16|precision ...]

One section of docs/performance.md per number of ranks, with the largest relative difference of loss and gradient norm over the
curve; exit code 1 if a loss differs by more than 1e-5. `precision` does the same for bf16 and Float8, whose bounds
docs/parallelism.md derives. Takes minutes: CI runs the same curves on 4 ranks, 4 steps each.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from titan_ckpt.trainer.parallel.config import ParallelConfig, expert_axes, mesh_spec
from tools.rank_pool import RankPool
from tools.report import Measurement, write_section
from tools.training.curves import SMALL, Curve, CurveCase, relative_error, single, train
from tools.training.mesh_cases import MEMORY, PRECISIONS, SCHEDULES
from tools.training.mesh_cases import MESHES as MESHES_OF_4

BAR = 1e-5
TIMEOUT_S = 900.0  # sixteen ranks on two cores
DEEP = replace(SMALL, n_layers=8)
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
MESHES: dict[int, list[ParallelConfig]] = {
    4: [
        *(m for m in MESHES_OF_4.values() if not m.pp_layers_per_stage),  # those are for 4 layers
        *SCHEDULES.values(),
        *MEMORY.values(),
    ],
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


NARROW = [(parallel, 2 * bar) for parallel, bar in PRECISIONS.values()]  # the tests' bars are for 4 steps
BASE = CurveCase(model=DEEP, steps=20, batch_size=16)
NOTES = """Largest relative difference to the curve of one process over 20 steps: 8 layers, dim 64, 16 samples of 48 tokens,
AdamW at 3e-3, gradient clipping; the loss goes from {first:.2f} to {last:.2f}. Real processes over gloo on this machine."""


def row(pool: RankPool, parallel: ParallelConfig, expected: Curve, world: int, bar: float) -> Measurement:
    """One mesh's curve against the single process's."""
    start = time.monotonic()
    found = pool.run(train, replace(BASE, parallel=parallel))[0]
    loss, norm = relative_error(found.losses, expected.losses), relative_error(found.norms, expected.norms)
    what = describe(parallel, world)
    sys.stderr.write(f"{what:70} loss {loss:.1e}  norm {norm:.1e}  {time.monotonic() - start:5.1f} s\n")
    return Measurement(
        what=what, figure=f"loss {loss:.1e}, norm {norm:.1e}", bar=f"loss <= {bar:.2g}", holds=loss <= bar
    )


def describe(parallel: ParallelConfig, world: int) -> str:
    """The mesh and all non-default options."""
    plain = ParallelConfig()
    names = [f for f in parallel.__slots__ if f not in DEGREES and getattr(parallel, f) != getattr(plain, f)]
    mesh = mesh_spec(parallel, world)
    axes = expert_axes(parallel, mesh)
    over = [] if axes == "ep" else [f"experts over {axes}"]
    return ", ".join([str(mesh), *over, *(f"{name}={getattr(parallel, name)}" for name in names)])


def main(words: list[str]) -> int:
    """Run the requested meshes and write the sections; return 1 if a curve misses its bar."""
    expected = single(BASE)
    notes = NOTES.format(first=expected.losses[0], last=expected.losses[-1])
    holds = True
    for word in words:
        world = 4 if word == "precision" else int(word)
        cases = NARROW if word == "precision" else [(mesh, BAR) for mesh in MESHES[world]]
        with RankPool(world, timeout_s=TIMEOUT_S) as pool:
            bars = [row(pool, parallel, expected, world, bar) for parallel, bar in cases]
        title = "Precision: curves of 4 ranks" if word == "precision" else f"One loss curve: meshes of {world} ranks"
        write_section(f"mesh campaign {word}", title, bars, notes)
        holds = holds and all(bar.holds for bar in bars)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*map(str, sorted(MESHES)), "precision"]))
