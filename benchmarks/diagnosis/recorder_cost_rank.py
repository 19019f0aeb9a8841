"""One rank of a plain DDP job, for recorder_cost.py: it knows nothing of this package but `Recorder.start`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.training.turns import take_turns
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.debug.record.recorder import Recorder

WIDTH, LAYERS, WARMUP_S = 320, 4, 5.0


def main(job: dict[str, Any]) -> None:
    """Train on random numbers, `job["steps"]` steps a turn."""
    torch.set_num_threads(job["threads"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = tempfile.TemporaryDirectory()
    recorder = None
    if job["is_recorded"]:
        os.environ.update(environment())
        recorder = Recorder.start(folder.name, rank=rank, world_size=world_size)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(job["batch"], WIDTH)

    def turn() -> None:
        for _ in range(job["steps"]):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    turn()
    time.sleep(WARMUP_S)  # the recorder's one dump for nothing, which a job pays once and not per step
    take_turns(turn)
    if recorder is not None:
        recorder.stop()
    dist.destroy_process_group()
    folder.cleanup()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
