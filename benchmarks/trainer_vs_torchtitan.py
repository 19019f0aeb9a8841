"""Tokens per second of this trainer against torchtitan 0.3.0 on CPU and gloo, on the same model, mesh, batch and threads.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 torch==<the same>
    python -m benchmarks.trainer_vs_torchtitan --titan titan/bin/python [--rounds 3]

The two alternate, one job at a time; the table is the ratio of the medians over all steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, median, spread, write_section
from tests.pool import free_port

HERE = Path(__file__).parent
MESHES: dict[str, dict[str, int]] = {
    "1 rank": {"pp": 1, "dp_shard": 1, "tp": 1},
    "FSDP2 x2": {"pp": 1, "dp_shard": 2, "tp": 1},
    "TP2": {"pp": 1, "dp_shard": 1, "tp": 2},
    "PP2": {"pp": 2, "dp_shard": 1, "tp": 1},
    "FSDP2 x TP2": {"pp": 1, "dp_shard": 2, "tp": 2},
}
NOTES = """torchtitan's Llama "debugmodel" (6 layers, dim 256, vocabulary 2048) in both, fp32, eager, 8 samples of 256 tokens
a step, one thread per rank: forward, backward, clipping and AdamW; no data loading, no logging. The two take turns.
What differs: torchtitan multiplies q, k and v in one product, ours in three, as Hugging Face names them; its loss is the plain
`CrossEntropyLoss` on whole logits, the quickest that it has here, ours finds the gradient while it has the logits; torchtitan
puts FSDP around one rank too, as its own `parallelize` does; its attention is SDPA, since FlexAttention has no backward on a CPU.
Four ranks share two cores."""


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


def compare(name: str, titan: str, *, rounds: int, steps: int) -> Bar:
    """One mesh's row."""
    job = MESHES[name] | {"batch_size": 8, "seq_len": 256, "threads": 1, "warmup": 2, "steps": steps}
    ours: list[float] = []
    theirs: list[float] = []
    world_size = job["pp"] * job["dp_shard"] * job["tp"]
    for _ in range(rounds):
        ours += run_job(sys.executable, "titan_ckpt_rank.py", job, world_size)
        theirs += run_job(titan, "torchtitan_rank.py", job, world_size)
    rates = [job["batch_size"] * job["seq_len"] / median(times) for times in (ours, theirs)]
    ratio = rates[0] / rates[1]
    sys.stderr.write(f"{name:14} ours {rates[0]:6.0f} tok/s   torchtitan {rates[1]:6.0f} tok/s   {ratio:.2f} x\n")
    return Bar(
        what=name,
        figure=f"{ratio:.2f} x ({rates[0]:,.0f} tok/s; a step {spread(ours)})",
        bar=">= 1.0 x",
        holds=ratio >= 1.0,
        peer=f"{rates[1]:,.0f} tok/s; {spread(theirs)}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table (of all meshes only); 1 when a ratio is below 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", required=True, help="a python that has torchtitan 0.3.0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=list(MESHES), action="append")
    options = parser.parse_args(arguments)
    names = options.only or list(MESHES)
    bars = [compare(name, options.titan, rounds=options.rounds, steps=options.steps) for name in names]
    if not options.only:
        title = "A training step against torchtitan 0.3.0, 6.2 M parameters, gloo"
        write_section("trainer torchtitan", title, bars, NOTES)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
