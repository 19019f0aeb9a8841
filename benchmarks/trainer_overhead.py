"""What watching costs: the recorder of hangs and everything that is logged, in milliseconds a step.

    python -m benchmarks.trainer_overhead [--rounds 5] [--steps 400]

The same run with everything on (a record of every step to the console, JSONL and TensorBoard, the recorder) and with everything
off, in turns. The model is small, so that the difference is not lost in it; what is watched (collectives, phases, records) is
counted per step and does not grow with the model's width.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Bar, interleave, median, write_section

CONFIG = str(Path(__file__).parent.parent / "configs" / "debug.toml")
STEP_MS, BAR = 100.0, 0.01
WARMUP = 100
ON = ("log.every=1", "log.tensorboard=true", "debug.recorder=true")
OFF = (f"log.every={WARMUP}", "log.tensorboard=false", "debug.recorder=false")
TITLE = "Observability and the recorder"
NOTES = """`configs/debug.toml` with {layers} layers on {ranks} ranks of FSDP2, {steps} steps a run, {rounds} runs of each kind in
turns: the mean step without the first {warmup}, everything on (a record of every step on the console, in JSONL and TensorBoard;
the recorder's black box, stacks and phases) less everything off. Set against a step of {step:.0f} ms, as the bar says."""
LAYERS, RANKS = 8, 2


def step_ms(sets: Sequence[str], steps: int) -> float:
    """Mean milliseconds of a step after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        every = (
            *sets, f"log.folder={folder}", f"train.steps={steps}", "train.device=cpu", f"mesh.dp_shard={RANKS}",
            f"model.n_layers={LAYERS}",
        )  # fmt: skip
        words = [part for text in every for part in ("--set", text)]
        subprocess.run(
            [sys.executable, "-m", "titan_ckpt", "train", CONFIG, *words],
            check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        lines = Path(folder, "logs", "metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["event"] == "step" and r["step"] > WARMUP]
    return 1e3 * sum(r["steps"] * r["step_s"] for r in records) / sum(r["steps"] for r in records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    asked = parser.parse_args(arguments)
    found = interleave(
        {"off": lambda: step_ms(OFF, asked.steps), "on": lambda: step_ms(ON, asked.steps)}, rounds=asked.rounds
    )
    added = [on - off for on, off in zip(found["on"], found["off"], strict=True)]
    share = median(added) / STEP_MS
    bar = Bar(
        what=f"added to a step of {STEP_MS:.0f} ms",
        figure=f"{median(added):.2f} ms ({min(added):.2f} to {max(added):.2f}): {share:.2%}",
        bar=f"<= {BAR:.0%}",
        holds=share <= BAR,
        peer=f"a step here: {median(found['off']):.1f} ms off, {median(found['on']):.1f} ms on",
    )
    notes = NOTES.format(
        layers=LAYERS, ranks=RANKS, steps=asked.steps, rounds=asked.rounds, warmup=WARMUP, step=STEP_MS
    )
    write_section("trainer overhead", TITLE, [bar], notes)
    return int(not bar.holds)


if __name__ == "__main__":
    sys.exit(main())
