"""The recorder's cost in a plain DDP job whose steps take 10 ms.

    python -m benchmarks.diagnosis.recorder_cost [--rounds 60] [--steps 50] [--batch 256]

Three jobs of two ranks run at the same time and take turns of a few steps: one with the recorder and two without. The
second of those shows what the machine's noise makes of equal jobs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.training.turns import Job, StepTime
from titan_ckpt.demo.ports import free_port
from tools.report import Measurement, median, write_section

RANK = "benchmarks.diagnosis.recorder_cost_rank"
JOBS = {"off": False, "on": True, "off again": False}
RANKS, BAR, WARMUP = 2, 0.01, 3
NOTES = """Two gloo ranks, DDP over {layers}, one thread each; `Recorder.start` and its environment, nothing else. The three jobs
take turns of {steps} steps; {rounds} rounds. Each figure is the median over the rounds of a job's share of the plain job's in the
same round: processor time of all threads of both ranks, which other load on the machine hardly changes; time, until the
slower rank had done its steps, which it does."""


def measure(rounds: int, steps: int, batch: int) -> dict[str, list[StepTime]]:
    """The turns of each job, the first ones left out."""
    turns: dict[str, list[StepTime]] = {name: [] for name in JOBS}
    with ExitStack() as stack:
        jobs = {}
        for name, is_recorded in JOBS.items():
            options = {"threads": 1, "is_recorded": is_recorded, "steps": steps, "batch": batch}
            job = Job(sys.executable, RANK, options, world_size=RANKS, port=free_port())
            jobs[name] = stack.enter_context(job)
        order = list(jobs)
        for number in range(rounds + WARMUP):
            for name in order:
                turns[name].append(jobs[name].step())
            order.append(order.pop(0))  # so that none always follows the same one
            sys.stderr.write(f"\rround {number + 1}/{rounds + WARMUP}")
    sys.stderr.write("\n")
    return {name: found[WARMUP:] for name, found in turns.items()}


def share(values: Sequence[float], plain: Sequence[float]) -> float:
    """By how much the values are more than those of the plain job: the median of their ratios, less 1."""
    return median([value / base for value, base in zip(values, plain, strict=True)]) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50, help="steps of a turn (default 50)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    asked = parser.parse_args(arguments)
    turns = measure(asked.rounds, asked.steps, asked.batch)
    cpu = {name: [turn.cpu_s for turn in found] for name, found in turns.items()}
    wall = {name: [turn.wall_s for turn in found] for name, found in turns.items()}
    cost, noise = share(cpu["on"], cpu["off"]), share(cpu["off again"], cpu["off"])
    step_ms = 1e3 * median(cpu["off"]) / asked.steps / RANKS
    rows = [
        ("a step without the recorder, processor time of a rank", f"{step_ms:.2f} ms", "-", True),
        ("processor time, recorder on / off", f"{cost:+.2%}", f"<= {BAR:.0%}", cost <= BAR),
        ("processor time, off / off: the noise", f"{noise:+.2%}", "-", True),
        ("time, recorder on / off", f"{share(wall['on'], wall['off']):+.2%}", "-", True),
        ("time, off / off: the noise", f"{share(wall['off again'], wall['off']):+.2%}", "-", True),
    ]
    bars = [Measurement(what=what, figure=figure, bar=bar, holds=holds) for what, figure, bar, holds in rows]
    notes = NOTES.format(layers="four layers of 320", steps=asked.steps, rounds=asked.rounds)
    write_section("recorder cost", "The recorder in a plain DDP job", bars, notes)
    return int(cost > BAR)


if __name__ == "__main__":
    sys.exit(main())
