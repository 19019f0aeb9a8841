"""`metrics.jsonl`: a run's records, one JSON object per line, appended across restarts. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias

METRICS = "metrics.jsonl"
MetricsRecord: TypeAlias = Mapping[str, Any]  # `event` and `time_s` are always there


class Event(StrEnum):
    """The kinds of records."""

    START = "start"
    STEP = "step"
    VALIDATION = "validation"
    SAVE = "save"
    EXPORT = "export"
    END = "end"


def parse_records(text: str) -> list[MetricsRecord]:
    """The records of a `metrics.jsonl`; skips lines that are not records, such as one that a crash cut short."""
    records: list[MetricsRecord] = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "event" in record and "time_s" in record:
            records.append(record)
    return records


def read_records(path: str) -> list[MetricsRecord]:
    """The records of a local file."""
    with open(path, encoding="utf-8") as file:
        return parse_records(file.read())
