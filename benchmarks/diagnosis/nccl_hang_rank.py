"""One rank of nccl_hang.py: FOLDER, backend, seconds until a collective times out."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_ckpt.debug.record.recorder import Recorder

STEPS, LEFT_OUT, CULPRIT = 6, 4, 1


def main(folder: Path, backend: str, hang_s: float) -> None:
    """All-reduce in a loop; the culprit waits for ever instead of its fourth."""
    rank, is_gpu = int(os.environ["RANK"]), backend == "nccl"
    if is_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    recorder = Recorder.start(folder, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), stall_s=hang_s / 3)
    dist.init_process_group(backend, timeout=timedelta(seconds=hang_s))
    x = torch.ones(1024, device="cuda" if is_gpu else "cpu")
    for step in range(STEPS):
        with recorder.phase("forward", step):
            if rank == CULPRIT and step == LEFT_OUT:
                threading.Event().wait(3 * hang_s)  # longer than the peers' timeout
                break
            dist.all_reduce(x)
            if is_gpu:
                torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
