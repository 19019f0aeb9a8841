"""Overhead of the hang recorder and of all logging, in milliseconds a step.

    python -m benchmarks.training.trainer_overhead [--rounds 9] [--steps 200]

Each part is timed separately in place, in CPU time of all threads, because the overhead is smaller than the noise of
whole steps. The parts: measuring and writing a record of every step (console, JSONL, TensorBoard, the exchange with
the other ranks), entering and leaving the loop's phases, and the recorder's overhead per collective.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ClassVar

import torch
import torch.distributed as dist

from titan_ckpt.debug.record.recorder import Recorder
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job import setup
from titan_ckpt.trainer.job.loop import Loop
from titan_ckpt.trainer.job.meter import StepResult
from titan_ckpt.trainer.job.rank_process import RankProcess
from titan_ckpt.trainer.job.setup import run_rank
from titan_ckpt.trainer.job.stop_signals import StopCode
from titan_ckpt.trainer.report.phases import Phases
from tools.paths import DEBUG_CONFIG
from tools.report import Measurement, interleave, median, write_section

STEP_MS, BAR, WARMUP = 100.0, 0.01, 20
PHASES, COLLECTIVES, CALLS = 5, 100, 2000
TITLE = "Observability and the recorder"
NOTES = """Processor time of all threads; medians of {rounds} rounds. A record: `configs/debug.toml` on one rank, the median of
{steps} steps, with the loss reduced, the stop flags exchanged, console, JSONL and TensorBoard written; it does not grow with the
model. A collective is an all-reduce of one number in a group of one, with the recorder less without: FSDP2 and TP make about
{collectives} in a step of 8 to 12 layers."""


class _TimedLoop(Loop):
    """Notes the processor time of each step's record."""

    spent_s: ClassVar[list[float]] = []

    def _measure(self, done: StepResult, step: int, started: float) -> StopCode:
        before = time.process_time()
        stop = super()._measure(done, step, started)
        self.spent_s.append(time.process_time() - before)
        return stop


def record_us(steps: int) -> float:
    """Processor microseconds of a step's record."""
    _TimedLoop.spent_s.clear()
    with tempfile.TemporaryDirectory() as folder:
        sets = [
            "log.every=1",
            "log.tensorboard=true",
            f"log.folder={folder}",
            f"train.steps={steps}",
            "train.device=cpu",
        ]
        run_rank(resolve(TrainConfig, DEBUG_CONFIG, sets).config, RankProcess())
    return 1e6 * median(_TimedLoop.spent_s[WARMUP:])


def call_us(call: Callable[[Recorder | None], Callable[[], None]], *, is_recorded: bool) -> float:
    """CPU microseconds of the function that `call` makes, in a one-rank group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            recorder = Recorder.start(folder, rank=0, world_size=1, stall_s=300.0) if is_recorded else None
            if recorder is not None:
                stack.enter_context(recorder)
            action = call(recorder)
            for _ in range(CALLS // 10):
                action()
            started = time.process_time()
            for _ in range(CALLS):
                action()
            return 1e6 * (time.process_time() - started) / CALLS
    finally:
        dist.destroy_process_group()


def collective(_recorder: Recorder | None) -> Callable[[], None]:
    """An all-reduce of one number."""
    value = torch.zeros(1)

    def reduce() -> None:
        dist.all_reduce(value)

    return reduce


def phase(recorder: Recorder | None) -> Callable[[], None]:
    """A phase of the loop, entered and left."""
    phases = Phases(hook=None if recorder is None else recorder.phase)

    def enter() -> None:
        with phases("optimizer", 1):
            pass

    return enter


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args(arguments)
    setup.Loop = _TimedLoop  # type: ignore[attr-defined]
    cases = {
        "record": lambda: record_us(asked.steps),
        "phase": lambda: call_us(phase, is_recorded=True),
        "plain": lambda: call_us(collective, is_recorded=False),
        "recorded": lambda: call_us(collective, is_recorded=True),
    }
    times = interleave(cases, rounds=asked.rounds)
    found = {name: median(values) for name, values in times.items()}
    # Compare adjacent samples: the machine's speed drifts by more than the overhead.
    added_us = median([with_it - without for with_it, without in zip(times["recorded"], times["plain"], strict=True)])
    parts_us = {
        "a record of the step": found["record"],
        f"{PHASES} phases, {found['phase']:.1f} us each": PHASES * found["phase"],
        f"{COLLECTIVES} collectives, {added_us:.1f} us more each": COLLECTIVES * added_us,
    }
    bars = [Measurement(what=what, figure=f"{us / 1e3:.3f} ms", bar="-", holds=True) for what, us in parts_us.items()]
    total_ms = sum(parts_us.values()) / 1e3
    share = total_ms / STEP_MS
    figure = f"{total_ms:.2f} ms: {share:.2%}"
    bars.append(
        Measurement(
            what=f"together, of a step of {STEP_MS:.0f} ms", figure=figure, bar=f"<= {BAR:.0%}", holds=share <= BAR
        )
    )
    notes = NOTES.format(steps=asked.steps, rounds=asked.rounds, collectives=COLLECTIVES)
    write_section("trainer overhead", TITLE, bars, notes)
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit(main())
