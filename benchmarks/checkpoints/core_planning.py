"""Planning a save of a state with 10,000 values on one rank, by us and by DCP: flatten, check, serialise, divide. No data moves.

python -m benchmarks.checkpoints.core_planning [--values 10000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from titan_ckpt.saving.agreement import prepare
from titan_ckpt.saving.options import SaveRequest
from tools.report import Measurement, interleave, median, write_section

MOST_S = 0.05


def states_of(count: int) -> dict[str, dict[str, Any]]:
    """States with `count` values: small tensors, numbers in mappings, half of each."""
    tensors = {f"layers.{n}.weight": torch.full((4,), float(n)) for n in range(count)}
    numbers = {f"group_{n}": {"step": n, "lr": n / 10} for n in range(count // 2)}
    half = {name: tensors[name] for name in [*tensors][: count // 2]}
    return {
        "tensors": {"model": tensors},
        "numbers": {"optimizer": numbers},
        "half of each": {"model": half, "optimizer": dict([*numbers.items()][: count // 4])},
    }


def processor_s(action: Callable[[], object]) -> float:
    """Run `action`; the seconds of processor time it took on this thread, which other load on the machine hardly changes.

    Without the garbage collector, as timeit does: what one case leaves behind would be counted in the next one.
    """
    gc.collect()
    gc.disable()
    try:
        started = time.thread_time()
        action()
        return time.thread_time() - started
    finally:
        gc.enable()


def plan_by_dcp(state: dict[str, Any]) -> None:
    """All that DCP's default planner does before a save of one rank."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(plans[0])


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    for kind, state in states_of(arguments.values).items():
        found = interleave(
            {
                "ours": partial(processor_s, partial(prepare, state, SaveRequest(step=1))),
                "DCP": partial(processor_s, partial(plan_by_dcp, state)),
            },
            rounds=arguments.rounds,
        )
        ours, theirs = median(found["ours"]), median(found["DCP"])
        rows.append(
            Measurement(
                what=f"planning {arguments.values:,} values: {kind}", figure=f"{1000 * ours:.0f} ms",
                bar=f"<= {1000 * MOST_S:.0f} ms", holds=ours <= MOST_S, peer=f"DCP's planner {1000 * theirs:.0f} ms",
            )
        )  # fmt: skip
    notes = (
        "Processor time of one thread, without the garbage collector; medians. Values are made bytes here, too,\n"
        "which DCP's planner leaves for the write."
    )
    write_section("core-planning", f"Planning a save of {arguments.values:,} values on one rank", rows, notes)


if __name__ == "__main__":
    main()
