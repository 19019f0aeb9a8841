"""Resharding from S3 to S3 beside plain ranged GETs and a multipart PUT of the same bytes, on a real loopback server.

    python -m benchmarks.resharding.reshard_s3 [--size 1] [--rounds 3]        needs what core_s3 needs

Then measures the benefit: four ranks load on the target mesh, from the source and from the resharded checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, zeros

from benchmarks.checkpoints.core_s3 import BUCKET, Plain
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.loading.load import load
from titan_ckpt.resharding.reshard import ReshardReport, plan_reshard, run_plan
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.sharding.mesh import MeshSpec
from tools.rank_pool import RankPool
from tools.report import Measurement, interleave, median, spread, timed, write_section

URL = f"s3://{BUCKET}"
SOURCE, ROWS, COLUMNS = "dp_shard=4", "dp_shard=2", "tp=4"
DIM = 1024
_numbers = itertools.count()


def make_state(size_gb: float) -> dict[str, Any]:
    """Weights and Adam moments with the names of a Llama, in two parts as the trainer saves them."""
    shapes = {"self_attn.q_proj": (DIM, DIM), "self_attn.o_proj": (DIM, DIM)}
    shapes |= {"mlp.up_proj": (4 * DIM, DIM), "mlp.down_proj": (DIM, 4 * DIM)}
    layers = max(1, round(size_gb * 1e9 / (3 * 4 * 10 * DIM * DIM)))
    named = {f"model.layers.{n}.{k}.weight": shape for n in range(layers) for k, shape in shapes.items()}
    moments = {f"state.{f}.{m}": torch.rand(s) for f, s in named.items() for m in ("exp_avg", "exp_avg_sq")}
    return {"model": {fqn: torch.rand(shape) for fqn, shape in named.items()}, "optimizer": moments}


def reshard(mesh: str, url: str | None = None, *, source: str = f"{URL}/source") -> ReshardReport:
    """Reshard the source to the given URL, or to a new one."""
    plan = plan_reshard(open_checkpoint(source), MeshSpec.parse(mesh))
    return run_plan(plan, url or f"{URL}/out-{next(_numbers)}")


def load_on(_rank: int, url: str, mesh: str, like: str) -> tuple[float, int, int]:
    """(seconds, bytes fetched, bytes needed) of loading `url` into the shards that `like` records for `mesh`."""
    torch.set_num_threads(1)
    spec, manifest = MeshSpec.parse(mesh), open_checkpoint(like).manifest
    device_mesh = init_device_mesh("cpu", (spec.world_size,))
    state: dict[str, Any] = {}
    for entry in manifest.tensors:
        cuts = list((entry.placements or {}).values())
        placement: Placement = Shard(cuts[0].dim) if cuts else Replicate()
        state[entry.fqn] = zeros(entry.global_shape, device_mesh=device_mesh, placements=[placement])
    dist.barrier()
    started = time.perf_counter()
    report = load(url, state)
    dist.barrier()
    return time.perf_counter() - started, report.fetched_bytes, report.needed_bytes


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of state")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    state = make_state(arguments.size)
    size = sum(t.numel() * 4 for part in state.values() for t in part.values()) / 1e9
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), [BUCKET]) as server:
        os.environ.update(server.environment)
        save(f"{URL}/whole", state, step=1, options=SaveOptions(mesh=MeshSpec()))
        reshard(SOURCE, f"{URL}/source", source=f"{URL}/whole")
        bars = measure(server, state, arguments.rounds) + loads(arguments.rounds)
    write_section("reshard-s3", f"Resharding from S3 to S3, SeaweedFS on loopback, {size:.2f} GB", bars)


def measure(server: Server, state: dict[str, Any], rounds: int) -> list[Measurement]:
    """Measure reshards beside plain copies."""
    plain, reports = Plain(server, state), dict[str, ReshardReport]()
    target = {part: {fqn: torch.zeros_like(t) for fqn, t in inner.items()} for part, inner in state.items()}

    def case(mesh: str) -> Callable[[], float]:
        return lambda: timed(lambda: reports.update({mesh: reshard(mesh)}))

    cases: dict[str, Callable[[], float]] = {
        "plain put": lambda: timed(plain.put),
        ROWS: case(ROWS),
        "plain get": lambda: timed(lambda: plain.get(target)),
        COLUMNS: case(COLUMNS),
    }
    times = interleave(cases, rounds=rounds)
    floor = max(median(times["plain put"]), median(times["plain get"]))
    needed = sum(t.numel() * 4 for part in state.values() for t in part.values())
    peer = f"PUT {median(times['plain put']):.2f} s, GET {median(times['plain get']):.2f} s"
    bars = []
    for mesh, what in ((ROWS, "rows"), (COLUMNS, "columns")):
        ratio, fetched = median(times[mesh]) / floor, reports[mesh].traffic.read_bytes / needed
        bars.append(
            Measurement(
                what=f"{what}, {SOURCE} -> {mesh} / the slower of plain GET and PUT",
                figure=f"{ratio:.2f} x ({spread(times[mesh])})",
                bar="<= 1.3 x",
                holds=ratio <= 1.3,
                peer=peer,
            )
        )
        bars.append(
            Measurement(
                what=f"{what}: bytes fetched / needed", figure=f"{fetched:.4f}", bar="<= 1.05", holds=fetched <= 1.05
            )
        )
    return bars


def loads(rounds: int) -> list[Measurement]:
    """Measure the gain for four ranks on the target mesh."""
    like = f"{URL}/target"
    reshard(COLUMNS, like)
    runs: dict[str, list[list[tuple[float, int, int]]]] = {"resharded": [], "source": []}
    with RankPool(MeshSpec.parse(COLUMNS).world_size) as pool:
        for _ in range(rounds):
            for name, url in (("source", f"{URL}/source"), ("resharded", like)):
                runs[name].append(pool.run(load_on, url, COLUMNS, like))
    seconds = {name: [max(rank[0] for rank in ranks) for ranks in found] for name, found in runs.items()}
    fetched = {n: sum(r[1] for r in found[0]) / sum(r[2] for r in found[0]) for n, found in runs.items()}
    ratio = median(seconds["resharded"]) / median(seconds["source"])
    return [
        Measurement(
            what=f"load on {COLUMNS} by 4 ranks: resharded / not",
            figure=f"{ratio:.2f} x ({spread(seconds['resharded'])}, fetched / needed {fetched['resharded']:.2f})",
            bar="shown",
            holds=True,
            peer=f"the source as it is: {spread(seconds['source'])}, fetched / needed {fetched['source']:.2f}",
        )
    ]


if __name__ == "__main__":
    main()
