"""The loader's throughput against the demo's training rate, and its startup time at position 10^9.

python -m benchmarks.training.trainer_loader [--batches 400]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import BatchLoader, BatchShape, Dataset, open_dataset
from titan_ckpt.trainer.data.tokenizer import open_tokenizer
from titan_ckpt.trainer.job.rank_process import RankProcess
from titan_ckpt.trainer.job.setup import run_rank
from tools.paths import CONFIGS
from tools.report import Measurement, median, spread, timed, write_section

CONFIG = str(CONFIGS / "tiny.toml")
SEQ_LEN = 256  # of the demo
FAR, FAR_BAR_S, RATE_BAR = 10**9, 1.0, 2.0
STEPS, ROUNDS = 8, 5
TITLE = "The loader"
NOTES = """The demo's data (`configs/tiny.toml`: the standard library byte by byte, 8 samples of 256 tokens a step), one thread of
the same process; a mixture of three sources with shuffling; a rank's share of a batch of 8 data ranks. The demo's rate is that
of {steps} steps in the same run. Resuming counts from opening the dataset to the first batch in hand."""


def config_of(*sets: str) -> TrainConfig:
    """The demo's config with some values set."""
    return resolve(TrainConfig, CONFIG, list(sets)).config


def open_demo(config: TrainConfig) -> Dataset:
    """Its dataset, already tokenised."""
    tokenizer = open_tokenizer(config.data.tokenizer)
    return open_dataset(config.data, config.validation, tokenizer, seed=config.train.seed, is_writer=True)


def rate(dataset: Dataset, shape: BatchShape, batches: int) -> float:
    """Tokens per second of this rank's part, from the loader's thread to the loop."""
    loader = BatchLoader(dataset, repeat(shape), position=0)
    try:
        next(loader)
        started = time.perf_counter()
        for _ in range(batches):
            next(loader)
        seconds = time.perf_counter() - started
    finally:
        loader.close()
    samples = shape.accumulation * shape.microbatch_size
    return batches * samples * SEQ_LEN / seconds


def begin_far(config: TrainConfig, shape: BatchShape) -> None:
    """Open the dataset and take the batch at position 10^9."""
    loader = BatchLoader(open_demo(config), repeat(shape), position=FAR)
    next(loader)
    loader.close()


def demo_rate() -> float:
    """Tokens per second of the demo on one rank; the first steps are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(f"log.folder={folder}", "log.tensorboard=false", f"train.steps={STEPS}", "train.device=cpu")
        run_rank(config, RankProcess())
        records = Path(folder, "logs", "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, records) if record["event"] == "step"]
    return median([record["tokens_per_s"] for record in steps[2:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    batches = parser.parse_args(arguments).batches
    plain = config_of()
    source = '{url = "python-stdlib", weight = 1.0}'
    mixed = config_of(f"data.mixture=[{source}, {source}, {source}]", 'data.source=""')
    whole = BatchShape(global_batch_size=8, microbatch_size=4)
    part = BatchShape(global_batch_size=64, microbatch_size=4, data_rank=5, data_degree=8)
    demo = demo_rate()
    bars = []
    for what, config, shape in (
        ("one source, the whole batch", plain, whole),
        ("three sources, the whole batch", mixed, whole),
        ("three sources, rank 5 of 8", mixed, part),
    ):
        dataset = open_demo(config)
        found = median([rate(dataset, shape, batches) for _ in range(ROUNDS)])
        bars.append(
            Measurement(
                what=f"{what}: over the demo's {demo:,.0f} tok/s",
                figure=f"{found / demo:,.0f} x ({found:,.0f} tok/s)",
                bar=f">= {RATE_BAR} x",
                holds=found / demo >= RATE_BAR,
            )
        )
    far = [timed(lambda: begin_far(mixed, whole)) for _ in range(ROUNDS)]
    bars.append(
        Measurement(
            what="resuming at position 10^9", figure=spread(far), bar=f"< {FAR_BAR_S} s", holds=max(far) < FAR_BAR_S
        )
    )
    write_section("trainer loader", TITLE, bars, NOTES.format(steps=STEPS - 2))
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
