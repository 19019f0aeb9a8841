"""Write the golden checkpoints of the current format version: tiny, saved by two real ranks, kept for good.

    torchrun --nproc-per-node 2 -m tools.golden_run tests/data/golden/v1

Step 1 is raw, step 2 incremental on step 1, step 3 encoded with planes-zstd. Released versions are never rewritten: each format
version has a folder of its own, and `tests/docs/test_golden.py` reads all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.sharding.mesh import MeshSpec

RAW_STEP, INCREMENTAL_STEP, ENCODED_STEP = 1, 2, 3
STEPS = (RAW_STEP, INCREMENTAL_STEP, ENCODED_STEP)
NOTE = {"text": "golden", "numbers": [1, 2.5, None], "flag": True}
ASSET = b'{"golden": true}\n'


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The full tensors at `step`; every value is exact in its dtype."""
    return {
        "model.weight": torch.arange(15, dtype=torch.float32).reshape(5, 3) / 8 + step,
        "model.frozen": torch.arange(6, dtype=torch.float32).reshape(3, 2) / 4,
        "model.scale": torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16) * step,
        "model.mask": torch.tensor([True, False, True]),
        "model.none": torch.empty(0, 4),
        "optimizer.state.model.weight.exp_avg": torch.full((5, 3), 0.25 * step, dtype=torch.float64),
        "optimizer.state.model.weight.step": torch.tensor(step, dtype=torch.int64),
    }


SHARDED = ("model.weight", "model.frozen", "optimizer.state.model.weight.exp_avg")


def _state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    held: dict[str, Any] = dict(tensors(step))
    for fqn in SHARDED:
        held[fqn] = distribute_tensor(held[fqn], mesh, [Shard(0)])
    return {**held, "note": NOTE}


def write(folder: Path) -> None:
    """Save the three steps with the ranks of this job."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    spec = MeshSpec.parse(f"dp_shard={dist.get_world_size()}")
    codec = {ENCODED_STEP: "planes-zstd"}
    for step in STEPS:
        options = SaveOptions(
            mesh=spec, is_exclusive=False, incremental=step == INCREMENTAL_STEP, codec=codec.get(step, "raw")
        )
        with Saver(str(folder), options) as saver:
            extra: dict[str, Any] = {"training": {"step": step, "tokens_seen": 100 * step}, "user": {"golden": True}}
            saver.save_now(_state(step, mesh), step=step, assets={"tokenizer.json": ASSET}, **extra)


def main() -> int:
    """Write into a new folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden_run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists; golden checkpoints are never rewritten")
    dist.init_process_group("gloo")
    dist.barrier()  # no rank writes before all ranks have checked
    write(folder)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
