"""Where rank 0's records go: `metrics.jsonl`, TensorBoard if it is installed, Weights & Biases on request."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import IO, Any, Protocol

from titan_ckpt.console.output import are_events_wanted, write_event
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.errors import MissingExtraError, NotFoundError, StoreError
from titan_ckpt.format.names import LOGS
from titan_ckpt.location import redact_values
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.report.logs import RunFolder
from titan_ckpt.trainer.report.metrics import StepMetrics
from titan_ckpt.trainer.report.records import METRICS, Event

log = logging.getLogger(__name__)
_STEP_FIELDS = tuple(field.name for field in fields(StepMetrics))


class Sink(Protocol):
    """A destination of records."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record; its kind is `event`."""

    def close(self) -> None:
        """Flush and close."""


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


class StderrEvents:
    """The records as events on stderr."""

    def write(self, record: dict[str, Any]) -> None:
        write_event(**record)

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoard:
    """Event files for TensorBoard; one event per record is several times faster than one per number."""

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
    """A run at wandb.ai, or in a folder with WANDB_MODE=offline; a restarted run continues the same one."""

    def __init__(self, project: str, *, name: str, folder: str, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:  # wandb itself, or one of its dependencies
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


class MetricsLog:
    """Rank 0's records, written to every sink; without sinks (on other ranks) it does nothing."""

    def __init__(self, sinks: list[Sink], *, total_steps: int, bar: ProgressLine | None = None) -> None:
        self._sinks, self._total_steps, self._bar = sinks, total_steps, bar

    def step(self, metrics: StepMetrics) -> None:
        """Log and write a finished step."""
        if self._sinks:
            log.info("%s", metrics.line(self._total_steps))
            self.event(Event.STEP, **{name: getattr(metrics, name) for name in _STEP_FIELDS})

    def progress(self, step: int) -> None:
        """Move the bar; called after every step, logged or not."""
        if self._bar is not None:
            self._bar.show(step, self._total_steps)

    def event(self, event: Event, **fields: Any) -> None:
        """Write a record of kind `event`, without secrets."""
        record = {"event": event, "time_s": time.time()} | redact_values(fields)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            sink.close()


def open_metrics_log(
    folder: RunFolder,
    *,
    tensorboard: bool,
    wandb: str,
    config: Mapping[str, Any],
    total_steps: int,
    bar: ProgressLine | None,
) -> MetricsLog:
    """Rank 0's log. `wandb` is a project or empty, `config` what is shown there."""
    remote: list[Sink] = []
    if wandb:  # first: it may raise, and then nothing else is open
        remote.append(WeightsAndBiases(wandb, name=os.path.basename(folder.root), folder=folder.root, config=config))
    sinks: list[Sink] = [JsonLines(folder.file(METRICS))]
    if tensorboard and importlib.util.find_spec("tensorboard") is not None:
        sinks.append(TensorBoard(os.path.join(folder.root, "tensorboard")))
    if are_events_wanted():
        sinks.append(StderrEvents())
    return MetricsLog([*sinks, *remote], total_steps=total_steps, bar=bar)


def fetch_history(folder: RunFolder, tiers: Sequence[str]) -> None:
    """Copy the records of the run so far from the nearest tier that has them, for a run that resumes on another machine."""
    for url in tiers:
        if not os.path.exists(folder.file(METRICS)) and not folder.is_at(url):
            _fetch(url, folder.file(METRICS))


def _fetch(url: str, path: str) -> None:
    data = read_history(url)
    if data:
        with open(path, "wb") as file:
            file.write(data)


def read_history(url: str) -> bytes:
    """The records of the run at `url`; empty if there are none, or if they cannot be read, which is said."""
    try:
        return open_store(url).read(f"{LOGS}/{METRICS}")
    except NotFoundError:
        return b""
    except StoreError as error:
        log.warning("the history of metrics was not fetched: %s", error)
        return b""
