"""Resharding on a local disk beside the DCP way and a plain copy of the same bytes, all in one run, each in its own process.

    python benchmarks/reshard_local.py --gb 1 --folder /tmp/bench

Every measure is a fresh process, its start included; medians of `--repeats`. Peak memory is the process's high-water mark less
that of one that only imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

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
from titan_ckpt.checkpoint import open_checkpoint
from titan_ckpt.mesh import MeshSpec
from titan_ckpt.reshard import plan_reshard, run_plan
started = time.perf_counter()
plan = plan_reshard(open_checkpoint(sys.argv[1]), MeshSpec.parse(sys.argv[3]))
report = run_plan(plan, sys.argv[2], memory_bytes=int(sys.argv[4]))
print(time.perf_counter() - started, report.traffic.read_bytes, report.traffic.read_requests)
"""
MAKE = """
import sys, torch
from titan_ckpt.checkpoint import open_checkpoint
from titan_ckpt.mesh import MeshSpec
from titan_ckpt.reshard import plan_reshard, run_plan
from titan_ckpt.save import SaveOptions, save
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
BYTES_PER_LAYER = 3 * 4 * (2 + 8) * 1024 * 1024
BASE = {
    "ours": "import titan_ckpt.reshard, titan_ckpt.checkpoint",
    "dcp": "import torch.distributed.checkpoint",
    "copy": "",
}


def run(script: str, *arguments: str) -> tuple[float, int, list[float]]:
    """(wall seconds, peak RSS in bytes, what it printed) of a fresh process."""
    wrapped = PEAK + script
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", wrapped, *arguments], check=True, capture_output=True, text=True
    )
    wall = time.perf_counter() - started
    peak_kib = int(done.stderr.rpartition("peak ")[2])
    return wall, peak_kib * 1024, [float(value) for value in done.stdout.split()]


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=64_000_000)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--without-dcp", action="store_true", help="for states that do not fit memory, which DCP needs")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers = max(1, round(arguments.gb * 1e9 / BYTES_PER_LAYER))
    run(MAKE, str(folder), str(layers))
    shutil.rmtree(folder / "whole")
    rows = str(folder / "rows")
    floors = {name: run(script or "pass")[1] for name, script in BASE.items()}
    results: dict[str, list[tuple[float, int, list[float]]]] = {}
    for _ in range(arguments.repeats):
        for name, script, more in (
            ("copy", COPY, []),
            ("rows 4 -> 2", OURS, ["dp_shard=2", str(arguments.memory)]),
            ("rows -> columns", OURS, ["tp=4", str(arguments.memory)]),
            *([] if arguments.without_dcp else [("dcp", DCP, [])]),
        ):
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            source = f"{rows}/step-00000001" if name in ("copy", "dcp") else rows
            os.sync()
            results.setdefault(name, []).append(run(script, source, str(out), *more))
    facts: dict[str, object] = {"state_gb": layers * BYTES_PER_LAYER / 1e9, "memory": arguments.memory}
    for name, runs in results.items():
        floor = floors.get(name, floors["ours"])
        facts[name] = {
            "wall_s": round(statistics.median(wall for wall, _, _ in runs), 3),
            "operation_s": [round(printed[0], 3) for _, _, printed in runs if printed],
            "peak_mb_above_imports": round((max(peak for _, peak, _ in runs) - floor) / 1e6, 1),
            "read_bytes": [printed[1] for _, _, printed in runs[:1] if len(printed) > 1],
        }
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
