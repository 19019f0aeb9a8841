"""Tokens per second of this trainer against torchtitan 0.3.0 on CPU and gloo, on the same model, mesh, batch and threads.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 torch==<the same>
    python -m benchmarks.trainer_vs_torchtitan --titan titan/bin/python [--rounds 3]

The two alternate, one job at a time; the table is the ratio of the medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pool import free_port

HERE = Path(__file__).parent
MESHES: dict[str, dict[str, int]] = {
    "1 rank": {"pp": 1, "dp_shard": 1, "tp": 1},
    "FSDP2 x2": {"pp": 1, "dp_shard": 2, "tp": 1},
    "TP2": {"pp": 1, "dp_shard": 1, "tp": 2},
    "PP2": {"pp": 2, "dp_shard": 1, "tp": 1},
    "FSDP2 x TP2": {"pp": 1, "dp_shard": 2, "tp": 2},
}


def run_job(python: str, script: str, job: dict[str, Any], world_size: int) -> list[float]:
    """Seconds of each timed step, from `world_size` processes of `script`."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    environment |= {"OMP_NUM_THREADS": str(job["threads"]), "PYTHONWARNINGS": "ignore"}
    command = [python, str(HERE / script), json.dumps(job)]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    for process, (_, stderr) in zip(processes, answers, strict=True):
        if process.returncode:
            raise RuntimeError(f"{script} failed:\n{stderr[-4000:]}")
    times: list[float] = json.loads(answers[0][0].strip().splitlines()[-1])
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a ratio is below 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", required=True, help="a python that has torchtitan 0.3.0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=list(MESHES), action="append")
    options = parser.parse_args(arguments)
    worst = float("inf")
    for name in options.only or MESHES:
        job = MESHES[name] | {"batch_size": 8, "seq_len": 256, "threads": 1, "warmup": 2, "steps": options.steps}
        ours: list[float] = []
        theirs: list[float] = []
        world_size = job["pp"] * job["dp_shard"] * job["tp"]
        for _ in range(options.rounds):
            ours += run_job(sys.executable, "titan_ckpt_rank.py", job, world_size)
            theirs += run_job(options.titan, "torchtitan_rank.py", job, world_size)
        rates = [job["batch_size"] * job["seq_len"] / statistics.median(times) for times in (ours, theirs)]
        worst = min(worst, rates[0] / rates[1])
        line = f"ours {rates[0]:8.0f} tok/s   torchtitan {rates[1]:8.0f} tok/s   {rates[0] / rates[1]:.2f} x"
        print(f"{name:14} {line}", flush=True)  # noqa: T201
    return int(worst < 1.0)


if __name__ == "__main__":
    sys.exit(main())
