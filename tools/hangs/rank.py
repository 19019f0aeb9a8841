"""One rank of a program: `torchrun ... -m tools.hangs.rank NAME`."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_ckpt.debug import Recorder
from tools.hangs import (
    programs_batches,
    programs_branches,
    programs_collectives,
    programs_crashes,
    programs_ends,
    programs_healthy,
    programs_peers,
    programs_waits,
)
from tools.hangs.incident import INCIDENTS

PROGRAMS = (
    programs_batches, programs_branches, programs_collectives, programs_crashes, programs_ends, programs_healthy,
    programs_peers, programs_waits,
)  # fmt: skip
FOLDER, STALL_S, TIMEOUT_S = "HANGS_FOLDER", "HANGS_STALL_S", "HANGS_TIMEOUT_S"


def main(name: str) -> None:
    """Run it as a user's script would: no error is caught, nothing is cleaned up."""
    rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form)
    torch.set_num_threads(1)
    incident, folder = INCIDENTS[name], os.environ.get(FOLDER)
    if folder and STALL_S in os.environ:
        stall_s = float(os.environ[STALL_S])
        Recorder.start(folder, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), stall_s=stall_s)
    if incident.joins:
        dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ[TIMEOUT_S])))
        dist.barrier()
    if folder:
        Path(folder, "..", f"began-{attempt}-{rank}").resolve().write_text(str(time.time()))
    incident.program(rank)
    if incident.joins and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
