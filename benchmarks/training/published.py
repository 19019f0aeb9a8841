"""Predicted against published: memory and tokens per second of torchtitan's tables, and the fit of the model's constants.

    python -m benchmarks.training.published          write the sections of docs/performance.md
    python -m benchmarks.training.published --fit    print the constants for trainer/launch/throughput.py

The fit minimises the squared logarithms of predicted over published tokens/s on the fitted half, with a prior for each constant
from its source, so that rows which say little about a constant leave it where it was.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.recipes import find_config
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, fixed_world_size, resolve_mesh
from titan_ckpt.trainer.launch.estimate import estimate_training
from titan_ckpt.trainer.launch.gpus import GIB
from titan_ckpt.trainer.launch.published import Published, fitted_and_judged
from titan_ckpt.trainer.launch.throughput import FITTED, Efficiency, Throughput, predict
from tools.report import Measurement, write_section

# Where the fit starts, and what it is drawn to. product x full_power: the best bfloat16 product measured on an H100 SXM
# reaches 80 % of the peak (github.com/mag-/gpu_benchmark); attention: FlashAttention-2 reaches 35 % on an H100 (arXiv
# 2407.08608). The others are guesses.
PRIOR = Efficiency(
    product=0.67, float8=0.5, rowwise=0.5, attention=0.35, full_power=1.2, memory=0.8, eager=2.0, link=0.8,
    async_tp=0.5, ring=0.5,
)  # fmt: skip
FACTORS = (
    "full_power",
    "eager",
    "ring",
)  # fitted by their logarithms; the others are shares, by log(share / (1 - share))
PRIOR_SPREAD, NOISE = 0.5, 0.05  # standard deviations: of a constant around its prior, of log(predicted / published)
NAMES = [field.name for field in fields(Efficiency)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published row with its config, read once."""

    published: Published
    config: TrainConfig
    mesh: MeshSpec

    def predict(self, efficiency: Efficiency = FITTED) -> Throughput:
        """Its predicted speed."""
        return predict(
            self.config, self.mesh, self.published.gpu, efficiency=efficiency,
            implementation=self.published.implementation,
        )  # fmt: skip

    def log_ratio(self, efficiency: Efficiency = FITTED) -> float:
        """The logarithm of predicted over published tokens/s."""
        return float(np.log(self.predict(efficiency).tokens_per_s / self.published.tokens_per_s))


def read(rows: Sequence[Published]) -> list[Row]:
    """The rows with their configs."""
    found = []
    for row in rows:
        config = resolve(TrainConfig, find_config(row.config), ()).config
        found.append(Row(published=row, config=config, mesh=resolve_mesh(config, fixed_world_size(config) or 1)))
    return found


def fit(rows: Sequence[Row], rounds: int = 30) -> Efficiency:
    """The most likely constants, by damped Gauss-Newton."""
    start = np.array([_to_point(name, getattr(PRIOR, name)) for name in NAMES])

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency = _efficiency(point)
        rates = [row.log_ratio(efficiency) / NOISE for row in rows]
        return np.array([*rates, *((point - start) / PRIOR_SPREAD)])

    point = start.copy()
    for _ in range(rounds):
        now = residuals(point)
        slopes = np.array([residuals(point + step) - now for step in np.eye(len(point)) * 1e-5]).T / 1e-5
        change = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        point = point + 0.5 * np.clip(change, -0.5, 0.5)
    return _efficiency(point)


def _to_point(name: str, value: float) -> float:
    return math.log(value) if name in FACTORS else math.log(value / (1 - value))


def _efficiency(point: NDArray[np.float64]) -> Efficiency:
    raw = dict(zip(NAMES, (float(x) for x in point), strict=True))
    return Efficiency(**{name: math.exp(x) if name in FACTORS else 1 / (1 + math.exp(-x)) for name, x in raw.items()})


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; values must differ."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def left_out(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Predicted and published tokens/s of each row by constants fitted on all tables but its own."""
    pairs = []
    for table in sorted({_table(row) for row in rows}):
        efficiency = fit([row for row in rows if _table(row) != table])
        mine = [row for row in rows if _table(row) == table]
        pairs += [(row.predict(efficiency).tokens_per_s, row.published.tokens_per_s) for row in mine]
    return pairs


def _table(row: Row) -> str:
    return row.published.config.split("/")[1]


def median_error(pairs: Sequence[tuple[float, float]]) -> float:
    """The median of |predicted / published - 1|."""
    return statistics.median(abs(one / other - 1) for one, other in pairs)


def rates(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Predicted and published tokens/s."""
    return [(row.predict().tokens_per_s, row.published.tokens_per_s) for row in rows]


def memory_gib(row: Row) -> float:
    """The estimated peak."""
    found = estimate_training(row.config, row.mesh, implementation=row.published.implementation)
    return found.memory.total / GIB


def _errors(pairs: Sequence[tuple[float, float]]) -> tuple[str, float, float]:
    median, worst = median_error(pairs), max(abs(one / other - 1) for one, other in pairs)
    spearman = rank_correlation([one for one, _ in pairs], [other for _, other in pairs])
    return f"{median:.1%}, at most {worst:.1%}; {spearman:.3f}", median, spearman


def bars(fitted: Sequence[Row], judged: Sequence[Row]) -> list[Measurement]:
    """The figures to reach."""
    rows = [*fitted, *judged]
    pairs = [(memory_gib(row), row.published.memory_gib) for row in rows if row.published.memory_gib is not None]
    worst = max(abs(one / other - 1) for one, other in pairs)
    found = [
        Measurement(
            what=f"memory of {len(pairs)} rows: largest error", figure=f"{worst:.1%}", bar="<= 10%", holds=worst <= 0.1
        )
    ]
    for what, part, bar in (
        (f"tokens/s of the {len(judged)} rows not fitted", rates(judged), "<= 15%; >= 0.9"),
        (f"tokens/s of the {len(fitted)} rows fitted", rates(fitted), "-"),
        (f"tokens/s of {len(rows)} rows, constants fitted on the other tables", left_out(rows), "-"),
    ):
        figure, median, spearman = _errors(part)
        holds = bar == "-" or (median <= 0.15 and spearman >= 0.9)
        found.append(Measurement(what=f"{what}: median error, largest; Spearman", figure=figure, bar=bar, holds=holds))
    return found


def table(fitted: Sequence[Row], judged: Sequence[Row]) -> str:
    """Each row: memory and tokens/s, published and predicted."""
    lines = []
    for row in sorted([*fitted, *judged], key=lambda row: row.published.config):
        there, found = row.published, row.predict()
        gib = "" if there.memory_gib is None else f"{there.memory_gib:.1f} / {memory_gib(row):.1f}"
        off = "" if there.memory_gib is None else f"{memory_gib(row) / there.memory_gib - 1:+.1%}"
        causes = sorted(((getattr(found.step, f.name), f.name) for f in fields(found.step)), reverse=True)
        share = ", ".join(f"{name} {seconds / found.step.total:.0%}" for seconds, name in causes[:2])
        lines.append([
            there.config.removeprefix("torchtitan/"), gib, off, f"{there.tokens_per_s:,.6g}", f"{found.tokens_per_s:,.5g}",
            f"{found.tokens_per_s / there.tokens_per_s - 1:+.1%}", f"{found.mfu:.0%}", share,
            "fitted" if row in fitted else "judged",
        ])  # fmt: skip
    headers = ["config", "GiB", "off", "tokens/s", "predicted", "off", "MFU", "most of the step", "row is"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


NOTES = """\
Tokens/s are per GPU. GiB: published / estimated with torchtitan's loss (4, 14 or 18 bytes per logit, ours has 8) and its keys and
values, repeated to all heads over cp; the estimate's terms were written with these peaks in view, so no row is held out. Both
columns are the last lines of `titan-ckpt train torchtitan/NAME --estimate`; the peak above them is our trainer's, which has no
published figure. MFU: predicted, against 989.4 TFLOPS, attention counted as PaLM does. Sources and assumptions:
trainer/launch/published.py. Rows in order of published tokens/s: the 1st, 3rd, 5th ... fit the constants, the others judge them;
the rule was set before the first fit.

{table}

Constants: {constants}."""


def main(words: Sequence[str]) -> int:
    """Write the section, or print the constants."""
    fitted, judged = (read(rows) for rows in fitted_and_judged())
    if "--fit" in words:
        found = fit(fitted)
        sys.stdout.write("".join(f"{name}={getattr(found, name):.3g}, " for name in NAMES) + "\n")
        return 0
    found_bars = bars(fitted, judged)
    constants = ", ".join(f"{name} {getattr(FITTED, name):g}" for name in NAMES)
    title = "Predicted memory and speed beside torchtitan's published tables"
    write_section("published", title, found_bars, NOTES.format(table=table(fitted, judged), constants=constants))
    return 0 if all(bar.holds for bar in found_bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
