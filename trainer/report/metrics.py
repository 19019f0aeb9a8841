"""Numbers of every step: on the console, as JSON lines, in TensorBoard when it is installed."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import IO, Any, Protocol

import torch

from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import MissingExtraError
from titan_ckpt.trainer.model.decoder import ModelConfig

log = logging.getLogger(__name__)

# Dense peak of bfloat16 products per second, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


# Float8 products per bfloat16 product, on every one of them that has Float8.
FLOAT8_PEAK_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """A finished step; rates and times are means over the `steps` since the record before, of the slowest rank.

    `mfu` is against the bfloat16 peak, None where that is not known; `mfu_float8` against the Float8 peak, where the blocks'
    products are Float8. `skipped_steps` counts those without an update since step 0. Uploads are those of rank 0.
    """

    step: int
    time_s: float
    loss: float
    loss_max: float
    grad_norm: float
    lr: float
    step_s: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    data_wait_s: float
    memory_bytes: int
    tokens_seen: int
    mfu_float8: float | None = None
    steps: int = 1
    skipped_steps: int = 0
    checkpoint_stall_s: float = 0.0
    uploaded_bytes: int = 0
    upload_bytes_per_s: float = 0.0
    committed_step: int | None = None
    commit_age_s: float | None = None
    is_uploading: bool = False
    mirrored_step: int | None = None

    def line(self, total_steps: int) -> str:
        """The console's line."""
        width = len(str(total_steps))
        parts = [
            f"step {self.step:>{width}}/{total_steps}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"{self.step_s:.2f} s",
        ]
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.mfu_float8 is not None:
            parts.append(f"of float8 {self.mfu_float8:.1%}")
        if self.data_wait_s > 0.05 * self.step_s:
            parts.append(f"data {format_duration(self.data_wait_s)}")
        if self.checkpoint_stall_s:
            parts.append(f"stall {format_duration(self.checkpoint_stall_s)}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        if self.is_uploading:
            parts.append(f"uploading {format_size(self.upload_bytes_per_s)}/s")
        if self.committed_step is not None:
            parts.append(f"committed {self.committed_step}")
        return "  ".join(parts)


_STEP_FIELDS = tuple(field.name for field in fields(StepMetrics))


class Sink(Protocol):
    """Where records go."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record; `event` says of which kind."""

    def close(self) -> None:
        """Write out what is kept back."""


class JsonLines:
    """`metrics.jsonl`: one record per line, appended across restarts."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the run

    def write(self, record: dict[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard; a record is one event, which is several times quicker than one per number."""

    def __init__(self, folder: str) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").FileWriter(folder)
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary

    def write(self, record: dict[str, Any]) -> None:
        values = [
            self._summary.Value(tag=f"{record['event']}/{name}", simple_value=value)
            for name, value in record.items()
            if _is_number(name, value)
        ]
        self._writer.add_summary(self._summary(value=values), record.get("step", 0))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at wandb.ai, or in a folder with WANDB_MODE=offline; a restarted run goes on in the same one."""

    def __init__(self, project: str, *, name: str, folder: str, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:  # of wandb, or of a library that it needs
            raise MissingExtraError(error.name or "wandb", "wandb", "log.wandb") from error
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=name,
            dir=folder,
            config=dict(config),
            resume="allow",
            reinit="finish_previous",
        )
        self._run.define_metric("*", step_metric="at_step")

    def write(self, record: dict[str, Any]) -> None:
        numbers = {f"{record['event']}/{name}": v for name, v in record.items() if _is_number(name, v)}
        self._run.log(numbers | {"at_step": record.get("step", 0)})

    def close(self) -> None:
        self._run.finish()


def _is_number(name: str, value: Any) -> bool:
    return name not in ("step", "time_s") and isinstance(value, int | float) and not isinstance(value, bool)


def open_sinks(jsonl_path: str, tensorboard_folder: str | None) -> list[Sink]:
    """The sinks of rank 0 that need nothing; TensorBoard only where it is installed."""
    sinks: list[Sink] = [JsonLines(jsonl_path)]
    if tensorboard_folder is not None and importlib.util.find_spec("tensorboard") is not None:
        sinks.append(TensorBoard(tensorboard_folder))
    return sinks


class MetricsLog:
    """Rank 0's records, to every sink; on other ranks it has none and does nothing."""

    def __init__(self, sinks: list[Sink], *, total_steps: int, bar: ProgressLine | None = None) -> None:
        self._sinks, self._total_steps, self._bar = sinks, total_steps, bar

    def step(self, metrics: StepMetrics) -> None:
        """A finished step."""
        if self._sinks:
            log.info("%s", metrics.line(self._total_steps))
            self.event("step", **{name: getattr(metrics, name) for name in _STEP_FIELDS})

    def progress(self, step: int) -> None:
        """Every step, logged or not: the bar."""
        if self._bar is not None:
            self._bar.show(step, self._total_steps)

    def event(self, event: str, **fields: Any) -> None:
        """Anything else that happened: a start, a validation, a save, the end."""
        record = {"event": event, "time_s": time.time()} | fields
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            sink.close()


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward: 6 per multiplied weight, and 12 per layer, head dimension and key for attention (PaLM, app. B).

    The embedding is a look-up and counts nothing; a causal mask is not taken off.
    """
    head, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    per_layer = model.dim * (2 * head + 2 * kv + 3 * model.ffn_dim)
    weights = model.n_layers * per_layer + model.vocab_size * model.dim
    return 6.0 * weights + 12.0 * model.n_layers * head * seq_len


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak, None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def memory_bytes(device: torch.device) -> int:
    """Most memory held so far: the accelerator's, or this process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
