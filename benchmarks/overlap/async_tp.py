"""Asynchronous tensor parallelism on slow links: the ring of products against collectives and products one after the other.

    python -m benchmarks.overlap.async_tp [--rounds 25]

Two ranks over gloo, whose connections have 1 ms and 100 MB/s in each direction (tools/slow_link.py). Each round times, in
turn, the parts (a rank's share of the products, a transfer, each collective) and both ways of doing the whole. What the model
predicts from the parts is compared with the whole. Writes a section of docs/performance.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.training.turns import Job
from titan_ckpt.demo.ports import free_port
from tools.report import Measurement, median, spread, write_section
from tools.slow_link import SlowLinks

RANKS, LATENCY_S, BYTES_PER_S = 2, 1e-3, 100e6
WARMUP, MODEL_BAR = 2, 0.20
ACTIONS = (
    "product", "transfer", "all-gather", "reduce-scatter", "gathered, plain", "gathered, ring", "summed, plain", "summed, ring",
)  # fmt: skip
TITLE = "Asynchronous tensor parallelism: two ranks, 1 ms and 100 MB/s"
NOTES = """{tokens} tokens, weights of {width} x {width}, float32, one thread per rank; a transfer carries {mb:.1f} MB.
The model: with P ranks, a rank's share of the products p, the transfers of a ring t and a collective c, plain takes c + P p and
the ring p + max((P - 1) p, t); measured and predicted gains are medians of the gains of {rounds} rounds, whose medians were
product {product}, transfer {transfer}, all-gather {gather}, reduce-scatter {scatter}.
gloo's reduce-scatter is an all-reduce (torch 2.13), so it moves twice what the ring does."""


def measure(tokens: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each action, of the slowest rank, by round."""
    with SlowLinks(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as links:
        options = {"threads": 1, "tokens": tokens, "width": width, "relay": links.address}
        with Job(
            sys.executable, "benchmarks.overlap.async_tp_rank", options, world_size=RANKS, port=free_port()
        ) as job:
            found: dict[str, list[float]] = {name: [] for name in ACTIONS}
            for _ in range(WARMUP + rounds):
                for seconds in found.values():
                    job.step()  # the barrier
                    seconds.append(job.step().wall_s)
    return {name: seconds[WARMUP:] for name, seconds in found.items()}


def row(name: str, collective: str, seconds: dict[str, list[float]]) -> Measurement:
    """One decomposition: measured gain against predicted gain."""
    parts = zip(seconds["product"], seconds["transfer"], seconds[collective], strict=True)
    predicted = median([(c + RANKS * p) / (p + max((RANKS - 1) * p, t)) for p, t, c in parts])
    plain, ring = seconds[f"{name}, plain"], seconds[f"{name}, ring"]
    gain = median([a / b for a, b in zip(plain, ring, strict=True)])
    return Measurement(
        what=f"products {name}, ring over plain", figure=f"{gain:.2f} x faster, predicted {predicted:.2f} x ({spread(ring)})",
        bar=f"within {MODEL_BAR:.0%}, > 1 x", holds=gain > 1.0 and abs(gain / predicted - 1) <= MODEL_BAR, peer=spread(plain),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    asked = parser.parse_args(arguments)
    seconds = measure(asked.tokens, asked.width, asked.rounds)
    bars = [row("gathered", "all-gather", seconds), row("summed", "reduce-scatter", seconds)]
    notes = NOTES.format(
        tokens=asked.tokens, width=asked.width, rounds=asked.rounds, mb=asked.tokens // RANKS * asked.width * 4 / 1e6,
        product=spread(seconds["product"]), transfer=spread(seconds["transfer"]), gather=spread(seconds["all-gather"]),
        scatter=spread(seconds["reduce-scatter"]),
    )  # fmt: skip
    write_section("async tp", TITLE, bars, notes)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
