"""One rank of an injected job: `python -m titan_ckpt.debug.drill.rank_main CASE --rank R --world-size N --folder DIR ...`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_ckpt.debug.drill.cases import DrillJob, stall
from titan_ckpt.debug.drill.catalogue import CASES
from titan_ckpt.debug.record.recorder import Recorder

log = logging.getLogger("job")

OPERATION_TIMEOUT_S = 60


def run_drill_rank() -> int:
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--culprit", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--stall-s", type=float, required=True)
    given = parser.parse_args()
    form = f"%(asctime)s.%(msecs)03d [rank{given.rank}] %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form, datefmt="%Y-%m-%d %H:%M:%S")
    torch.set_num_threads(1)
    recorder = Recorder.start(
        given.folder, rank=given.rank, world_size=given.world_size, stall_s=given.stall_s,
        capacity=64 if given.case == "ring_overflow" else 4096,
    )  # fmt: skip
    job = DrillJob(
        rank=given.rank, size=given.world_size, culprit=given.culprit, recorder=recorder, folder=given.folder
    )
    return _run(job, given.case, given.store)


def _run(job: DrillJob, case: str, store: Path) -> int:
    if case == "init_hang" and job.is_culprit:
        log.info("fetching the tokenizer before joining")
        stall()
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=job.rank, world_size=job.size,
            timeout=timedelta(seconds=OPERATION_TIMEOUT_S),
        )  # fmt: skip
        log.info("process group ready, world=%d", job.size)
        CASES[case](job)
    except Exception as error:
        log.exception("the training loop failed")
        job.recorder.exception(error)
        os._exit(1)  # as after an uncaught exception, without waiting for peers at shutdown
    job.recorder.stop()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(run_drill_rank())
