"""Reshard offline from every mesh to every mesh over gloo, then resume training: `make reshard-matrix`.

    python -m benchmarks.resharding.reshard_matrix [--mixture]

For each pair, every rank's state and the losses of the next 10 steps must equal those of an online load of the source, bit for
bit; with `--mixture` of a mixture of experts, on meshes with and without `ep`. Prints a line per pair and writes the table to
docs/performance.md; exit code 1 if a pair differs. Takes minutes; the tests cover some of the pairs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.parallel.config import ParallelConfig
from tools.rank_pool import RankPool
from tools.report import Measurement, write_section
from tools.training.curves import relative_error
from tools.training.resume_matrix import STEPS_AFTER, resume_both_ways, train_and_save

DENSE = (
    "1", "dp_shard=2", "dp_shard=4", "dp_replicate=2,dp_shard=2", "tp=2", "dp_shard=2,tp=2", "pp=2", "pp=2,dp_shard=2",
    "pp=2,tp=2", "cp=2", "pp=2,dp_shard=2,tp=2",
)  # fmt: skip
MIXTURES = (
    "1", "dp_shard=2", "ep=2", "tp=2", "dp_shard=4", "dp_shard=2,ep=2", "ep=4", "dp_replicate=2,ep=2", "ep=2,tp=2",
    "pp=2,ep=2", "cp=2,ep=2",
)  # fmt: skip
# A sum over different rank groups rounds differently, and ten training steps compound the difference.
OTHER_MESH_BAR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One cell of the matrix."""

    source: str
    target: str
    is_state_equal: bool
    are_losses_equal: bool
    losses: list[float]

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return self.is_state_equal and self.are_losses_equal


def parallel(mesh: str) -> ParallelConfig:
    """The trainer's options for a mesh."""
    spec = MeshSpec.parse(mesh)
    return ParallelConfig(
        pp=spec.degree("pp"),
        dp_replicate=spec.degree("dp_replicate"),
        dp_shard=spec.degree("dp_shard") * spec.degree("ep"),
        cp=spec.degree("cp"),
        tp=spec.degree("tp"),
        ep=spec.degree("ep"),
    )


def by_world(meshes: tuple[str, ...]) -> dict[int, list[str]]:
    """The meshes of each number of ranks."""
    worlds: dict[int, list[str]] = {}
    for mesh in meshes:
        worlds.setdefault(MeshSpec.parse(mesh).world_size, []).append(mesh)
    return worlds


def source_url(folder: Path, mesh: str) -> str:
    """Path of the checkpoint that was trained on `mesh`."""
    return str(folder / "trained" / mesh)


def compare(pool: RankPool, folder: Path, source: str, target: str, *, is_mixture: bool) -> Pair:
    """Reshard, and resume both ways."""
    out = str(folder / "resharded" / f"{source}-{target}")
    url = source_url(folder, source)
    online, offline = resume_both_ways(pool, parallel(target), url, out, target, is_mixture=is_mixture)
    return Pair(
        source=source,
        target=target,
        is_state_equal=[(r.digest, r.start) for r in offline] == [(r.digest, r.start) for r in online],
        are_losses_equal=all(r.losses == online[0].losses for r in online + offline),
        losses=offline[0].losses,
    )


def run(folder: Path, meshes: tuple[str, ...], *, is_mixture: bool) -> list[Pair]:
    """The whole matrix."""
    worlds = by_world(meshes)
    for world, targets in worlds.items():
        with RankPool(world) as pool:
            for mesh in targets:
                pool.run(train_and_save, parallel(mesh), source_url(folder, mesh), is_mixture)
    pairs = []
    for world, targets in worlds.items():
        with RankPool(world) as pool:
            for source, target in ((source, target) for target in targets for source in meshes):
                pairs.append(compare(pool, folder, source, target, is_mixture=is_mixture))
                verdict = "equal" if pairs[-1].holds else "DIFFERS"
                sys.stderr.write(f"{len(pairs):3}/{len(meshes) ** 2} {source:26} -> {target:26} {verdict}\n")
    return pairs


def bars(pairs: list[Pair]) -> list[Measurement]:
    """The figures, with the largest difference from a job that never changed its mesh."""
    stayed = {pair.source: pair.losses for pair in pairs if pair.source == pair.target}
    distance = max(relative_error(pair.losses, stayed[pair.source]) for pair in pairs)
    states, losses = (sum(pair.is_state_equal for pair in pairs), sum(pair.are_losses_equal for pair in pairs))
    total = len(pairs)
    return [
        Measurement(
            what="pairs whose ranks hold the same bytes as after an online load",
            figure=f"{states} of {total}",
            bar="all",
            holds=states == total,
        ),
        Measurement(
            what=f"pairs whose next {STEPS_AFTER} losses are bit-equal to an online resume's",
            figure=f"{losses} of {total}",
            bar="all",
            holds=losses == total,
        ),
        Measurement(
            what="largest relative difference of a loss from the job that stayed on its mesh",
            figure=f"{distance:.1e}",
            bar=f"<= {OTHER_MESH_BAR:.0e}",
            holds=distance <= OTHER_MESH_BAR,
        ),
    ]


def main() -> int:
    """Run, print and record; return 1 if a pair differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts")
    is_mixture, started = parser.parse_args().mixture, time.monotonic()
    meshes = MIXTURES if is_mixture else DENSE
    with tempfile.TemporaryDirectory() as folder:
        found = bars(run(Path(folder), meshes, is_mixture=is_mixture))
    notes = f"Sources and targets: {'; '.join(meshes)}. {time.monotonic() - started:.0f} s on gloo."
    suffix, what = (" mixture", "Resuming a mixture of experts") if is_mixture else ("", "Resuming")
    write_section(f"reshard-matrix{suffix}", f"{what} after a reshard, every mesh to every mesh", found, notes)
    return int(not all(bar.holds for bar in found))


if __name__ == "__main__":
    sys.exit(main())
