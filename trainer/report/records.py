"""`metrics.jsonl`: a run's records, one JSON object per line, appended across restarts. No torch.

A folder may hold several runs, one after another, as runs/unsaved does: the first start of each has `is_new` 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

from titan_ckpt.parsing.json_values import parse_json_line

METRICS = "metrics.jsonl"
MetricsRecord: TypeAlias = Mapping[str, Any]  # `event` and `time_s` are always there


class Event(StrEnum):
    """The kinds of records."""

    START = "start"
    STEP = "step"
    VALIDATION = "validation"
    SAVE = "save"
    EXPORT = "export"
    OWN = "own"  # numbers of a user's hooks
    END = "end"


LARGEST = 1e18
# What readers compute with: a number in every record of the event; and a number, or null for a loss that is not finite.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    Event.START: ("step",),
    Event.STEP: ("step", "step_s", "data_wait_s"),
    Event.VALIDATION: ("step", "seconds"),
    Event.SAVE: ("step", "stall_s"),
}
_OPTIONAL = ("loss", "tokens_per_s", "committed_step", "launched_s", "steps")


def parse_records(text: str) -> list[MetricsRecord]:
    """The records of a `metrics.jsonl`; skips lines that are not records, such as one that a crash cut short."""
    records: list[MetricsRecord] = []
    for line in text.splitlines():
        try:
            record = parse_json_line(line)
        except ValueError:
            continue
        if isinstance(record, dict) and _is_record(record):
            records.append(record)
    return records


def _is_record(record: Mapping[str, Any]) -> bool:
    """Whether it has its event, and numbers wherever readers of that event compute with them."""
    event = record.get("event")
    if not isinstance(event, str):
        return False
    needed = ("time_s", *_NUMBERS.get(event, ()))
    given = [record[name] for name in _OPTIONAL if record.get(name) is not None]
    return all(_is_number(value) for value in (*map(record.get, needed), *given))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST


def read_records(path: str) -> list[MetricsRecord]:
    """The records of a local file."""
    with open(path, encoding="utf-8") as file:
        return parse_records(file.read())


def last_run(records: Sequence[MetricsRecord]) -> Sequence[MetricsRecord]:
    """The records of the last run in a folder: from the last start with `is_new` on, which goes on from nothing before it."""
    starts = [at for at, record in enumerate(records) if record["event"] == Event.START and record.get("is_new")]
    return records[starts[-1] :] if starts else records
