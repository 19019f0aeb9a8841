"""A step of a mixture of experts against torchtitan 0.3.0 on CPU and gloo, on the same model, mesh, batch and threads.

    python -m benchmarks.training.mixture_vs_torchtitan --titan titan/bin/python [--rounds 10]

As trainer_vs_torchtitan.py, which says how to make the environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.training.trainer_vs_torchtitan import compare
from tools.report import Measurement, write_section

LAYERS, BAR = 2, 1.0
TITLE = "A step of a mixture of experts against torchtitan 0.3.0, gloo"
MESHES: dict[str, dict[str, int]] = {
    "1 rank": {"pp": 1, "dp_shard": 1, "tp": 1},
    "FSDP2 x2": {"pp": 1, "dp_shard": 2, "tp": 1},
    "EP2": {"pp": 1, "dp_shard": 2, "tp": 1, "ep": 2},
}
NOTES = f"""The first {LAYERS} layers of torchtitan's Qwen3 "debugmodel_moe" (dim 256, 64 experts of width 768, 8 for each token,
vocabulary 2048) in both, fp32, eager, 8 samples of 256 tokens a step, one thread per rank: forward, backward, clipping and
AdamW. The two take turns as in the section before, and neither balances the experts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table (of all meshes only); return 1 if a ratio is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", required=True, help="a python that has torchtitan 0.3.0")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=list(MESHES), action="append")
    options = parser.parse_args(arguments)
    bars: list[Measurement] = []
    for name in options.only or MESHES:
        bars.append(compare(name, MESHES[name], options.titan, options.rounds, bar=BAR, mixture_layers=LAYERS))
    if not options.only:
        write_section("trainer mixture torchtitan", TITLE, bars, NOTES)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
