"""Read the attempts of an elastic job from its metrics; one attempt per formation of its ranks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One formation of the job: its ranks, first step, losses by step, and times."""

    ranks: int
    start: int
    began_s: float
    steps: dict[int, float]
    ended_s: float


def read_attempts(run: Path) -> list[Attempt]:
    """The attempts in the metrics of `run`, in order."""
    path = run / "logs" / "metrics.jsonl"
    groups: list[list[dict[str, Any]]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if record["event"] == "start":
                groups.append([])
            if groups:
                groups[-1].append(record)
    return [_attempt(group) for group in groups]


def _attempt(records: list[dict[str, Any]]) -> Attempt:
    steps = [record for record in records if record["event"] == "step"]
    return Attempt(
        ranks=records[0]["world_size"], start=records[0]["step"], began_s=records[0]["time_s"],
        steps={record["step"]: record["loss"] for record in steps}, ended_s=records[-1]["time_s"],
    )  # fmt: skip
