"""torchtitan's published speed and memory of Llama 3.1. Each row is a config that comes with the package.

`titan-ckpt train torchtitan/8b_8/float8 --estimate` names a row's config. Sources, all in the repository pytorch/torchtitan:

    8b_8, 8b_cp, 8b_128, 70b_256,   benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6
    405b_512, 405b_cp
    70b_tp, 8b_tp                   benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md at 2887250 (pull request 1299); no memory
    8b_h200                         benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md

Rows that could not be read, such as those of the paper's own tables (arXiv 2410.06511), are left out. How many microbatches a
pipeline ran is not published; torchtitan's default is taken, one per stage.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.recipes import find_config
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, fixed_world_size, resolve_mesh
from titan_ckpt.trainer.launch.estimate import Implementation, estimate_training
from titan_ckpt.trainer.launch.gpus import GIB, H100_500W, H200, Gpu
from titan_ckpt.trainer.launch.throughput import predict

# Bytes per logit at the peak of the loss. Eager cross-entropy: bfloat16 logits; float32 copy, log-softmax and gradient.
# Vocabulary cut by tp: DTensor's loss parallel makes two float32 temporaries besides. Compiled (June 2025): bfloat16 logits
# and gradient. Attention gets keys and values repeated to all heads (`repeat_kv`), so that is what context parallelism moves.
EAGER_LOSS = Implementation(logit_bytes=14, repeats_kv=True)
CUT_LOSS = Implementation(logit_bytes=18, repeats_kv=True)
COMPILED_LOSS = Implementation(logit_bytes=4, repeats_kv=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row: tokens per second and GPU; the largest rank's peak of reserved memory in GiB, where there is one."""

    config: str
    tokens_per_s: float
    memory_gib: float | None
    implementation: Implementation
    gpu: Gpu = H100_500W


def _rows(implementation: Implementation, folder: str, *rows: tuple[str, float, float | None]) -> list[Published]:
    return [
        Published(
            config=f"torchtitan/{folder}/{name}", tokens_per_s=rate, memory_gib=gib, implementation=implementation
        )
        for name, rate, gib in rows
    ]


ROWS = [
    *_rows(EAGER_LOSS, "8b_8", ("eager", 5762, 82.4), ("compiled", 6667, 77.0), ("float8", 8532, 76.8)),
    *_rows(
        EAGER_LOSS, "8b_cp", ("cp1", 3890, 83.9), ("cp2", 2540, 84.2), ("cp4", 1071, 84.0), ("cp8", 548, 84.5)
    ),
    *_rows(EAGER_LOSS, "8b_128", ("eager", 5605, 67.0), ("compiled", 6514, 62.0), ("float8", 8380, 61.8)),
    *_rows(CUT_LOSS, "70b_256", ("tp", 829, 71.9), ("async_tp", 876, 67.6)),
    *_rows(CUT_LOSS, "405b_512", ("1f1b", 100, 82.5), ("interleaved", 128, 72.7)),
    *_rows(CUT_LOSS, "405b_cp", ("cp1", 76, 75.3), ("cp2", 47, 75.9), ("cp4", 31, 77.1), ("cp8", 16, 84.9)),
    *_rows(
        COMPILED_LOSS, "70b_tp",
        ("bf16", 597.3, None), ("bf16_async", 652.4, None), ("tensorwise", 809.8, None),
        ("tensorwise_async", 942.4, None), ("rowwise", 599.6, None), ("rowwise_async", 624.8, None),
    ),
    *_rows(
        COMPILED_LOSS, "8b_tp",
        ("bf16", 4378, None), ("bf16_async", 4809.4, None), ("tensorwise", 5078.1, None),
        ("tensorwise_async", 5570.1, None), ("rowwise", 3708.5, None), ("rowwise_async", 3914.9, None),
    ),
    *(
        Published(config=f"torchtitan/8b_h200/{name}", tokens_per_s=rate, memory_gib=gib, implementation=COMPILED_LOSS, gpu=H200)
        for name, rate, gib in (("32", 10938, 47.96), ("64", 10753, 46.97))
    ),
]  # fmt: skip


def fitted_and_judged() -> tuple[list[Published], list[Published]]:
    """The rows in order of published tokens/s: the 1st, 3rd, 5th ... fit the model's constants, the others judge it."""
    ordered = sorted(ROWS, key=lambda row: row.tokens_per_s)
    return ordered[::2], ordered[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A published row beside its prediction with torchtitan's loss and repeated keys and values, as in docs/performance.md."""

    published: Published
    peak_bytes: float
    tokens_per_s: float

    def facts(self) -> dict[str, Any]:
        """The record of `--json`; bytes, tokens per second and GPU."""
        memory = self.published.memory_gib
        return {
            "peak_bytes": self.peak_bytes,
            "published_peak_bytes": None if memory is None else memory * GIB,
            "tokens_per_s": self.tokens_per_s,
            "published_tokens_per_s": self.published.tokens_per_s,
            "logit_bytes": self.published.implementation.logit_bytes,
        }


def compare(given: str, config: TrainConfig, mesh: MeshSpec) -> Comparison | None:
    """The published row of the config named `given`; None without one, or if `config` or `mesh` is no longer the row's."""
    path = os.path.realpath(find_config(given))
    row = next((row for row in ROWS if os.path.realpath(find_config(row.config)) == path), None)
    if row is None:
        return None
    theirs = resolve(TrainConfig, path, ()).config
    if mesh != resolve_mesh(theirs, fixed_world_size(theirs) or 1) or any(
        getattr(config, table) != getattr(theirs, table) for table in ("spec", "mesh", "train", "data", "optimizer")
    ):
        return None
    found = estimate_training(config, mesh, implementation=row.implementation)
    speed = predict(config, mesh, row.gpu, implementation=row.implementation)
    return Comparison(published=row, peak_bytes=found.memory.total, tokens_per_s=speed.tokens_per_s)
