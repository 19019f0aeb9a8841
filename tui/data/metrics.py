"""metrics.jsonl as columns. Truncated or damaged lines are counted and skipped: the run may still be writing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from titan_ckpt.errors import DamagedError
from titan_ckpt.parsing.json_values import parse_json_line
from titan_ckpt.store.base import Store
from titan_ckpt.tui.data.arrays import Floats

MAX_METRICS_BYTES = 256 << 20
LARGEST = 1e300
MAX_COLUMNS = 1000
_BESIDE_STEPS = ("validation", "save", "export")
_ENDS, _TIMES = ("start", "end"), ("step", "time_s")
FREE_CELLS = 1 << 20
"""Values of a table that may be missing; a larger one has at least one byte of the file for each."""
# Panels in order; each plots the first of its names found in the file.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss", "loss_mean", "train_loss", "train/loss")),
    ("throughput, tokens/s", ("tokens_per_s", "tokens_per_second", "tps", "throughput")),
    ("gradient norm", ("grad_norm", "gradient_norm")),
    ("checkpoint stall, s", ("stall_s", "save_stall_s", "checkpoint_stall_s", "ckpt_stall_s")),
    ("data wait, s", ("data_wait_s", "data_s", "data_time_s")),
    ("memory, bytes", ("memory_bytes", "max_memory_bytes", "peak_memory_bytes", "memory_peak_bytes", "rss_bytes")),
    ("learning rate", ("lr", "learning_rate")),
    ("MFU", ("mfu",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds of wall time by what they went to: steps that count, data, saves, validation, steps done again and so on, as the
    trainer's own goodput has them."""

    seconds: Mapping[str, float]
    total_s: float

    def share(self, name: str) -> float:
        """Share of the total, 0 to 1."""
        return self.seconds[name] / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Columns of numbers by name, NaN where a step has no value; `steps` is the x axis.

    `odd` are the values that were recorded as NaN or infinite, by name and step; the columns have NaN there.
    `saves` and `resumes` are the steps of these events; `uploads` the seconds that training went on beside the upload of a step;
    `goodput` is None without times.
    """

    source: str
    steps: Floats
    columns: Mapping[str, Floats]
    num_damaged: int = 0
    saves: tuple[float, ...] = ()
    resumes: tuple[float, ...] = ()
    uploads: Mapping[int, float] = field(default_factory=dict)
    goodput: Goodput | None = None
    odd: Mapping[str, Mapping[float, float]] = field(default_factory=dict)

    def panels(self) -> list[tuple[str, Floats]]:
        """(title, values) of the known panels, then of every other column that varies."""
        return [(title, self.columns[name]) for title, name in self._panels()]

    def odd_values(self) -> dict[str, Mapping[float, float]]:
        """The recorded values that are no numbers, or infinite, by the title of their panel and by step."""
        return {title: self.odd[name] for title, name in self._panels() if name in self.odd}

    def _panels(self) -> list[tuple[str, str]]:
        shown: list[tuple[str, str]] = []
        used: set[str] = set()
        for title, names in PANELS:
            name = next((name for name in names if name in self.columns), None)
            if name is not None:
                shown.append((title if title.startswith(name[:4]) else f"{title} ({name})", name))
                used.add(name)
        rest = sorted(name for name in self.columns if name not in used and name not in ("step", "time_s", "time"))
        return [*shown, *((name, name) for name in rest if name in self.odd or _changes(self.columns[name]))]


def _changes(values: Floats) -> bool:
    known = values[np.isfinite(values)]
    return bool(len(known) and known.min() < known.max())


def load_metrics(store: Store, path: str) -> Metrics:
    """Read a metrics file, at most its last 256 MB."""
    size = store.stat(path).size_bytes
    data = store.read(path, max(0, size - MAX_METRICS_BYTES))
    return parse_metric_lines(data, path)


def parse_metric_lines(data: bytes, source: str) -> Metrics:
    """Parse JSON lines, those of the last run; a step that occurs again after a restart keeps its last values.

    The trainer's other events than steps are none; their values get their name, such as `validation_loss`.
    """
    by_step: dict[float, dict[str, float]] = {}
    others: list[tuple[float, dict[str, float]]] = []
    events: list[tuple[str, dict[str, float]]] = []
    num_damaged = 0
    lines = data.splitlines()
    if lines and not data.endswith(b"\n") and _values(lines[-1]) is None:
        lines.pop()  # it is being written
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        found = _values(line)
        if found is None:
            num_damaged += 1
            continue
        event, values, odd = found
        if event == "start" and values.get("is_new"):  # what was before is of another run in the same folder
            by_step, others, events = {}, [], []
        events.append((event, values))
        step = values.get("step", float(number))
        if event in _BESIDE_STEPS:
            named = ((name, v) for name, v in {**values, **odd}.items() if name not in _TIMES)
            others.append((step, {f"{event}_{name}": v for name, v in named}))
        elif event not in _ENDS:
            by_step.setdefault(step, {}).update({**values, **odd})
    for step, values in others:
        if step in by_step:
            by_step[step].update(values)
    steps = sorted(by_step)
    names = sorted({name for values in by_step.values() for name in values})
    if "save_stall_s" in names and "checkpoint_stall_s" in names:
        names.remove("checkpoint_stall_s")  # the same stalls, each one record later
    if len(names) > MAX_COLUMNS:
        raise DamagedError(f"{source}: {len(names)} different names; no run writes more than {MAX_COLUMNS}")
    if len(names) * len(steps) > max(FREE_CELLS, len(data)):
        raise DamagedError(
            f"{source}: {len(names)} names at {len(steps)} steps, most of them missing: no run's metrics"
        )
    columns = {name: np.array([_plain(by_step[step].get(name, math.nan)) for step in steps]) for name in names}
    return Metrics(
        source=source, steps=np.array(steps, np.float64), columns=columns, num_damaged=num_damaged,
        saves=_steps_of(events, "save"), resumes=tuple(step for step in _steps_of(events, "start") if step > 0),
        uploads=uploads_of(events), goodput=goodput_of(events), odd=_odd_of(by_step),
    )  # fmt: skip


def _plain(value: float) -> float:
    return value if -LARGEST < value < LARGEST else math.nan


def _odd_of(by_step: Mapping[float, Mapping[str, float]]) -> dict[str, dict[float, float]]:
    odd: dict[str, dict[float, float]] = {}
    for step, values in sorted(by_step.items()):
        for name, value in values.items():
            if not -LARGEST < value < LARGEST:
                odd.setdefault(name, {})[step] = value
    return odd


def _steps_of(events: Sequence[tuple[str, Mapping[str, float]]], kind: str) -> tuple[float, ...]:
    return tuple(values["step"] for event, values in events if event == kind and "step" in values)


def uploads_of(events: Sequence[tuple[str, Mapping[str, float]]]) -> dict[int, float]:
    """Seconds from the end of a save's stall to its commit, by step: of those that a later record calls committed."""
    begun: dict[float, float] = {}
    found: dict[int, float] = {}
    for event, values in events:
        if "time_s" not in values:
            continue
        if event == "save" and "step" in values:
            begun[values["step"]] = values["time_s"]
        committed = values.get("committed_step", -1.0)
        if committed in begun and ("commit_age_s" in values or event == "end"):  # which waits for the last commit
            took_s = values["time_s"] - values.get("commit_age_s", 0.0) - begun.pop(committed)
            found[int(committed)] = max(took_s, 0.0)
    return found


def goodput_of(events: Sequence[tuple[str, Mapping[str, float]]]) -> Goodput | None:
    """Where the time between the first launch and the last event went; None without times of steps."""
    times = [
        values["launched_s"] if "launched_s" in values else values["time_s"]
        for _, values in events
        if "time_s" in values
    ]
    steps: dict[float, tuple[float, float]] = {}
    redone = stall = startup = validation = downtime = last_s = 0.0
    for event, values in events:
        if event == "save":
            stall += values.get("stall_s", 0.0)
        elif event == "validation":
            validation += values.get("seconds", 0.0)
        elif event == "start":  # what was done after the step from which it resumes is done again
            redone += sum(sum(steps.pop(step)) for step in [s for s in steps if s > values.get("step", 0.0)])
            if "time_s" in values and "launched_s" in values:
                startup += max(values["time_s"] - values["launched_s"], 0.0)
                downtime += max(values["launched_s"] - last_s, 0.0) if last_s else 0.0
        elif event not in (*_BESIDE_STEPS, *_ENDS) and "step_s" in values and "step" in values:
            num = max(values.get("steps", 1.0), 1.0)
            wait = num * values.get("data_wait_s", 0.0)
            redone += sum(steps.pop(values["step"], (0.0, 0.0)))
            steps[values["step"]] = (num * values["step_s"] - wait, wait)
        last_s = max(last_s, values.get("time_s", 0.0))
    if not steps or not times:
        return None
    used = {
        "steps": sum(own for own, _ in steps.values()),
        "data": sum(wait for _, wait in steps.values()),
        "saves": stall,
        "validation": validation,
        "recomputed": redone,
        "startup": startup,
        "downtime": downtime,
    }
    total = max(max(times) - min(times), sum(used.values()))
    return Goodput(seconds={**used, "other": total - sum(used.values())}, total_s=total)


def _values(line: bytes) -> tuple[str, dict[str, float], dict[str, float]] | None:
    """The event of a line, its numbers, and its values that are none or infinite; None if it is no JSON object."""
    try:
        value = parse_json_line(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    event = value.get("event")
    numbers = {str(k): float(v) for k, v in value.items() if type(v) in (int, float) and -LARGEST < v < LARGEST}
    odd = {str(k): v for k, v in value.items() if type(v) is float and k not in numbers and k not in _TIMES}
    return event if isinstance(event, str) else "", numbers, odd
