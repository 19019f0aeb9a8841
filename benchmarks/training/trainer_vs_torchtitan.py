"""Tokens per second of this trainer against torchtitan 0.3.0 on CPU and gloo, on the same model, mesh, batch and threads.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 triton torch==<the same>
    python -m benchmarks.training.trainer_vs_torchtitan --titan titan/bin/python [--rounds 20] [--mixture]

The two alternate step by step; a ratio is the median over pairs of steps, torchtitan's seconds over ours. `--mixture` trains a
mixture of experts in place of a dense model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.training.turns import Job
from titan_ckpt.demo.ports import free_port
from tools.report import Measurement, median, spread, write_section

WARMUP, BAR, MIXTURE_BAR = 2, 1.05, 1.0
MIXTURE_LAYERS = 2
TITLE = "A training step against torchtitan 0.3.0, 6.2 M parameters, gloo"
MESHES: dict[str, dict[str, Any]] = {
    "1 rank": {"pp": 1, "dp_shard": 1, "tp": 1},
    "FSDP2 x2": {"pp": 1, "dp_shard": 2, "tp": 1},
    "TP2": {"pp": 1, "dp_shard": 1, "tp": 2},
    "PP2": {"pp": 2, "dp_shard": 1, "tp": 1},
    "FSDP2 x TP2": {"pp": 1, "dp_shard": 2, "tp": 2},
}
NOTES = """torchtitan's Llama "debugmodel" (6 layers, dim 256, vocabulary 2048) in both, fp32, eager, 8 samples of 256 tokens
a step, one thread per rank: forward, backward, clipping and AdamW; no data loading, no logging. The two take turns
step by step, and a ratio is the median over pairs of neighbouring steps, torchtitan's seconds over ours.
What differs: ours multiplies in fp32 by oneDNN, torchtitan by torch's own products, MKL's, which on an AMD processor take
twice as long; torchtitan multiplies q, k and v in one product, ours in three, as Hugging Face names them; its loss is the plain
`CrossEntropyLoss` on whole logits, the quickest that it has here, ours finds the gradient while it has the logits; torchtitan
puts FSDP around one rank too, as its own `parallelize` does; its attention is SDPA, since FlexAttention has no backward on a CPU.
Four ranks share two cores."""

MIXTURE_TITLE = "A step of a mixture of experts against torchtitan 0.3.0, gloo"
_AS_TORCHTITAN = {
    "1 rank": MESHES["1 rank"] | {"experts_dtype": "bfloat16"},
    "FSDP2 x2": MESHES["FSDP2 x2"] | {"experts_dtype": "bfloat16"},
    "EP2": MESHES["FSDP2 x2"] | {"ep": 2, "experts_dtype": "bfloat16"},
}
_IN_FP32 = {
    f"{name}, our experts in fp32": mesh | {"experts_dtype": "param_dtype"} for name, mesh in _AS_TORCHTITAN.items()
}
MIXTURE_MESHES: dict[str, dict[str, Any]] = _AS_TORCHTITAN | _IN_FP32
MIXTURE_NOTES = f"""The first {MIXTURE_LAYERS} layers of torchtitan's Qwen3 "debugmodel_moe" (dim 256, 64 experts of width 768,
8 for each token, vocabulary 2048) in both, fp32, eager, 8 samples of 256 tokens a step, one thread per rank: forward,
backward, clipping and AdamW. torchtitan multiplies in its experts in bf16 whatever the rest is in; so do ours with
`mesh.experts_dtype = "bfloat16"`. The rows without a bar compare our experts in fp32, the default, with torchtitan's in bf16.
In both, tokens go to the experts in turn (torchtitan's `debug.moe_force_load_balance`), so that all ranks have as many rows.
The two take turns as in the section before."""


def compare(
    name: str, mesh: Mapping[str, Any], titan: str, rounds: int, *, bar: float | None, mixture_layers: int = 0
) -> Measurement:
    """One mesh's row: of the dense model, or of the mixture with so many layers."""
    same = {"batch_size": 8, "seq_len": 256, "threads": 1, "mixture_layers": mixture_layers}
    options = {"ep": 1, "experts_dtype": "param_dtype", **mesh, **same}
    world_size = options["pp"] * options["dp_shard"] * options["tp"]
    with (
        Job(
            sys.executable, "benchmarks.training.titan_ckpt_rank", options, world_size=world_size, port=free_port()
        ) as ours,
        Job(titan, "benchmarks.training.torchtitan_rank", options, world_size=world_size, port=free_port()) as theirs,
    ):
        pairs = [(ours.step(), theirs.step()) for _ in range(WARMUP + rounds)][WARMUP:]
    wall, cpu = (median([getattr(b, f) / getattr(a, f) for a, b in pairs]) for f in ("wall_s", "cpu_s"))
    mine, other = ([pair[side].wall_s for pair in pairs] for side in (0, 1))
    sys.stderr.write(f"{name:32} {wall:.2f} x   processor {cpu:.2f} x   {spread(mine)}   {spread(other)}\n")
    return Measurement(
        what=name,
        figure=f"{wall:.2f} x (processor time {cpu:.2f} x; a step {spread(mine)})",
        bar="none" if bar is None else f">= {bar} x",
        holds=bar is None or wall >= bar,
        peer=spread(other),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table (of all meshes only); return 1 if a ratio is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", required=True, help="a python that has torchtitan 0.3.0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=sorted({*MESHES, *MIXTURE_MESHES}), action="append")
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts, on other meshes")
    options = parser.parse_args(arguments)
    meshes, bar, layers = (MIXTURE_MESHES, MIXTURE_BAR, MIXTURE_LAYERS) if options.mixture else (MESHES, BAR, 0)
    if unknown := set(options.only or ()) - set(meshes):
        parser.error(f"--only {unknown.pop()}: meshes are {', '.join(meshes)}")
    bars: list[Measurement] = []
    for name in options.only or meshes:
        held = None if name in _IN_FP32 else bar
        bars.append(compare(name, meshes[name], options.titan, options.rounds, bar=held, mixture_layers=layers))
        if not options.only:  # written after each mesh, so that an interrupted run keeps its results
            _write(bars, is_mixture=options.mixture)
    return int(not all(bar.holds for bar in bars))


def _write(bars: list[Measurement], *, is_mixture: bool) -> None:
    if is_mixture:
        write_section("trainer mixture torchtitan", MIXTURE_TITLE, bars, MIXTURE_NOTES)
    else:
        write_section("trainer torchtitan", TITLE, bars, NOTES)


if __name__ == "__main__":
    sys.exit(main())
