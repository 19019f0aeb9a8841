"""Resharding on a local disk beside DCP and a plain copy of the same bytes, in one run, each in its own process.

    python -m benchmarks.resharding.reshard_local --gb 1 --folder /tmp/bench

Each measurement is a fresh process, startup included; medians of `--repeats`. Peak memory is the process's high-water
mark minus that of a process that only does the imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.report import TAKEN_NOTE, Measurement, median, take_memory, write_section

COPY = """
import os, sys
source, target = sys.argv[1:]
buffer = bytearray(8 << 20)
for root, _, names in os.walk(source):
    for name in names:
        if name.endswith(".distcp"):
            out = os.path.join(target, name)
            with open(os.path.join(root, name), "rb", buffering=0) as a, open(out, "wb", buffering=0) as b:
                while count := a.readinto(buffer):
                    b.write(memoryview(buffer)[:count])
                os.fsync(b.fileno())
"""
DCP = """
import sys, time
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint import FileSystemReader
started, state = time.perf_counter(), {}
_load_state_dict(state, storage_reader=FileSystemReader(sys.argv[1]), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
dcp.save(state, checkpoint_id=sys.argv[2], no_dist=True)
print(time.perf_counter() - started)
"""
OURS = """
import sys, time
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt import plan_reshard, run_plan
started = time.perf_counter()
plan = plan_reshard(open_checkpoint(sys.argv[1]), MeshSpec.parse(sys.argv[3]))
report = run_plan(plan, sys.argv[2], memory_bytes=int(sys.argv[4]))
print(time.perf_counter() - started, report.traffic.read_bytes, report.traffic.read_requests)
"""
MAKE = """
import sys, torch
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt import plan_reshard, run_plan
from titan_ckpt import SaveOptions, save
layers, dim = int(sys.argv[2]), 1024
shapes = {"self_attn.q_proj": (dim, dim), "self_attn.o_proj": (dim, dim)}
shapes |= {"mlp.up_proj": (4 * dim, dim), "mlp.down_proj": (dim, 4 * dim)}
state = {"model": {}, "optimizer": {"state": {}}}
for layer in range(layers):
    for name, shape in shapes.items():
        fqn = f"model.layers.{layer}.{name}.weight"
        state["model"][fqn] = torch.rand(shape)
        state["optimizer"]["state"][fqn] = {key: torch.rand(shape) for key in ("exp_avg", "exp_avg_sq")}
save(sys.argv[1] + "/whole", state, step=1, options=SaveOptions(mesh=MeshSpec()))
run_plan(plan_reshard(open_checkpoint(sys.argv[1] + "/whole"), MeshSpec.parse("dp_shard=4")), sys.argv[1] + "/rows")
"""
PEAK = """
import atexit, resource, sys
atexit.register(lambda: sys.stderr.write("peak " + str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)))
"""
ROWS, COLUMNS = "rows 4 -> 2", "rows -> columns (4)"
BYTES_PER_LAYER = 3 * 4 * (2 + 8) * 1024 * 1024
BASE = {
    "ours": "import titan_ckpt.resharding.reshard, titan_ckpt.checkpoint.open",
    "dcp": "import torch.distributed.checkpoint",
    "copy": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one process."""

    wall_s: float
    peak_bytes: int
    printed: list[float]


def run(script: str, *arguments: str) -> Run:
    """Run and measure a fresh process."""
    wrapped = PEAK + script
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", wrapped, *arguments], check=True, capture_output=True, text=True
    )
    wall = time.perf_counter() - started
    peak_kib = int(done.stderr.rpartition("peak ")[2])
    return Run(wall_s=wall, peak_bytes=peak_kib * 1024, printed=[float(value) for value in done.stdout.split()])


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=64_000_000)
    parser.add_argument("--folder", help="where to work, on the disk to be measured; a temporary folder by default")
    parser.add_argument("--without-dcp", action="store_true", help="for states that do not fit memory, which DCP needs")
    arguments = parser.parse_args()
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reshard-", dir=arguments.folder) as name:
        measure(arguments, Path(name))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Run every method in turn and write the section."""
    layers = max(1, round(arguments.gb * 1e9 / BYTES_PER_LAYER))
    run(MAKE, str(folder), str(layers))
    shutil.rmtree(folder / "whole")
    rows = str(folder / "rows")
    floors = {name: run(script or "pass").peak_bytes for name, script in BASE.items()}
    results: dict[str, list[Run]] = {}
    for _ in range(arguments.repeats):
        for name, script, more in (
            ("copy", COPY, []),
            (ROWS, OURS, ["dp_shard=2", str(arguments.memory)]),
            (COLUMNS, OURS, ["tp=4", str(arguments.memory)]),
            *([] if arguments.without_dcp else [("dcp", DCP, [])]),
        ):
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            source = f"{rows}/step-00000001" if name in ("copy", "dcp") else rows
            os.sync()
            # A copy and our reshard need as much as they write; DCP also needs its state.
            take_memory(folder, (1 if arguments.without_dcp else 2) * layers * BYTES_PER_LAYER)
            results.setdefault(name, []).append(run(script, source, str(out), *more))
    title = f"Resharding on a local disk, {layers * BYTES_PER_LAYER / 1e9:.2f} GB"
    notes = f"Process start included; `--memory` {arguments.memory / 1e6:.0f} MB; memory above that of the imports.\n{TAKEN_NOTE}"
    write_section(f"reshard-local {arguments.gb:g}", title, bars(results, floors, arguments.memory), notes)


def bars(results: dict[str, list[Run]], floors: dict[str, int], memory: int) -> list[Measurement]:
    """Compare the figures with their bars."""
    walls = {name: median([run.wall_s for run in runs]) for name, runs in results.items()}
    peaks = {name: max(r.peak_bytes for r in runs) - floors.get(name, floors["ours"]) for name, runs in results.items()}
    copy = walls["copy"]
    found = [_ratio(f"{ROWS} / plain copy of the bytes, fsynced", walls[ROWS], copy, 1.5, f"copy {copy:.2f} s")]
    if "dcp" in results:
        operation = median([run.printed[0] for run in results["dcp"]])
        peer = f"DCP {walls['dcp']:.2f} s, its operation alone {operation:.2f} s, {peaks['dcp'] / 1e6:.0f} MB"
        found.append(_ratio(f"{ROWS} / the DCP way, both with their start", walls[ROWS], walls["dcp"], 0.5, peer))
        found.append(
            _ratio(f"{COLUMNS}, with its start / the DCP way's operation", walls[COLUMNS], operation, 1.0, peer)
        )
    else:
        found.append(_ratio(f"{COLUMNS} / plain copy of the bytes, fsynced", walls[COLUMNS], copy, None, ""))
    for name in (ROWS, COLUMNS):
        bar = memory + 64e6
        figure, limit = f"{peaks[name] / 1e6:.0f} MB", f"<= {bar / 1e6:.0f} MB"
        found.append(Measurement(what=f"{name}: peak memory", figure=figure, bar=limit, holds=peaks[name] <= bar))
    return found


def _ratio(what: str, ours: float, theirs: float, bar: float | None, peer: str) -> Measurement:
    ratio = ours / theirs
    limit, holds = ("-", True) if bar is None else (f"<= {bar} x", ratio <= bar)
    return Measurement(what=what, figure=f"{ratio:.2f} x ({ours:.2f} s)", bar=limit, holds=holds, peer=peer)


if __name__ == "__main__":
    main()
