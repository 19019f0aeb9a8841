"""JSON documents that hold text of logs: torchelastic's error files, and entries that cloud services export.

Formats: torch/distributed/elastic/multiprocessing/errors/error_handler.py (`TORCHELASTIC_ERROR_FILE`: `message.message`,
`message.extraInfo.py_callstack`; `message` is a text where an agent wrote it); `gcloud logging read --format=json` (a list of
LogEntry, newest first); `aws logs get-log-events` and `filter-log-events` (`events`: `timestamp`, `message`, `logStreamName`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TIMES = ("timestamp", "time", "__REALTIME_TIMESTAMP")
_TEXTS = ("message", "textPayload", "jsonPayload", "MESSAGE", "log")


def quoted_lines(value: Any) -> list[str] | None:
    """The lines that a document holds, the oldest first; None if it is none of these."""
    if isinstance(value, dict) and isinstance(value.get("message"), dict | str) and set(value) <= _ERROR_FILE:
        return _error(value["message"])
    entries = value.get("events") if isinstance(value, dict) else value
    if not isinstance(entries, list) or not entries or not all(map(_is_entry, entries)):
        return None
    return [json.dumps(entry) for entry in sorted(entries, key=_time)]


_ERROR_FILE = {"message", "errorCode"}


def _error(message: Mapping[str, Any] | str) -> list[str] | None:
    if isinstance(message, str):
        return message.splitlines()
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = stack if isinstance(stack, str) and stack.strip() else message.get("message")
    return text.splitlines() if isinstance(text, str) else None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and any(isinstance(entry.get(key), str | dict) for key in _TEXTS)


def _time(entry: Mapping[str, Any]) -> tuple[float, str]:
    found: Sequence[Any] = [entry[key] for key in _TIMES if key in entry]
    number = found[0] if found and isinstance(found[0], int | float) else 0.0
    return float(number), str(found[0]) if found else ""
